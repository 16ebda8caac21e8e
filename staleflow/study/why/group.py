"""Why a group was released, or what has become of it."""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.protocol import REDUNDANT
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_commits, read_events
from staleflow.servers.filters import NO_SIGNAL
from staleflow.study.why.answer import Answer, plural, seconds
from staleflow.study.why.lives import GroupLife, Lives

REASONS = {
    NO_SIGNAL: "all its rewards were equal, so that it would teach nothing (filter=no-signal)",
    REDUNDANT: "the step was full without it: redundancy starts more groups than are needed and drops the slowest",
    "tail": "the step had waited for it for too long (strategies.tail=replace)",
    "reward timed out": "the reward of one of its responses was not there in time, again and again",
    "bad reports": "instances reported what cannot be true about one of its responses, again and again",
    "no engine could serve it": "no engine could serve one of its responses",
}


def about_group(directory: RunDirectory, config: Config, name: str) -> Answer:
    lives = lives_of(directory, config, name)
    group = lives.groups.get(name)
    if group is None or (group.admitted is None and group.reserved is None):
        raise ConfigError(f"group {name} is not in the record of {directory.path}: staleflow samples shows names")
    return Answer("group", _sentence(directory, group, lives), _facts(group))


def lives_of(directory: RunDirectory, config: Config, group: str) -> Lives:
    """Of the group and its members: the step that trained it is the next one that was committed."""
    names = [group, *(f"{group}/{member}" for member in range(config.members))]
    lives = Lives(read_events(directory, about=names))
    found = lives.groups.get(group)
    if found is not None and found.leased is not None and found.released is None:
        found.step = _step_of(directory, group, found.leased)
    return lives


def _step_of(directory: RunDirectory, group: str, leased: float) -> int | None:
    """The step that was committed next. Times are not exact: one before it may have the same."""
    later = [commit for commit in read_commits(directory) if commit.time >= leased][:2]
    if not later:
        return None
    between = Lives(read_events(directory, first=later[0].first, last=later[-1].last))
    found = between.groups.get(group)
    return later[0].step if found is None or found.leased is None else found.step


def _sentence(directory: RunDirectory, group: GroupLife, lives: Lives) -> str:
    if group.released is not None:
        time, reason, again = group.released
        then = "its prompt is drawn once more" if again else "its prompt is not drawn again"
        return f"group {group.name} was released at {seconds(time)} because {REASONS.get(reason, reason)}; {then}"
    if group.step is not None and group.completed is not None:
        age = f", {plural(group.step - group.version, 'version')} old" if group.version is not None else ""
        waits = seconds((group.leased or group.completed) - group.completed)
        return (
            f"group {group.name} was not released: it was complete at {seconds(group.completed)}, waited {waits} for "
            f"its place, and step {group.step} trained it{age}"
        )
    ended = "is live" if directory.running else "was live when the run ended"
    life = group.last
    doing = (
        life.spells(lives.time)[-1].doing if life is not None and life.spells(lives.time) else "waits for an instance"
    )
    state = "complete, and waits for its place in a step" if group.completed is not None else f"{doing}"
    return f"group {group.name} was not released: it {ended} ({state})"


def _facts(group: GroupLife) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "group": group.name,
        "version": group.version,
        "reserved_s": group.reserved,
        "complete_s": group.completed,
        "leased_s": group.leased,
        "trained_at_step": group.step,
    }
    if group.released is not None:
        facts |= {"released_s": group.released[0], "reason": group.released[1], "prompt_again": group.released[2]}
    facts["responses"] = {
        life.name: {
            "tokens": life.tokens,
            "moves": life.moves,
            "reward": next((value for _, kind, value in reversed(life.marks) if kind == "score"), None),
            "scored_s": life.at("score"),
        }
        for life in group.members.values()
    }
    return facts
