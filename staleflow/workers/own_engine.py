"""The user's own engine until its first token: a mistake in it is told from bad luck.

    engine = watched(make_engine(name, ...), name)

What the user's code raises in ``submit`` or ``step`` before there is a token, the next engine would probably raise at
the same place: it becomes a ``FirstTokenError``, one line with the setting and the line of code. What may pass (memory,
a device, a connection) and whatever comes after the first token are raised as they are. Either way the process dies;
who starts another one in its place decides by that whether to (``runtime/local/crew.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from staleflow.errors import ConfigError
from staleflow.registry import place_of
from staleflow.rollout.engine import Engine, Request, StepOutput
from staleflow.rollout.options import ENGINES


class FirstTokenError(ConfigError):
    """The user's own engine has failed before its first token."""


def watched(engine: Engine, name: str) -> Engine:
    """``name``: as in ``rollout.engine``. What is built in is given back as it is."""
    return engine if ENGINES.key(name) is not None else cast(Engine, _Watched(engine, name))


class _Watched:
    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._files = _files(name.partition(":")[0], type(engine).__module__)
        self._made = 0
        """Tokens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._tried(self._engine.submit, requests)

    def step(self) -> StepOutput:
        output = self._tried(self._engine.step)
        if not self._made and not hasattr(output, "made"):
            raise FirstTokenError(
                f"rollout.engine={self._name}: step returned an object of the type {type(output).__name__}: "
                "return a StepOutput"
            )
        self._made += output.made
        return output

    def _tried(self, method: Callable[..., Any], *given: Any) -> Any:
        try:
            return method(*given)
        except Exception as error:  # whatever the user's code raises
            if self._made or may_pass(error) or not (place := place_of(error, *self._files)):
                raise
            raise FirstTokenError(ENGINES.failure(self._name, error, place)) from error


def may_pass(error: Exception) -> bool:
    """Whether another engine, or the same one later, may be spared it."""
    import torch  # where an engine is at work it is loaded anyway

    of_a_device = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    return isinstance(error, (MemoryError, OSError, *of_a_device))


def _files(*modules: str) -> list[str]:
    """Of those that are the user's."""
    found = (getattr(sys.modules.get(each), "__file__", None) for each in modules if not _ours(each))
    return [each for each in found if each is not None]


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "staleflow"
