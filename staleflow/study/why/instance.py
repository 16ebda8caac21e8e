"""Why an instance pulled, and what it does."""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.run.decisions import Decided
from staleflow.run.directory import RunDirectory
from staleflow.run.events import Timed, read_commits, read_events
from staleflow.run.fleet import InstanceMoment, Moment
from staleflow.servers.journal import STAMP_S
from staleflow.study.why.answer import Answer, plural, seconds
from staleflow.study.why.decided import decisions_for
from staleflow.study.why.moments import moment_before, moments
from staleflow.study.why.step import lives_around

INPUTS = ("newest", "room", "queued", "fresh", "versions", "pull_s", "pace")
"""Of a decision: what matters for a pull."""


def about_instance(directory: RunDirectory, config: Config, name: str) -> Answer:
    notes = list(read_events(directory, about=[name], kinds=("join", "left", "lost", "pull")))
    decided = next(decisions_for(directory, "Pull", name), None)
    if not notes and decided is None:
        raise ConfigError(f"instance {name} is not in the record of {directory.path}: instances are i0, i1, ...")
    facts: dict[str, Any] = {"instance": name} | _past(notes)
    last = next(moments(directory, latest_first=True), None)
    facts |= {"now": _load(last, name)}
    if (lost := _lost(notes)) is not None:
        sentence = f"{name} died or fell silent at {seconds(lost)} and has not been back since"
        return Answer("instance", sentence, facts)
    if decided is None:
        return Answer("instance", f"{name} has pulled no version by a decision that is still recorded", facts)
    return _pulled(directory, config, name, decided, notes, facts)


def _pulled(
    directory: RunDirectory, config: Config, name: str, decided: Decided, notes: list[Timed], facts: dict[str, Any]
) -> Answer:
    version = next(command[2] for command in decided.commands if command[:2] == ["Pull", name])
    beside = sum(command[0] == "Pull" for command in decided.commands) - 1
    before = _load(moment_before(directory, decided.time), name)
    held, runs = _held(notes, decided.time, version, before), running(directory, config, name, decided.time)
    mode = str(decided.inputs.get("synchronisation", {}).get("mode", config.strategies.synchronisation))
    others = f", with {plural(beside, 'other instance')}," if beside else ""
    pull = {"version": version, "at_s": decided.time, "mode": mode, "held": held, "running": runs}
    facts |= {"pull": pull | {"before": before, "beside": beside}}
    facts |= {"decided_on": {key: decided.inputs[key] for key in INPUTS if key in decided.inputs}}
    had = "was behind" if held is None else "held no version" if held < 0 else f"held version {held}"
    why = _why(mode, runs)
    sentence = f"{name} pulled version {version} at {seconds(decided.time)}{others} because it {had} and {why}"
    return Answer("instance", sentence, facts)


def _held(notes: list[Timed], time: float, version: int, before: dict[str, Any] | None) -> int | None:
    """Before it pulled ``version``. The load is recorded about once a second, and it may have pulled since; an event
    may have happened up to ``STAMP_S`` after its time."""
    came = [each for each in notes if each.event[0] in ("join", "pull") and each.time <= time]
    last = next((each for each in reversed(came) if each.event[2] != version), None)
    if last is not None and (before is None or last.time + STAMP_S >= before["at_s"]):
        return last.event[2]
    return None if before is None else before["version"]


def running(directory: RunDirectory, config: Config, name: str, time: float) -> int:
    """Responses that were on it, decoding or waiting for memory, by the events around that time."""
    commits = {commit.step: commit for commit in read_commits(directory)}
    step = min((each for each, commit in commits.items() if commit.time >= time), default=max(commits, default=-1) + 1)
    lives = lives_around(directory, commits, step, config.staleness)
    spells = (spell for life in lives.trajectories.values() for spell in life.spells(float("inf")))
    return sum(each.instance == name and each.begin + STAMP_S < time and round(time, 3) < each.end for each in spells)


def _why(mode: str, runs: int) -> str:
    if mode == "greedy":
        return "strategies.synchronisation=greedy pulls every new version at once"
    if not runs or mode == "starved":
        return "had nothing to run and nothing in the queue that its version may take"
    return "would make more tokens with the newer version within the horizon, pull and prefill counted (gain)"


def _past(notes: list[Timed]) -> dict[str, Any]:
    pulls = [each for each in notes if each.event[0] == "pull"]
    return {
        "joined": sum(each.event[0] == "join" for each in notes),
        "lost": sum(each.event[0] == "lost" for each in notes),
        "pulls": len(pulls),
        "latest_pulls": [{"version": each.event[2], "at_s": each.time} for each in pulls[-5:]],
    }


def _lost(notes: list[Timed]) -> float | None:
    """Since when it is away, if it is."""
    away = [each for each in notes if each.event[0] in ("join", "lost", "left")]
    return away[-1].time if away and away[-1].event[0] == "lost" else None


def _load(moment: Moment | None, name: str) -> dict[str, Any] | None:
    found: InstanceMoment | None = None
    if moment is not None:
        found = next((each for each in moment.instances if each.name == name), None)
    if moment is None or found is None:
        return None
    return {
        "at_s": moment.time,
        "version": found.version,
        "running": found.running,
        "waiting": found.waiting,
        "kv_used": found.kv_used,
        "kv_total": found.kv_total,
        "doing": found.doing or ("decoding" if found.running else "idle"),
    }
