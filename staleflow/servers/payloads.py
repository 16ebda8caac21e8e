"""What trajectories are made of: token ids and behaviour log-probabilities, as compact arrays.

A prompt or a trajectory costs 4 bytes a token, and 4 more for each log-probability; nothing is kept as a list of
numbers. Tokens arrive in chunks (``Chunk``), are checked once, and are handed out as arrays that share their memory::

    payloads = Payloads(Limits(max_tokens=4096, max_prompt_tokens=1024, vocab_size=32_000))
    payloads.add("p0/0", payloads.checked("p0/0", known=0, total=3, chunk=Chunk.of(0, [5, 6, 7], [-0.1, -2.0, -0.3])))
    payloads.tokens("p0/0")       # array([5, 6, 7], dtype=int32)

**The memory limit** is kept by counting the worst case: a trajectory that may still grow counts as if it had
``max_tokens``, one that has ended counts what it has. A group is admitted only if that fits (``room_for``). So nothing
that was admitted is ever refused for lack of memory, and the limit is never exceeded; what waits is the next prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from staleflow.types import LOGPROB, TOKEN, Chunk, Row

TOKEN_BYTES = TOKEN.itemsize + LOGPROB.itemsize
LOGPROB_SLACK = float(np.float32(1e-3))
"""A log-probability may come out a little above zero by rounding. (Itself a float32: all comparisons agree.)"""
FEW_BYTES = 1024 if sys.byteorder == "little" else 0
"""Up to here Python's own loops are faster than calling numpy."""


class BadReportError(ValueError):
    """A report whose content cannot be true; the message names the trajectory. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int
    """Most tokens a trajectory may generate."""
    max_prompt_tokens: int
    vocab_size: int
    memory: int | None = None
    """Most bytes of payload in memory; None: no limit."""
    max_given: int = 0
    """Most tokens that an environment may give to a trajectory, besides."""

    @property
    def trajectory_bytes(self) -> int:
        """What a trajectory needs at worst."""
        return (self.max_tokens + self.max_given) * TOKEN_BYTES

    def group_bytes(self, members: int, prompt_tokens: int | None = None) -> int:
        """What a group needs at worst."""
        prompt = self.max_prompt_tokens if prompt_tokens is None else prompt_tokens
        return prompt * TOKEN.itemsize + members * self.trajectory_bytes

    def check(self, groups: int, members: int) -> None:
        """With room for fewer groups than a step trains on, no step would ever be complete."""
        least = groups * self.group_bytes(members)
        if self.memory is not None and self.memory < least:
            raise ValueError(
                f"the memory limit of {self.memory:,} bytes cannot hold one step of {groups} groups of {members} "
                f"trajectories with {self.max_tokens} tokens: set it to at least {least:,}, or make the step smaller"
            )


class _Arrays:
    """The arrays of one trajectory: as they came, and one piece once somebody has asked for them."""

    __slots__ = ("later", "limit", "logprobs", "size", "tokens")

    def __init__(self, limit: int) -> None:
        self.tokens = self.logprobs = b""
        self.later: list[Chunk] = []
        """What came after them."""
        self.size = 0
        """Bytes of both."""
        self.limit = limit
        """Bytes it may grow to; 0 once it will not grow."""


class Payloads:
    """By name: a trajectory's tokens and log-probabilities, a group's prompt."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bytes = 0
        """Held now."""
        self.claimed = 0
        """Held at worst, when everything that may grow has grown."""
        self._held: dict[str, _Arrays] = {}

    # Admission

    def room_for(self, members: int, prompt_tokens: int) -> bool:
        """Whether a group may be admitted without ever passing the memory limit."""
        memory = self.limits.memory
        return memory is None or self.claimed + self.limits.group_bytes(members, prompt_tokens) <= memory

    def admit(self, group: str, members: Sequence[str]) -> None:
        """Make room for a group; its prompt is added as a chunk."""
        limit = self.limits.trajectory_bytes
        self._held[group] = _Arrays(0)
        for name in members:
            self._held[name] = _Arrays(limit)
        self.claimed += limit * len(members)

    def open(self, name: str) -> None:
        """One more trajectory of a group that was admitted. It counts, and is never refused: what waits for memory then
        is the next prompt."""
        limit = self.limits.trajectory_bytes
        self._held[name] = _Arrays(limit)
        self.claimed += limit

    def checked_prompt(self, prompt: int, length: int, ids: bytes) -> bytes:
        count = len(ids) // TOKEN.itemsize
        if count != length or not 0 < count <= self.limits.max_prompt_tokens:
            raise BadReportError(
                f"prompt {prompt} has {count} tokens, {length} were announced and 1 to max_prompt_tokens="
                f"{self.limits.max_prompt_tokens} are allowed: raise that, or leave the prompt out"
            )
        self._check_range(f"prompt {prompt}", *range_of(ids))
        return ids

    # Growth

    def checked(self, name: str, known: int, total: int, chunk: Chunk | None, given: int = 0) -> Chunk | None:
        """The part of the chunk that is new, if it and the ``known`` tokens make the ``total`` that is reported,
        ``given`` ones among them."""
        limit = self.limits.max_tokens + given
        if total > limit:
            raise BadReportError(f"trajectory {name} reports {total} tokens, more than max_tokens={limit}")
        if chunk is None:
            if total > known:
                raise BadReportError(f"trajectory {name} reports {total} tokens, but sent only the first {known}")
            return None
        tokens, rest = divmod(len(chunk.tokens), TOKEN.itemsize)
        if rest or len(chunk.logprobs) != tokens * LOGPROB.itemsize or chunk.start < 0:
            raise BadReportError(
                f"trajectory {name} sent {len(chunk.tokens)} bytes of tokens and {len(chunk.logprobs)} of "
                f"log-probabilities from token {chunk.start} on: there must be one log-probability for each token"
            )
        if chunk.start > known or chunk.start + tokens != total:
            raise BadReportError(
                f"trajectory {name} sent tokens {chunk.start} to {chunk.start + tokens} of {total}, but {known} are "
                f"known: send all from token {known} on"
            )
        if (again := known - chunk.start) > 0:
            self._check_same(name, chunk, again)
            chunk = chunk.after(known)
        least, most = range_of(chunk.tokens)
        if least < 0 or most >= self.limits.vocab_size:
            self._check_range(f"trajectory {name}", least, most)
        if not are_logprobs(chunk.logprobs):
            logprobs = np.frombuffer(chunk.logprobs, LOGPROB)
            at = int(np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)))[0])
            raise BadReportError(
                f"trajectory {name}: the log-probability of token {chunk.start + at} is {logprobs[at]}: it must be <= 0"
            )
        return chunk

    def add(self, name: str, chunk: Chunk) -> None:
        """Append what was checked. From token 0 on, it is in place of what was there."""
        held = self._held[name]
        if held.size and not chunk.start:
            self.clear(name)
        if held.size:
            held.later.append(chunk)
        else:
            held.tokens, held.logprobs = chunk.tokens, chunk.logprobs
        size = len(chunk.tokens) + len(chunk.logprobs)
        held.size += size
        self.bytes += size
        if not held.limit:
            self.claimed += size

    def clear(self, name: str) -> None:
        """It begins anew."""
        held = self._held[name]
        self.bytes -= held.size
        if not held.limit:
            self.claimed -= held.size
        held.tokens, held.logprobs, held.later, held.size = b"", b"", [], 0

    def seal(self, name: str) -> None:
        """It will not grow any more."""
        held = self._held[name]
        if held.limit:
            self.claimed -= held.limit - held.size
            held.limit = 0

    def drop(self, names: Iterable[str]) -> None:
        """Their memory is free."""
        for name in names:
            held = self._held.pop(name)
            self.bytes -= held.size
            self.claimed -= held.limit or held.size

    # What is held, as arrays on the same memory

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def bytes_of(self, name: str) -> tuple[bytes, bytes]:
        """Its token ids and log-probabilities as they are kept: little-endian int32 and float32."""
        held = self._held[name]
        if held.later:
            held.tokens = b"".join((held.tokens, *[each.tokens for each in held.later]))
            held.logprobs = b"".join((held.logprobs, *[each.logprobs for each in held.later]))
            held.later = []
        return held.tokens, held.logprobs

    def tokens(self, name: str) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.bytes_of(name)[0], TOKEN)

    def logprobs(self, name: str) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.bytes_of(name)[1], LOGPROB)

    def _check_same(self, name: str, chunk: Chunk, count: int) -> None:
        """Tokens that come again must be those that are known: else two engines write to one trajectory."""
        sent, known = np.frombuffer(chunk.tokens, TOKEN)[:count], self.tokens(name)[chunk.start :]
        if not np.array_equal(sent, known):
            at = int(np.flatnonzero(sent != known)[0])
            raise BadReportError(
                f"trajectory {name}: token {chunk.start + at} is {known[at]} and was sent again as {sent[at]}"
            )

    def _check_range(self, what: str, least: int, most: int) -> None:
        if least < 0 or most >= self.limits.vocab_size:
            bad = least if least < 0 else most
            raise BadReportError(f"{what} has token {bad}, outside the vocabulary of {self.limits.vocab_size}")


def range_of(ids: bytes) -> tuple[int, int]:
    """The least and the greatest of some token ids; zeros if there are none."""
    if not ids:
        return 0, 0
    if len(ids) <= FEW_BYTES:
        few = memoryview(ids).cast("i").tolist()
        return min(few), max(few)
    many = np.frombuffer(ids, TOKEN)
    return int(many.min()), int(many.max())


def are_logprobs(values: bytes) -> bool:
    """Whether all are finite, and none is above zero by more than rounding."""
    if not values:
        return True
    if len(values) <= FEW_BYTES:
        few = memoryview(values).cast("f").tolist()
        return isfinite(sum(few)) and max(few) <= LOGPROB_SLACK  # one that is not finite makes the sum so
    many = np.frombuffer(values, LOGPROB)
    return bool(np.isfinite(many).all()) and bool(many.max() <= LOGPROB_SLACK)


class Packed(NamedTuple):
    """Trajectories one behind the other, without padding: row ``i`` is ``[starts[i], starts[i + 1])`` of each array.

    A row is a prompt and the tokens generated for it. In the prompt, log-probabilities are 0.
    """

    starts: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float64]


def pack(rows: Sequence[Row]) -> Packed:
    """Join rows into flat arrays: a handful of block copies, however many tokens there are."""
    prompts = np.array([len(row.prompt_bytes) // TOKEN.itemsize for row in rows], np.int64)
    sizes = prompts + np.array([len(row.token_bytes) // TOKEN.itemsize for row in rows], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    zeros = np.zeros(int(prompts.max(initial=0)), LOGPROB)
    parts: list[Any] = [part for row in rows for part in (row.prompt, row.tokens)]
    sized = zip(rows, prompts.tolist(), strict=True)
    logprobs: list[Any] = [part for row, size in sized for part in (zeros[:size], row.logprobs)]
    return Packed(
        starts,
        prompts,
        np.concatenate(parts) if parts else np.zeros(0, TOKEN),
        np.concatenate(logprobs) if logprobs else np.zeros(0, LOGPROB),
        np.array([row.reward for row in rows], np.float64),
    )
