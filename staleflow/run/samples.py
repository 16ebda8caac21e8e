"""``samples.jsonl``: some responses of every step, as a person would want to read them.

    samples = Samples(path, task, config.samples, names, cut, on_trouble=print)
    samples.scored("p7/0", parts, tokens)               # a response has its reward
    samples.forget("p7/0")                              # its group was given up
    facts = samples.committed(step, groups)             # writes some, and says what all of them were like
    for row in read_samples(path): row.reward, row.response

Of each step the worst and the best response are kept, and others in between. Texts are cut at ``MOST_TEXT`` characters
and the file is bounded: one that has reached ``MOST_BYTES`` becomes ``samples.1.jsonl`` and replaces the one before it,
so a run never has more than 64 MiB of them. On a full disk none are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from staleflow.observe.metrics import MetricsLog
from staleflow.run.bounded_log import MOST_BYTES, older, read_lines
from staleflow.servers.lifecycle import TRAINED, Group, Trajectory
from staleflow.tasks.task import Prompt
from staleflow.types import TOKEN, Spans

if TYPE_CHECKING:
    from staleflow.tasks.opening import TaskSet

MOST_TEXT = 16_384
"""Characters of a prompt or a response."""


class Sample(msgspec.Struct):
    """One line."""

    step: int
    name: str
    prompt: str | list[dict[str, Any]]
    response: str
    reward: float
    rewards: dict[str, float]
    """Where there are several: each by its name."""
    versions: Spans
    """Runs of tokens made under one version: (version, count)."""
    tokens: int
    cut: bool
    ends: tuple[int, ...] = ()
    """Characters of the response at the end of each of ``versions``."""


class _Scored(NamedTuple):
    parts: tuple[float, ...]
    tokens: bytes
    cut: bool


class Samples:
    def __init__(
        self,
        path: Path,
        task: TaskSet,
        count: int,
        names: Sequence[str],
        cut: Callable[[bytes], bool],
        on_trouble: Callable[[str], None],
        first: int = 0,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """``count``: of each step; ``names``: of the rewards; ``first``: the step that comes next. What an earlier
        attempt kept of later ones is removed."""
        self._path = path
        self._task = task
        self._count = count
        self._names = names if len(names) > 1 else ()
        self._cut = cut
        self._on_trouble = on_trouble
        self._most = most_bytes
        self._begin = b""
        """Before the next line, if the last one may be torn."""
        self._trouble = False
        self._scored: dict[str, _Scored] = {}
        """Responses that may still be trained on. Those of an earlier attempt of the run are not here."""
        if path.exists():
            with MetricsLog(path) as lines:
                lines.rewind(first)

    def scored(self, name: str, parts: tuple[float, ...], tokens: bytes) -> None:
        self._scored[name] = _Scored(parts, tokens, self._cut(tokens))

    def forget(self, name: str) -> None:
        self._scored.pop(name, None)

    def committed(self, step: int, groups: Sequence[Group]) -> dict[str, Any]:
        members = [each for group in groups for each in group.members if each.state in TRAINED]
        known = [(each, found) for each in members if (found := self._scored.pop(each.name, None)) is not None]
        self._write([self._sample(step, *each) for each in _spread(known, self._count)])
        return self._facts(members, [found for _, found in known])

    def _facts(self, members: Sequence[Trajectory], known: Sequence[_Scored]) -> dict[str, Any]:
        """For ``metrics.jsonl``: of all responses of a step."""
        if not members:
            return {}
        rewards = [each.reward or 0.0 for each in members]
        facts: dict[str, Any] = {
            "reward_std": pstdev(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "response_tokens": fmean(each.generated for each in members),
        }
        if known:
            facts["cut"] = fmean(each.cut for each in known)
            parts = [each.parts for each in known if each.parts]
            if parts:
                facts |= {f"reward/{name}": fmean(each[at] for each in parts) for at, name in enumerate(self._names)}
        return facts

    def _sample(self, step: int, member: Trajectory, scored: _Scored) -> Sample:
        task, tokens = self._task, np.frombuffer(scored.tokens, TOKEN).tolist()
        until = accumulate(count for _, count in member.spans)
        return Sample(
            step,
            member.name,
            _shown(task.prompts.problem(member.group.prompt).prompt, task),
            _short(task.decode(tokens)),
            member.reward or 0.0,
            dict(zip(self._names, scored.parts, strict=False)),
            tuple(member.spans),
            member.generated,
            scored.cut,
            tuple(len(task.decode(tokens[:end])) for end in until),
        )

    def _write(self, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        text = self._begin + msgspec.json.Encoder().encode_lines(samples)
        try:
            with self._path.open("ab") as file:
                if file.tell() and file.tell() + len(text) > self._most:
                    self._path.replace(older(self._path))
            with self._path.open("ab") as file:
                file.write(text)
            self._begin = b""
        except OSError as error:
            self._begin = b"\n"
            if not self._trouble:
                self._on_trouble(f"{self._path} cannot be written ({error.strerror}): no samples are kept until it can")
        self._trouble = bool(self._begin)


def read_samples(path: Path) -> Iterator[Sample]:
    return read_lines(path, Sample)


def _spread(known: Sequence[tuple[Trajectory, _Scored]], count: int) -> list[tuple[Trajectory, _Scored]]:
    """The worst, the best, and others in between."""
    ranked = sorted(known, key=lambda each: each[0].reward or 0.0)
    places = {round((len(ranked) - 1) * each / max(1, count - 1)) for each in range(count)}
    return [ranked[at] for at in sorted(places)] if ranked else []


def _shown(prompt: Prompt, task: TaskSet) -> str | list[dict[str, Any]]:
    if isinstance(prompt, tuple):
        return _short(task.decode(prompt))
    if isinstance(prompt, str):
        return _short(prompt)
    return [{**each, "content": _short(str(each["content"]))} for each in prompt]


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... ({len(text):,} characters)"
