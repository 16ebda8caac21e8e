"""Every state that a small ledger can reach, by every interleaving of its operations.

Groups keep the order in which they were reserved and completed, so this is the real ledger and not an abstraction of
it. Only two things are folded: the names of the groups, and versions count from the present one (from
``max_staleness`` updates on, nothing else can depend on them). That makes the state space finite. Each operation
starts from a ledger restored from its saved state, so saving is exercised at every state.

    python -m tests.protocol.explorer            # prints states and transitions for all small sizes
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from staleflow.protocol import StalenessLedger
from tests.protocol.oracle import most_placed

State = dict[str, Any]
Key = tuple[Any, ...]
Step = tuple[str, Callable[[StalenessLedger], object]]

SIZES = [*product((1, 2), (0, 1, 2), (0, 1), (5,)), (2, 1, 1, 6), (3, 1, 0, 6), (2, 2, 0, 6)]


@dataclass
class Exploration:
    batch_size: int
    max_staleness: int
    redundancy: int
    groups: int
    transitions: int = 0
    numbers: dict[Key, int] = field(default_factory=dict)
    progress: list[set[int]] = field(default_factory=list)
    """For each state, those from which an operation that always happens in the end leads to it."""
    commits: list[int] = field(default_factory=list)
    """States in which the full step can be committed."""

    @property
    def states(self) -> int:
        return len(self.numbers)

    def run(self) -> "Exploration":
        queue: deque[tuple[int, State]] = deque()
        self._number(StalenessLedger(self.batch_size, self.max_staleness, self.redundancy).to_state(), queue)
        while queue:
            here, state = queue.popleft()
            check_invariants(StalenessLedger.from_state(state), state)
            for label, operation in self._operations(state):
                ledger = StalenessLedger.from_state(state)
                if operation(ledger) is False:
                    assert ledger.to_state() == state, f"a refused {label} changed the ledger"
                    continue
                self.transitions += 1
                after = ledger.to_state()
                check_conservation(state, after, label)
                there = self._number(after, queue)
                if label in PROGRESS:
                    self.progress[there].add(here)
                if label == "commit":
                    self.commits.append(here)
        return self

    def hopeless(self) -> int:
        """States from which no sequence of completions and admissions leads to a commit. Must be 0."""
        reached = set(self.commits)
        todo = list(reached)
        while todo:
            fresh = self.progress[todo.pop()] - reached
            reached |= fresh
            todo += fresh
        return self.states - len(reached)

    def _number(self, state: State, queue: deque[tuple[int, State]]) -> int:
        key = self._key(state)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.numbers)
            self.progress.append(set())
            queue.append((number, state))
        return number

    def _key(self, state: State) -> Key:
        now = state["version"]
        return (min(now, self.max_staleness), *((now - version, held) for _, version, held in state["groups"]))

    def _operations(self, state: State) -> Iterator[Step]:
        now = state["version"]
        used = {name for name, _, _ in state["groups"]}
        fresh = next((name for name in map(str, range(self.groups)) if name not in used), None)
        versions = range(max(0, now - self.max_staleness - 1), now + 1)
        for version in versions if fresh is not None else ():
            yield "reserve", lambda ledger, v=version: ledger.reserve(str(fresh), v)
        for name, version, held in state["groups"]:
            if held == "in flight":
                yield "occupy", lambda ledger, g=name: ledger.occupy(g)
                for other in versions:
                    if other < version:
                        yield "lower", lambda ledger, g=name, v=other: ledger.lower(g, v)
                    elif other > version:
                        yield "renew", lambda ledger, g=name, v=other: ledger.renew(g, v)
            if held != "leased":
                yield "release", lambda ledger, g=name: ledger.release(g, "released")
        yield "take", lambda ledger: bool(ledger.take(1))
        yield "take", lambda ledger: bool(ledger.take())
        for rank in (None, lambda name: float(name), lambda name: -float(name)) if self.redundancy else (None,):
            yield "consume", lambda ledger, r=rank: ledger.ready() and ledger.consume(r)
        yield "commit", commit
        yield "rollback", rollback


PROGRESS = {"reserve", "occupy", "take", "consume", "commit"}


def commit(ledger: StalenessLedger) -> bool:
    if ledger.frontier == ledger.version:
        return False
    ledger.commit(ledger.version)
    return True


def rollback(ledger: StalenessLedger) -> bool:
    if not ledger.taken:
        return False
    ledger.rollback(ledger.version)
    return True


def check_invariants(ledger: StalenessLedger, state: State) -> None:
    batch, bound, now = ledger.batch_size, ledger.max_staleness, ledger.version
    leased = [version for _, version, held in state["groups"] if held == "leased"]
    waiting = [version for _, version, held in state["groups"] if held != "leased"]
    full = len(leased) == batch
    assert all(now - version <= bound for version in leased), "bound: a leased group is too old"
    assert len(leased) <= batch, "exactly once: a step has more groups than a batch"
    assert len({name for name, _, _ in state["groups"]}) == len(state["groups"]), "exactly once: a group is held twice"
    deadlines = tuple(sorted(version + bound - ledger.frontier for version in waiting))
    gone = 0 if full else len(leased)
    assert most_placed(deadlines, batch + ledger.redundancy, gone) == len(deadlines), "bound: a deadline will be missed"
    if bound == 0 and full:
        assert not waiting, "bound 0: data for the next step exists while this one trains"
        assert not ledger.can_reserve(now), "bound 0: generation would overlap training"
    assert StalenessLedger.from_state(state).to_state() == state, "durable: a restored ledger differs"


def check_conservation(before: State, after: State, label: str) -> None:
    def ended(state: State) -> int:
        return state["committed"] + sum(state["released"].values())

    born = len(after["groups"]) + ended(after) - len(before["groups"]) - ended(before)
    assert born == (label == "reserve"), f"nothing lost: {label} changed the number of admitted groups by {born}"
    gone = after["committed"] - before["committed"]
    assert gone == (before["batch_size"] if label == "commit" else 0), f"exactly once: {label} committed {gone} groups"


def main() -> None:
    start = time.perf_counter()
    transitions = 0
    print("batch  staleness  redundancy  groups     states  transitions  hopeless")
    for size in SIZES:
        found = Exploration(*size).run()
        transitions += found.transitions
        print("{:5}  {:9}  {:10}  {:6}".format(*size), end="")
        print(f"  {found.states:9,}  {found.transitions:11,}  {found.hopeless():8}", flush=True)
    print(f"{transitions:,} transitions in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
