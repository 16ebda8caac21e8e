"""Why a run is not faster: which of training, rollout, reward, tail and bound sets the pace, and what would help.

Of the latest steps, the time in which the trainer waited is followed back to the response that came last, and to what
that response was doing meanwhile. Together with the load of the instances that says what binds; the law
(``staleflow.study.law``) says how fast the run could be, and what a changed setting would allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.events import Commit, read_commits
from staleflow.study.why.answer import Answer, seconds
from staleflow.study.why.helps import Help, allowed, helps
from staleflow.study.why.moments import moments
from staleflow.study.why.step import lives_around

Cause = Literal["training", "rollout", "reward", "tail", "bound", "instance"]

MOST_EVENTS = 30_000
"""The latest steps with about this many events are looked at."""
MOST_MOMENTS = 2000
BUSY = 0.75
"""A trainer that works for this share of the time sets the pace: without any waiting a step would still take that."""
SCORING = 0.4
"""The share of waiting that scoring takes when rewards do."""
SLOW = 0.7
"""An instance below this share of the others' speed is slow."""
FULL = 0.7
"""Instances that run this share of the most that they ever ran have no time left."""
LONG = 3.0
"""The longest response over the mean where the tail is what is waited for."""
LOST = 0.1
"""The share of what full instances could make that a slow one loses when it sets the pace."""
IN_TURN = 0.35
"""The least share of a step that a trainer works which waits for instances that wait for it."""


@dataclass(slots=True)
class Observed:
    """Of the latest steps, on average."""

    steps: int = 0
    step_s: float = 0.0
    train_s: float = 0.0
    idle_s: float = 0.0
    tokens: float = 0.0
    longest: float = 0.0
    """Output tokens of the longest response of a step."""
    mean: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict[str, float])
    """By what the last response of each step was doing while the step waited, as shares of that time."""
    waited_on: dict[str, float] = field(default_factory=dict[str, float])
    """By instance: the share of that decoding that was there."""
    instances: int = 0
    """That are there at the end."""
    slowest: str = ""
    speed: float = 1.0
    """Tokens per second and running response of the slowest instance, as a share of the others' median."""
    made: float = 0.0
    """The share of all tokens that it makes."""
    full: float = 0.0
    """How many responses run, as a share of the most that ever ran."""

    @property
    def slow(self) -> bool:
        return self.speed < SLOW


def about_pace(directory: RunDirectory, config: Config, _name: str) -> Answer:
    seen = observe(directory, config)
    cause = binds(seen)
    law = allowed(directory, config.group_size)
    speed = seen.tokens / seen.step_s if seen.step_s else 0.0
    found = helps(directory, config, cause, seen.waiting.get("being scored", 0.0), speed, law)
    facts: dict[str, Any] = {
        "binds": cause,
        "step_s": seen.step_s,
        "training_s": seen.train_s,
        "trainer_idle_s": seen.idle_s,
        "trainer_idle": seen.idle_s / seen.step_s if seen.step_s else 0.0,
        "tokens_per_s": speed,
        "steps_looked_at": seen.steps,
        "waiting": seen.waiting,
        "longest_response_tokens": seen.longest,
        "mean_response_tokens": seen.mean,
        "instances_full": seen.full,
    }
    if seen.slowest:
        waited_on = seen.waited_on.get(seen.slowest, 0.0)
        facts["slowest_instance"] = {
            "name": seen.slowest, "speed": seen.speed, "waited_on": waited_on, "tokens": seen.made
        }  # fmt: skip
    over = ""
    if law is not None:
        facts["law"] = law.facts
        facts["step_over_law"] = seen.step_s / law.terms.step_s
        over = f", {facts['step_over_law']:.2f} times what the law allows ({seconds(law.terms.step_s)})"
    facts["helps"] = [each.facts for each in found]
    words = _words(seen, facts)
    why = _BINDS[cause].format(**words)
    also = _ALSO.format(**words) if seen.slow and cause != "instance" else ""
    return Answer("pace", f"{why}; a step takes {seconds(seen.step_s)}{over}{_advice(found)}{also}", facts)


_BINDS: dict[Cause, str] = {
    "training": "training sets the pace, with {train} of every step and the trainer idle for {idle}",
    "rollout": "rollout sets the pace: instances are full ({full} of their most), and the trainer waits {wait} a step",
    "reward": "rewards set the pace: the last response of a step was being scored for {scored} of the time waited",
    "tail": "the tail sets the pace: the longest response of a step has {times} times the mean length, and the trainer "
    "waits {wait} a step for it",
    "bound": "the bound sets the pace: trainer and instances wait for each other ({wait} a step, instances "
    "{full} full)",
    "instance": "{slow} sets the pace: it decodes at {speed} of the others' speed, makes {made} of the tokens, and "
    "{there} of the time waited was for responses there",
}
_ALSO = ". {slow} decodes at {speed} of the others' speed; it gets {made} of the work, and steps do not wait for it"


def _words(seen: Observed, facts: dict[str, Any]) -> dict[str, str]:
    return {
        "train": seconds(seen.train_s),
        "idle": f"{facts['trainer_idle']:.0%}",
        "wait": seconds(seen.idle_s),
        "full": f"{seen.full:.0%}",
        "scored": f"{seen.waiting.get('being scored', 0.0):.0%}",
        "times": f"{seen.longest / max(1.0, seen.mean):.1f}",
        "slow": seen.slowest,
        "speed": f"{seen.speed:.0%}",
        "made": f"{seen.made:.0%}",
        "there": f"{seen.waited_on.get(seen.slowest, 0.0):.0%}",
    }


def _advice(found: Sequence[Help]) -> str:
    return f". {'. '.join(each.text for each in found[:2])}" if found else ""


def binds(seen: Observed) -> Cause:
    if seen.step_s and seen.train_s >= BUSY * seen.step_s:
        return "training"
    if seen.waiting.get("being scored", 0.0) >= SCORING:
        return "reward"
    if seen.slow and seen.waited_on.get(seen.slowest, 0.0) > 1.5 / seen.instances:
        return "instance"
    if seen.full >= FULL:
        lost = (1 - seen.speed) / seen.instances if seen.slow else 0.0
        return "instance" if lost >= LOST else "rollout"
    in_turn = seen.longest < LONG * seen.mean and seen.train_s >= IN_TURN * seen.step_s
    return "bound" if in_turn else "tail"


# What is recorded


def observe(directory: RunDirectory, config: Config) -> Observed:
    rows = [row for row in read_metrics(directory.metrics) if row.get("step", -1) >= 0 and "train_s" in row]
    if len(rows) < 2:
        raise ConfigError(f"{directory.path} has too few steps to say what sets its pace: ask again after a few more")
    commits = {commit.step: commit for commit in read_commits(directory)}
    latest = _latest(rows, commits, config.staleness + 1)
    before = next((row["time"] for row in reversed(rows) if row["step"] < latest[0]["step"]), 0.0)
    count = len(latest)
    lengths = [row["lengths"] for row in latest if row.get("lengths")]
    seen = Observed(
        steps=count,
        step_s=(latest[-1]["time"] - before) / count,
        train_s=fmean(row["train_s"] for row in latest),
        idle_s=fmean(row["idle_s"] for row in latest),
        tokens=fmean(float(sum(each)) for each in lengths) if lengths else 0.0,
        longest=fmean(float(max(each)) for each in lengths) if lengths else 0.0,
        mean=fmean(fmean(each) for each in lengths) if lengths else 0.0,
    )
    _follow(seen, directory, config, commits, [row["step"] for row in latest if row["step"] in commits])
    _load(seen, directory, before)
    return seen


def _latest(rows: list[dict[str, Any]], commits: dict[int, Commit], warm: int) -> list[dict[str, Any]]:
    """The latest steps, without those in which the run began, and no more than can be looked at soon."""
    settled = [row for row in rows if row["step"] >= warm] or rows[1:]
    last = commits.get(settled[-1]["step"])
    near = [
        row for row in settled
        if last is None or row["step"] not in commits or last.last - commits[row["step"]].first <= MOST_EVENTS
    ]  # fmt: skip
    return near or settled[-1:]


def _follow(
    seen: Observed, directory: RunDirectory, config: Config, commits: dict[int, Commit], steps: Sequence[int]
) -> None:
    """Back from the time in which each step waited to what its last response was doing."""
    if not steps:
        return
    made = {step: commit for step, commit in commits.items() if step <= steps[-1]}
    lives = lives_around(directory, made, steps[0], config.staleness, until=steps[-1])
    waits: dict[str, float] = {}
    there: dict[str, float] = {}
    for step in steps:
        opened = commits[step - 1].time if step - 1 in commits else 0.0
        groups = [group for group in lives.of_step(step) if group.completed is not None]
        last = max(groups, key=lambda group: group.completed or 0.0, default=None)
        if last is None or last.last is None or last.completed is None:
            continue
        for spell in last.last.spells(last.completed):
            within = spell.within(opened, last.completed)
            waits[spell.doing] = waits.get(spell.doing, 0.0) + within
            if spell.instance:
                there[spell.instance] = there.get(spell.instance, 0.0) + within
    seen.waiting = _shares(waits)
    seen.waited_on = _shares(there)


def _shares(sums: dict[str, float]) -> dict[str, float]:
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()} if total else {}


def _load(seen: Observed, directory: RunDirectory, begin: float) -> None:
    """How full and how fast the instances were, from the moments that were recorded. One that is slow may get nothing
    to do for that; then what it did earlier counts."""
    early, late = _Work(), _Work()
    before: dict[str, tuple[float, int, int]] = {}
    running: list[int] = []
    for moment in moments(directory, most=MOST_MOMENTS):
        if moment.time >= begin:
            running.append(sum(each.running for each in moment.instances))
        now = {each.name: (moment.time, each.tokens, each.running) for each in moment.instances}
        for name, (time, tokens, runs) in now.items():
            then, had, ran = before.get(name, (time, tokens, runs))
            if tokens >= had:  # not another incarnation
                (early if then < begin else late).add(name, (time - then) * (ran + runs) / 2, tokens - had)
        before = now
    seen.instances = len(before)
    seen.speed, seen.slowest = min(late.slowest(before), early.slowest(before.keys() - late.speeds.keys()))
    seen.made = late.made.get(seen.slowest, 0) / max(1, sum(late.made.values()))
    if running and (most := sorted(running)[int(0.95 * (len(running) - 1))]):
        seen.full = min(1.0, fmean(running) / most)


@dataclass(slots=True)
class _Work:
    """By instance: seconds times responses that ran, and the tokens that were made."""

    busy: dict[str, float] = field(default_factory=dict[str, float])
    made: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, name: str, busy: float, made: int) -> None:
        self.busy[name] = self.busy.get(name, 0.0) + busy
        self.made[name] = self.made.get(name, 0) + made

    @property
    def speeds(self) -> dict[str, float]:
        return {name: self.made[name] / spent for name, spent in self.busy.items() if spent > 0 and self.made[name]}

    def slowest(self, names: Iterable[str]) -> tuple[float, str]:
        """Of these; its speed as a share of the median of all others, and its name."""
        speeds = self.speeds
        slowest = min((name for name in names if name in speeds), key=lambda name: speeds[name], default="")
        others = [speed for name, speed in speeds.items() if name != slowest]
        return (speeds[slowest] / median(others), slowest) if slowest and others else (1.0, "")
