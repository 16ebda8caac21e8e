"""The numbered prompts of a run: the trajectory server draws from them, and the reward looks problems up.

Both kinds are pure functions of the prompt's number, so a resumed run, a replacement for a lost group and a reward
worker all see the same problem, and that number is the only cursor to save::

    prompts = DataPrompts(read_jsonl("train.jsonl"), encode=tokenizer.encode, seed=0, max_tokens=512)
    prompts.tokens(0), prompts.ids(0)       # for the trajectory server
    prompts.problem(0)                      # for the reward
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import lru_cache

import numpy as np

from staleflow.servers.payloads import TOKEN
from staleflow.tasks.order import Order
from staleflow.tasks.task import Messages, Problem, Split, Task, TaskError, digest

Encode = Callable[[str | Messages], Sequence[int]]
RECENT = 4096
"""Encoded prompts that are kept: a group needs its prompt several times within a short while."""


class DataPrompts:
    """Prompts from a finite data set, shuffled in every epoch.

    Prompts longer than ``max_tokens`` are left out before anything is numbered. Which ones depends only on the data,
    the encoder and the limit, so a resume stays exact. For this every prompt is encoded once at the start; only lengths
    are kept.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        encode: Encode,
        seed: int = 0,
        max_tokens: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        lengths: list[int] = []
        seen = hashlib.blake2b(repr((seed, max_tokens, shuffle)).encode(), digest_size=8)
        for problem in problems:
            ids = _bytes(_encoded(problem, encode))
            lengths.append(len(ids) // TOKEN.itemsize)
            seen.update(len(ids).to_bytes(8, "little") + ids + repr(problem.facts).encode(errors="surrogatepass"))
        self.fingerprint = seen.hexdigest()
        """Equal for data in which every number stands for the same problem; a resume compares it."""
        self._kept = [at for at, length in enumerate(lengths) if 0 < length <= (max_tokens or length)]
        self.too_long = sum(length > (max_tokens or length) for length in lengths)
        self.empty = lengths.count(0)
        """Items that are left out."""
        self.longest = max(lengths, default=0)
        if problems and not self._kept:
            raise TaskError(
                f"all {len(problems)} prompts are empty or longer than {max_tokens} tokens (shortest: {min(lengths)}): "
                "raise the limit"
            )
        self.order = Order(len(self._kept), seed, epochs, shuffle)
        self._problems = problems
        self._lengths = lengths
        self._bytes = lru_cache(RECENT)(lambda item: _bytes(_encoded(problems[item], encode)))

    def tokens(self, prompt: int) -> int | None:
        place = self.order.place(prompt)
        return None if place is None else self._lengths[self._kept[place[1]]]

    def ids(self, prompt: int) -> bytes:
        return self._bytes(self.item(prompt))

    def problem(self, prompt: int) -> Problem:
        return self._problems[self.item(prompt)]

    def item(self, prompt: int) -> int:
        """The index of a prompt in the data as it was read."""
        place = self.order.place(prompt)
        if place is None:
            raise TaskError(f"prompt {prompt} is past the end of the data: {self.order.epochs} epochs were asked for")
        return self._kept[place[1]]


class TaskPrompts:
    """Prompts from a task: prompt ``n`` is problem ``n``, without end."""

    def __init__(self, task: Task, split: Split = "train", encode: Encode | None = None) -> None:
        self.task = task
        settings = repr(task) if is_dataclass(task) else ""  # any other object's text may hold its address
        self.fingerprint = f"{digest('task', type(task).__qualname__, settings, split):016x}"
        self._encode = encode
        self.problem = lru_cache(RECENT)(lambda prompt: task.problem(prompt, split))

    def tokens(self, prompt: int) -> int | None:
        return len(_encoded(self.problem(prompt), self._encode))

    def ids(self, prompt: int) -> bytes:
        return _bytes(_encoded(self.problem(prompt), self._encode))


def _encoded(problem: Problem, encode: Encode | None) -> Sequence[int]:
    if isinstance(problem.prompt, tuple):
        return problem.prompt
    if encode is None:
        raise TaskError("the task has text prompts: give the encode function of a tokenizer")
    return encode(problem.prompt)


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, TOKEN).tobytes()
