"""StaleFlow: asynchronous RL post-training of language models under a strict staleness bound.

    import staleflow as sf

    def correct(problem, response):
        return float(response.text.strip() == problem.facts["answer"])

    config = sf.load("plain", ["model=models/qwen", "data.chat=true", "steps=100"])
    result = sf.train(config, reward=correct, data="train.jsonl")
    print(result.reward, result.checkpoint)

Everything here is loaded when it is first used, so that importing the package is cheap.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staleflow.api.result import Interrupted, Result
    from staleflow.api.study import compare, plan, simulate
    from staleflow.api.train import train
    from staleflow.config import Config
    from staleflow.config.loading import load
    from staleflow.errors import ConfigError, RunError, StaleFlowError
    from staleflow.protocol import StalenessLedger
    from staleflow.reward.function import Response, ServiceAwayError
    from staleflow.rollout.engine import Engine, Request, StepOutput, WeightSource
    from staleflow.rollout.options import EngineOptions, Sampling
    from staleflow.tasks.task import Problem, Task

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "EngineOptions",
    "Interrupted",
    "Problem",
    "Request",
    "Response",
    "Result",
    "RunError",
    "Sampling",
    "ServiceAwayError",
    "StaleFlowError",
    "StalenessLedger",
    "StepOutput",
    "Task",
    "WeightSource",
    "__version__",
    "compare",
    "load",
    "plan",
    "simulate",
    "train",
]

_WHERE = {
    "staleflow.api.result": ("Interrupted", "Result"),
    "staleflow.api.study": ("compare", "plan", "simulate"),
    "staleflow.api.train": ("train",),
    "staleflow.config": ("Config", "load"),
    "staleflow.errors": ("ConfigError", "RunError", "StaleFlowError"),
    "staleflow.protocol": ("StalenessLedger",),
    "staleflow.reward.function": ("Response", "ServiceAwayError"),
    "staleflow.rollout.engine": ("Engine", "Request", "StepOutput", "WeightSource"),
    "staleflow.rollout.options": ("EngineOptions", "Sampling"),
    "staleflow.tasks.task": ("Problem", "Task"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}


class _Package(ModuleType):
    """``simulate`` is a function here, although there is a package of that name: importing that does not hide it."""

    @property
    def simulate(self) -> Any:
        return _loaded("simulate")

    @simulate.setter
    def simulate(self, _: Any) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    return _loaded(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _loaded(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
