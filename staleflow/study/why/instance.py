"""Why an instance pulled, and what it does."""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.run.decisions import Decided
from staleflow.run.directory import RunDirectory
from staleflow.run.events import Timed, read_events
from staleflow.run.fleet import InstanceMoment, Moment
from staleflow.study.why.answer import Answer, plural, seconds
from staleflow.study.why.decided import decisions_for
from staleflow.study.why.moments import moment_before, moments

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
    return _pulled(directory, config, name, decided, facts)


def _pulled(directory: RunDirectory, config: Config, name: str, decided: Decided, facts: dict[str, Any]) -> Answer:
    version = next(command[2] for command in decided.commands if command[:2] == ["Pull", name])
    beside = sum(command[0] == "Pull" for command in decided.commands) - 1
    before = _load(moment_before(directory, decided.time), name)
    mode = str(decided.inputs.get("synchronisation", {}).get("mode", config.strategies.synchronisation))
    others = f", with {plural(beside, 'other instance')}" if beside else ""
    facts |= {"pull": {"version": version, "at_s": decided.time, "mode": mode, "before": before, "beside": beside}}
    facts |= {"decided_on": {key: decided.inputs[key] for key in INPUTS if key in decided.inputs}}
    held = f"held version {before['version']}" if before else "was behind"
    why = _why(mode, before)
    sentence = f"{name} pulled version {version} at {seconds(decided.time)}{others} because it {held} and {why}"
    return Answer("instance", sentence, facts)


def _why(mode: str, before: dict[str, Any] | None) -> str:
    idle = before is not None and not before["running"] and not before["waiting"]
    starved = "had nothing to run and nothing in the queue that its version may take"
    if mode == "greedy":
        return "strategies.synchronisation=greedy pulls every new version at once"
    if idle or mode == "starved":
        return starved
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
