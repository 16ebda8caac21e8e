"""vLLM engines for tests: real ones, which another test has left if possible, because starting one takes a second."""

from pathlib import Path
from typing import Any
from weakref import finalize

from staleflow.rollout.options import EngineOptions
from staleflow.rollout.vllm import VllmEngine, start

_free: dict[Any, list[Any]] = {}


class Pooled(VllmEngine):
    leave: finalize

    def _shut_down(self) -> None:
        self.leave()


def pooled(folder: Path, options: EngineOptions, version: int, **arguments: Any) -> Pooled:
    """An engine with the weights of the folder and no requests; when it is closed or forgotten, the next one is made of
    it."""
    key = folder, options, tuple(sorted(arguments.items()))
    free = _free.setdefault(key, [])
    llm = free.pop() if free else start(folder, options, arguments)
    llm.abort_request(list(llm.output_processor.request_states), internal=True)
    llm.reset_prefix_cache(reset_running_requests=True)
    engine = Pooled(llm, folder, options, version=-2)
    engine.pull(lambda _: version, version)
    engine.leave = finalize(engine, free.append, llm)
    return engine
