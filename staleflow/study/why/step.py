"""Why a step takes or took as long as it does: which group came last, and what its last response waited for."""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.run.directory import RunDirectory
from staleflow.run.events import Commit, read_commits, read_events
from staleflow.study.why.answer import Answer, listed, plural, seconds
from staleflow.study.why.lives import GroupLife, Lives

MOST_GROUPS = 8
"""Groups whose state is among the facts of an open step."""


def about_step(directory: RunDirectory, config: Config, name: str) -> Answer:
    commits = read_commits(directory)
    number = len(commits) if name == "now" else int(name)
    if name == "now" and commits and commits[-1].step + 1 >= config.steps:
        number = commits[-1].step
    made = {commit.step: commit for commit in commits}
    if commits and not commits[-1].time:
        raise ConfigError(f"the journal of {directory.path} has no times: it was written by an earlier release")
    lives = lives_around(directory, made, number, config.staleness)
    opened = made[number - 1].time if number - 1 in made else 0.0
    if number in made:
        return _past(lives, number, opened, made[number].time)
    open_step = max(made, default=-1) + 1
    if number != open_step:
        ends = f"the run has {config.steps} steps" if number >= config.steps else f"step {open_step} is open"
        raise ConfigError(f"step {number} is not in the record of {directory.path}: {ends}")
    return _open(directory, config, lives, number, opened)


def lives_around(
    directory: RunDirectory, made: dict[int, Commit], step: int, bound: int, until: int | None = None
) -> Lives:
    """Everything that the step, and those ``until`` another, can be made of: nothing that it may train on was begun
    before its oldest version."""
    before, end = made.get(step - bound - 2), made.get(step if until is None else until)
    first, time = (before.first, before.time) if before else (0, 0.0)
    last = end.last if end else 1 << 62
    return Lives(read_events(directory, first=first, last=last), time)


# A step that is made


def _past(lives: Lives, number: int, opened: float, committed: float) -> Answer:
    groups = lives.of_step(number)
    facts: dict[str, Any] = {"step": number, "opened_s": opened, "committed_s": committed, "groups": len(groups)}
    took = f"step {number} took {seconds(committed - opened)}"
    if not groups:
        return Answer("step", f"{took}; what it was made of is not in the journal", facts)
    last = max(groups, key=lambda group: group.completed or 0.0)
    waited = max(0.0, (last.completed or 0.0) - opened)
    facts |= {"waited_for_groups_s": waited, "after_the_last_group_s": committed - max(opened, last.completed or 0.0)}
    facts |= {"complete_before_it_opened": sum((group.completed or 0.0) <= opened for group in groups)}
    if waited <= 0.1 * (committed - opened):
        return Answer("step", f"{took}: its groups were there, and training and pushing it took the time", facts)
    why, more = _last_member(last, opened, last.completed or opened)
    rest = seconds(committed - opened - waited)
    sentence = f"{took}: it waited {seconds(waited)} for group {last.name}, {why}; training what was left took {rest}"
    return Answer("step", sentence, facts | more)


def _last_member(group: GroupLife, begin: float, end: float) -> tuple[str, dict[str, Any]]:
    """What the last response of the group did in this time, in words and as facts."""
    life = group.last
    if life is None:
        return "whose responses are not in the journal", {"last_group": group.name}
    spells = life.spells(end)
    shares: dict[str, float] = {}
    for spell in spells:
        if (within := spell.within(begin, end)) > 0:
            shares[spell.where] = shares.get(spell.where, 0.0) + within
    facts = {
        "last_group": group.name,
        "last_group_version": group.version,
        "last_response": life.name,
        "last_response_tokens": life.tokens,
        "last_response_moves": life.moves,
        "last_response_spent_s": shares,
    }
    if not shares:
        return f"which was complete, but had to wait for its place (response {life.name})", facts
    most = max(shares, key=lambda what: shares[what])
    tokens = f" ({life.tokens:,} tokens)" if most.startswith("decoding") else ""
    return f"whose response {life.name} was {most} for {seconds(shares[most])} of that{tokens}", facts


# The step that is open


def _open(directory: RunDirectory, config: Config, lives: Lives, number: int, opened: float) -> Answer:
    taken, now = lives.leased, lives.time
    alive = directory.running
    facts: dict[str, Any] = {"step": number, "opened_s": opened, "latest_event_s": now, "run_is_alive": alive}
    facts |= {"groups_there": len(taken), "groups_needed": config.groups}
    begin = (
        f"step {number} has waited {seconds(now - opened)}" if alive else f"step {number} was open when the run ended"
    )
    if len(taken) >= config.groups:
        full_s = max((lives.groups[name].leased or opened for name in taken), default=opened)
        return Answer("step", f"{begin}: it is full since {seconds(now - full_s)}, and the trainer updates", facts)
    flying = [group for group in lives.groups.values() if group.live and group.completed is None and group.reserved]
    due = [group for group in flying if group.version is not None and group.version + config.staleness <= number]
    missing = sorted(due or flying, key=lambda group: (group.version or 0, group.reserved or 0.0))
    facts |= {"groups_in_flight": len(flying), "groups_that_no_later_step_may_train": len(due)}
    facts["waits_for"] = {group.name: _state(group, now) for group in missing[:MOST_GROUPS]}
    if not missing:
        return Answer("step", f"{begin}: no group is in flight; {_nobody(directory)}", facts)
    states = listed([f"{group.name} ({_state(group, now)})" for group in missing], most=3)
    which = f"{plural(len(due), 'group')} that no later step may train" if due else "more complete groups"
    return Answer("step", f"{begin} for {which}, with {len(taken)} of {config.groups} there: {states}", facts)


def _state(group: GroupLife, now: float) -> str:
    life = group.last
    if life is None or not (spells := life.spells(now)):
        return "waits for an instance"
    spell = spells[-1]
    tokens = f", {life.tokens:,} tokens" if spell.doing == "decoding" else ""
    return f"{life.name} {spell.where} for {seconds(spell.seconds)}{tokens}"


def _nobody(directory: RunDirectory) -> str:
    return "the data has ended, or no instance is alive" if directory.running else "the run is not alive"
