"""What a task is: problems by number, the same ones for the same seed, and a verifier.

A problem is a value that can be written as JSON, so it can be sent to a reward worker on another machine. Its split
depends only on the problem itself (``held_out``): not on the seed, the order or the size of a run. So what is held out
once is held out of every warm start and every run::

    task = Adder(seed=0)
    problem = task.problem(7)                     # the same problem whenever and wherever it is asked for
    reward = task.verify(problem, task.solve(problem))
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from staleflow.errors import StaleFlowError

Split = Literal["train", "held-out"]


class TaskError(StaleFlowError, ValueError):
    """Bad input to a task or a data source, in one line with the fix."""


Messages = list[dict[str, Any]]
Prompt = str | tuple[int, ...] | Messages


class Problem(NamedTuple):
    """What the model is asked, and what the verifier must know."""

    prompt: Prompt
    """Text; messages, each with ``role`` and ``content``; or token ids where the task has its own vocabulary."""
    facts: Mapping[str, Any]
    """Plain JSON values: the right answer, the entry of a data set."""


@runtime_checkable
class Task(Protocol):
    def problem(self, index: int, split: Split = "train") -> Problem:
        """The problem of this number; there is one for every number from 0."""
        ...

    def verify(self, problem: Problem, tokens: Sequence[int]) -> float:
        """The reward of a response."""
        ...


def digest(*parts: object) -> int:
    """A hash of 64 bits that depends only on the parts: not on the process, the machine or Python's hash seed."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def held_out(*key: object, one_in: int = 10) -> bool:
    """Whether the problem with this key is kept for evaluation."""
    return digest("held-out", *key) % one_in == 0
