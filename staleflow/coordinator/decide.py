"""One decision: the strategies in order, each seeing what those before it decided.

Synchronisation comes first, and its pulls count for the rest: work is routed by the version after the pull, so it
spreads over all instances that pull. One decision has no more than ``MOST_PULLS`` of them, and the next one, which
follows at once, has others; until then these take no work, which would be of an older version. Then levelling among
those that pull, migration, the tail, and routing. Nothing is moved or routed that the tail ends. ``decide`` is a pure
function: the same situation gives the same decision, and stays as it was. Use::

    decision = decide(situation, strategies)
    journal.write(decision.inputs)
    for command in decision.commands: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np

from staleflow.coordinator.crowding import fitting_mu, least_gain
from staleflow.coordinator.levelling import level
from staleflow.coordinator.routing import FEW, most_routes
from staleflow.coordinator.situation import (
    Abort,
    Bools,
    Command,
    Fleet,
    Interrupt,
    Ints,
    Pace,
    Pull,
    Route,
    Situation,
    Truncate,
)
from staleflow.coordinator.strategies import MIGRATION, ROUTING, SYNCHRONISATION, TAIL, Strategies
from staleflow.errors import shown
from staleflow.registry import Entry, Registry

MOST_PULLS = 1024
"""Of one decision: with thousands of instances a new version would make one of it that is far longer than others."""
COMMANDS: dict[str, tuple[type, ...]] = {
    ROUTING.setting: (Route,),
    SYNCHRONISATION.setting: (Pull,),
    MIGRATION.setting: (Interrupt,),
    TAIL.setting: (Abort, Truncate),
}
"""What the strategies of each kind return."""


@dataclass(frozen=True, slots=True)
class Decision:
    commands: list[Command]
    """In the order to carry them out: pulls, interrupts, aborts and truncations, routes."""
    inputs: dict[str, Any]
    """What it was decided on and what came of it, as plain JSON-able data."""
    cut: bool = False
    """Whether it has as many pulls or routes as one decision may have, so that the next should follow at once."""


def decide(situation: Situation, strategies: Strategies) -> Decision:
    mu = fitting_mu(situation, strategies.mu) if strategies.adapt else None
    work = situation if mu is None else replace(situation, mu=mu)
    chosen: list[Pull] = asked(SYNCHRONISATION, work, strategies)
    pulls, later = chosen[:MOST_PULLS], chosen[MOST_PULLS:]
    if pulls:
        work = _with_pulls(work, pulls, later)
    interrupts: list[Interrupt] = []
    if len(pulls) > 1 and strategies.migration == "gain":
        interrupts, fleet = level(work, strategies, pulls)
        work = replace(work, fleet=fleet)
    moving = {interrupt.trajectory for interrupt in interrupts}
    interrupts += [each for each in asked(MIGRATION, work, strategies) if each.trajectory not in moving]
    ends: list[Abort | Truncate] = asked(TAIL, work, strategies)
    if ends:
        ended = _ended(situation, ends)
        interrupts = [interrupt for interrupt in interrupts if interrupt.trajectory not in ended]
        aborted = {end.group for end in ends if isinstance(end, Abort)}
        queue = [item for item in work.queue if item.group not in aborted and item.trajectory not in ended]
        work = replace(work, queue=queue)
    routes: list[Route] = asked(ROUTING, work, strategies)
    inputs = _inputs(situation) | {
        "synchronisation": {"mode": strategies.synchronisation, "pulls": len(pulls)},
        "migration": {"mode": strategies.migration, **Counter(interrupt.why for interrupt in interrupts)},
        "tail": {"mode": strategies.tail, **_ends(ends)},
        "routing": {"mode": strategies.routing, "mu": least_gain(work, strategies), "routes": len(routes)},
    }
    cut = bool(later) or len(routes) >= most_routes(len(situation.fleet.names))
    return Decision([*pulls, *interrupts, *ends, *routes], inputs, cut)


def asked(kind: Registry[Entry], situation: Situation, strategies: Strategies) -> list[Any]:
    """The commands of the configured strategy of this kind. What the user's own does wrong is a ``ConfigError``."""
    name, arguments = getattr(strategies, kind.setting.partition(".")[2]), getattr(strategies, kind.arguments)
    strategy = kind.load(name)

    @wraps(strategy)
    def listed(*given: Any) -> list[Any]:
        return list(strategy(*given, **arguments))

    return kind.held(name, listed, partial(_check, COMMANDS[kind.setting]))(situation, strategies)


def _check(known: tuple[type, ...], commands: list[Any], situation: Situation, _: Strategies) -> None:
    there = {None, *situation.fleet.names}
    for each in commands:
        if not isinstance(each, known):
            names = " or ".join(each.__name__ for each in known)
            raise ValueError(f"{shown(each)} among its commands: return a list of {names}")
        if getattr(each, "instance", None) not in there:
            raise ValueError(f"{shown(each)}: name an instance of situation.fleet.names")
        if isinstance(each, Pull) and not 0 <= each.version <= situation.newest:
            raise ValueError(f"{shown(each)}, and the newest version is {situation.newest}: give situation.newest")


def plain(commands: Iterable[Command]) -> list[list[Any]]:
    """Commands as JSON-able data: the kind of each and its fields, in order."""
    return [
        ["Route", *command]
        if isinstance(command, Route)
        else [type(command).__name__, *(getattr(command, name) for name in command.__slots__)]
        for command in commands
    ]


def _with_pulls(situation: Situation, pulls: Sequence[Pull], later: Sequence[Pull]) -> Situation:
    """The situation once the pulls are issued; those that pull ``later`` are closed until then."""
    fleet = situation.fleet.copy()
    rows = _rows(fleet, pulls)
    fleet.version[rows] = situation.newest
    fleet.pulling[rows] = True
    if later:
        fleet.alive[_rows(fleet, later)] = False
    return replace(situation, fleet=fleet)


def _rows(fleet: Fleet, pulls: Sequence[Pull]) -> Bools:
    names = {pull.instance for pull in pulls}
    return np.array([name in names for name in fleet.names], dtype=bool)


def _ended(situation: Situation, ends: Sequence[Abort | Truncate]) -> set[str]:
    """The trajectories on instances, or waited for, that will not continue there."""
    aborted = {end.group for end in ends if isinstance(end, Abort)}
    truncated = {end.trajectory for end in ends if isinstance(end, Truncate)}
    residents = situation.blockers + situation.thrashing
    return truncated | {resident.trajectory for resident in residents if resident.group in aborted}


def _ends(ends: Sequence[Abort | Truncate]) -> dict[str, int]:
    aborts = sum(isinstance(end, Abort) for end in ends)
    return {"aborts": aborts, "truncations": len(ends) - aborts}


def _inputs(situation: Situation) -> dict[str, Any]:
    fleet, since, pace = situation.fleet, situation.blocked_since, situation.pace
    versions = Counter[int](fleet.version.tolist())
    return {
        "now": situation.now,
        "newest": situation.newest,
        "room": {str(version): room for version, room in sorted(situation.room.items())},
        "queued": len(situation.queue),
        "fresh": len(situation.queue) - situation.reserved,
        "instances": len(fleet.names),
        "alive": _total(fleet.alive),
        "pulling": _total(fleet.pulling),
        "running": _total(fleet.running),
        "waiting": _total(fleet.waiting),
        "kv_free": _total(fleet.kv_free),
        "versions": {str(version): count for version, count in sorted(versions.items())},
        "pull_s": situation.pull_s,
        "pace": {name: getattr(pace, name) for name in Pace.__slots__},
        "blockers": len(situation.blockers),
        "blocked_s": None if since is None else situation.now - since,
        "thrashing": len(situation.thrashing),
    }


def _total(column: Ints | Bools) -> int:
    return sum(column.tolist()) if len(column) <= FEW else int(column.sum())
