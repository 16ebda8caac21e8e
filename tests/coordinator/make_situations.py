"""Situations to decide on: small ones written by hand, and random ones."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.decide import asked
from staleflow.coordinator.situation import COLUMNS, Fleet, Pace, Queued, Resident, Situation
from staleflow.coordinator.strategies import Strategies
from staleflow.protocol import StalenessLedger
from staleflow.registry import Registry

COST = CostModel(
    floor=0.0123, base=0.0049, per_sequence=2.44e-4, fixed=0.002, per_context_token=1.2e-7, per_prefill_token=2.4e-4
)
FLAT = CostModel(floor=0.01, base=0.0, per_sequence=0.0, fixed=0.0, per_context_token=0.0, per_prefill_token=1e-4)
"""A step takes 10 ms whatever runs, so T = 100 n; a prefill of 10,000 tokens takes a second."""


@dataclass(frozen=True)
class InstanceView:
    """One row of a fleet."""

    name: str
    version: int
    running: int = 0
    waiting: int = 0
    context: int = 0
    kv_free: int = 0
    max_running: int = 256
    alive: bool = True
    pulling: bool = False
    speed: float = 1.0


def fleet_of(rows: list[InstanceView]) -> Fleet:
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    return Fleet.of([row.name for row in rows], **columns)


def instance(name: str, version: int = 1, kv_free: int = 100_000, **more: Any) -> InstanceView:
    return InstanceView(name, version, kv_free=kv_free, **more)


def situation(
    instances: list[InstanceView], queue: list[Queued] | None = None, room: dict[int, int] | None = None, **more: Any
) -> Situation:
    return Situation(
        **{
            "now": 100.0,
            "newest": max((view.version for view in instances), default=0),
            "fleet": fleet_of(instances),
            "queue": queue or [],
            "room": room or {},
            "cost": COST,
            "pull_s": 1.0,
            "group_size": 2,
            **more,
        }
    )


def decided(kind: Registry[Any], situation: Situation, strategies: Strategies) -> list[Any]:
    return asked(kind, situation, strategies)


def started(group: str, version: int, *contexts: int) -> list[Queued]:
    return [Queued(f"{group}.{at}", group, context, version) for at, context in enumerate(contexts)]


def fresh(group: str, *contexts: int) -> list[Queued]:
    return [Queued(f"{group}.{at}", group, context, None) for at, context in enumerate(contexts)]


def same(one: Situation, other: Situation) -> bool:
    """Whether two situations hold equal values, arrays included."""
    for name in Situation.__slots__:
        mine, its = getattr(one, name), getattr(other, name)
        if name == "fleet":
            if not all(np.array_equal(getattr(mine, column), getattr(its, column)) for column in Fleet.__slots__):
                return False
        elif mine != its:
            return False
    return True


def clone(one: Situation) -> Situation:
    return copy.deepcopy(one)


def ledger_after(draw: st.DrawFn, steps: int, staleness: int) -> StalenessLedger:
    """A ledger in the middle of a run, with groups of several versions in flight."""
    ledger = StalenessLedger(batch_size=2, max_staleness=staleness)
    names = iter(range(10_000))
    while ledger.version < steps:
        for name in [f"done-{next(names)}" for _ in range(2 - ledger.taken)]:
            if ledger.reserve(name, ledger.version):
                ledger.occupy(name)
        if not ledger.ready():
            break
        batch = ledger.consume()
        ledger.commit(batch.step)
        for _ in range(draw(st.integers(0, 2))):
            ledger.reserve(f"live-{next(names)}", ledger.version)
    return ledger


@st.composite
def random_situations(draw: st.DrawFn) -> tuple[Situation, StalenessLedger]:
    """A situation whose room is that of a real ledger, which comes with it."""
    staleness = draw(st.integers(0, 3))
    ledger = ledger_after(draw, draw(st.integers(0, 4)), staleness)
    newest = ledger.version
    versions = st.integers(max(0, newest - staleness), newest)
    sizes = st.integers(0, 6)
    instances = [
        InstanceView(
            f"i{row}",
            draw(versions),
            running=(running := draw(sizes)),
            waiting=draw(st.sampled_from([0, 0, 0, 2])),
            context=running * draw(st.integers(0, 9_000)),
            kv_free=draw(st.integers(0, 30_000)),
            max_running=draw(st.integers(1, 8)),
            alive=draw(st.sampled_from([True, True, True, False])),
            pulling=draw(st.sampled_from([False, False, True])),
            speed=draw(st.sampled_from([1.0, 1.0, 0.7, 1.9])),
        )
        for row in range(draw(sizes))
    ]
    contexts = st.sampled_from([0, 100, 100, 3_000, 9_000, 20_000])
    groups = sorted(draw(st.lists(versions, max_size=5)))
    queue = [item for at, of in enumerate(groups) for item in started(f"s{at}", of, draw(contexts), draw(contexts))]
    for at in range(draw(sizes)):
        queue += fresh(f"f{at}", *[draw(contexts)] * 2)
    residents = [
        Resident(f"r{at}", f"s{at % 3}", at % len(instances), 1_000 * at, 900 * at, draw(versions), at % 3)
        for at in range(draw(sizes) if instances else 0)
    ]
    return Situation(
        now=100.0,
        newest=newest,
        fleet=fleet_of(instances),
        queue=queue,
        room={version: ledger.room(version) for version in range(max(0, newest - staleness), newest + 1)},
        cost=COST,
        pull_s=draw(st.sampled_from([0.0, 1.0])),
        group_size=2,
        pace=Pace(step_s=draw(st.sampled_from([0.0, 20.0])), mean_tokens=500.0),
        blockers=residents[:2],
        thrashing=[one for one in residents if instances[one.instance].waiting],
        blocked_since=draw(st.sampled_from([None, 0.0, 95.0])),
        turn=draw(st.integers(0, 20)),
    ), ledger
