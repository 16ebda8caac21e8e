"""The eleven defects that running the authors' own code (PSRL) showed, each as a scenario that the ledger passes."""

import random
from collections import deque
from collections.abc import Callable

import pytest

from staleflow.protocol import REDUNDANT, LedgerError, StalenessLedger

Filter = Callable[[str], str | None]


class Run:
    """A run in miniature: prompts come in, groups finish in random order, steps are trained as soon as they can be.

    A prompt whose group was released is owed and comes again under a new name. ``lost`` decides, when a group
    finishes, whether it is thrown away, and why.
    """

    def __init__(self, ledger: StalenessLedger, seed: int, prompts: int | None = None) -> None:
        self.ledger = ledger
        self.random = random.Random(seed)
        self.left = prompts
        self.owed: deque[str] = deque()
        self.started = 0
        self.in_flight: dict[str, int] = {}
        self.trained: list[str] = []

    def next_prompt(self) -> str | None:
        if self.owed:
            return self.owed.popleft()
        if self.left == 0:
            return None
        self.left = None if self.left is None else self.left - 1
        self.started += 1
        return f"p{self.started}"

    def step(self, lost: Filter = lambda _: None) -> None:
        """Train one step; fails the test if the run would hang."""
        ledger = self.ledger
        while not ledger.ready():
            self.admit()
            assert self.in_flight, f"a hang at step {ledger.frontier}: {ledger.counts()}"
            group = self.random.choice(sorted(self.in_flight))
            del self.in_flight[group]
            if reason := lost(group):
                ledger.release(group, reason)
                self.owe(group)
            else:
                ledger.occupy(group)
        batch = ledger.consume()
        for group in batch.aborted:
            self.in_flight.pop(group, None)
            self.owe(group)
        assert len(batch.groups) == ledger.batch_size, "a short batch"
        self.trained += [prompt_of(group) for group in batch.groups]
        ledger.commit(batch.step)

    def admit(self) -> None:
        while self.ledger.can_reserve(self.ledger.version) and (prompt := self.next_prompt()):
            group = f"{prompt}/{self.random.getrandbits(40)}"
            assert self.ledger.reserve(group, self.ledger.version)
            self.in_flight[group] = self.ledger.version

    def owe(self, group: str) -> None:
        self.owed.append(prompt_of(group))


def prompt_of(group: str) -> str:
    return group.split("/")[0]


def advance(ledger: StalenessLedger, steps: int) -> None:
    """Train ``steps`` steps on groups that leave nothing behind."""
    for step in range(steps):
        for number in range(ledger.batch_size):
            assert ledger.reserve(f"{step}:{number}", step)
            ledger.occupy(f"{step}:{number}")
        ledger.commit(ledger.consume().step)


def chance(run: Run, share: float, reason: str) -> Filter:
    return lambda _: reason if run.random.random() < share else None


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("share", [0.3, 0.05, 0.9])
def test_d1_filtered_groups_never_use_up_the_admission(staleness: int, share: float) -> None:
    run = Run(StalenessLedger(4, staleness), seed=1)
    for _ in range(60):
        run.step(chance(run, share, "filtered"))
    assert run.ledger.version == 60


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_d2_a_finished_redundant_group_always_has_somewhere_to_go(staleness: int, seed: int) -> None:
    run = Run(StalenessLedger(4, staleness, redundancy=2), seed)
    for _ in range(12):
        run.step()
    assert len(run.trained) == len(set(run.trained)) == 48


def test_d3_aborting_one_group_touches_no_other_whatever_the_names_look_like() -> None:
    ledger = StalenessLedger(4, 1)
    for name in ("0", "1", "2", "3", "8"):
        assert ledger.reserve(name, 0)
    ledger.release("8", "aborted")
    assert [name for name, _, _ in ledger.to_state()["groups"]] == ["0", "1", "2", "3"]
    with pytest.raises(LedgerError, match="'8' is not live"):
        ledger.release("8", "aborted")


def test_d4_portions_neither_repeat_nor_skip_a_group_when_an_older_one_comes_late() -> None:
    ledger = StalenessLedger(4, 6)
    advance(ledger, 5)
    for name, version in (("10", 5), ("11", 5), ("12", 4), ("13", 5)):
        assert ledger.reserve(name, version)
    emitted: list[str] = []
    for first, second in (("10", "11"), ("12", "13")):
        ledger.occupy(first)
        ledger.occupy(second)
        emitted += ledger.take(2)
    assert emitted == ["10", "11", "12", "13"]
    assert ledger.frontier == 6


def test_d5_a_group_lost_between_ready_and_consume_is_an_answer_not_a_crash() -> None:
    ledger = StalenessLedger(2, 0)
    for name in "ab":
        ledger.reserve(name, 0)
        ledger.occupy(name)
    assert ledger.ready()
    ledger.release("a", "filtered")
    before = ledger.to_state()
    with pytest.raises(LedgerError, match="lacks 1 complete group"):
        ledger.consume()
    assert ledger.to_state() == before
    ledger.reserve("c", 0)
    ledger.occupy("c")
    assert ledger.consume().groups == ["b", "c"]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_d6_the_end_of_the_data_never_makes_a_short_batch(staleness: int) -> None:
    run = Run(StalenessLedger(4, staleness), seed=6, prompts=4 * 9 + 2)
    for _ in range(9):
        run.step()
    run.admit()
    for group in run.in_flight:
        run.ledger.occupy(group)
    assert not run.ledger.ready()
    assert run.ledger.blocking() == []
    assert len(run.ledger.take()) == run.ledger.taken == 2
    run.ledger.rollback(9)
    assert run.ledger.counts()["complete"] == 2


@pytest.mark.parametrize("seed", range(20))
def test_d7_redundancy_returns_every_prompt_it_gave_up_so_the_data_is_enough(seed: int) -> None:
    run = Run(StalenessLedger(4, 1, redundancy=2), seed, prompts=4 * 15)
    for _ in range(15):
        run.step()
    assert sorted(run.trained) == sorted(f"p{number}" for number in range(1, 61))
    assert run.ledger.counts()["released"].get(REDUNDANT, 0) > 0


@pytest.mark.parametrize("seed", range(20))
def test_d8_a_time_out_gives_its_place_back_at_bound_0(seed: int) -> None:
    run = Run(StalenessLedger(4, 0), seed)
    for _ in range(40):
        run.step(chance(run, 0.1, "timed out"))
    assert run.ledger.counts()["committed"] == 160


def test_d9_a_group_has_one_version_the_oldest_of_its_members() -> None:
    ledger = StalenessLedger(1, 2)
    advance(ledger, 4)
    now = ledger.version
    assert ledger.reserve("g", now)
    for member in (now - 1, now, now - 1):
        assert ledger.lower("g", member)
    assert next(version for name, version, _ in ledger.to_state()["groups"] if name == "g") == now - 1


def test_d10_nothing_of_a_group_that_was_given_up_is_kept() -> None:
    ledger = StalenessLedger(4, 1, redundancy=2)
    run = Run(ledger, seed=10)
    for _ in range(200):
        run.step()
        assert len(ledger.to_state()["groups"]) == ledger.counts()["live"] <= 6 * 2
    counts = ledger.counts()
    assert counts["admitted"] == counts["live"] + counts["committed"] + counts["released"][REDUNDANT]


def test_d11_a_complete_group_filtered_at_the_last_moment_is_replaced() -> None:
    ledger = StalenessLedger(2, 0)
    for name in "ab":
        ledger.reserve(name, 0)
        ledger.occupy(name)
    ledger.release("b", "no signal")
    assert ledger.room(0) == 1
    assert ledger.reserve("c", 0)
    ledger.occupy("c")
    assert ledger.consume().groups == ["a", "c"]
