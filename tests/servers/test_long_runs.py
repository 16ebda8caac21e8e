"""Long random runs of a trajectory server: the rules of ``test_trajectories``, in runs that train many steps."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tests.servers.test_trajectories import ServerMachine

KINDS = {"admit", "reserve", "lower", "renew", "route", "stream", "interrupt", "requeue", "generated", "score"}
KINDS |= {"occupy", "release", "lease", "consume", "commit", "rollback"}

SHAPES = (
    {"batch": 1, "staleness": 0, "redundancy": 0, "size": 2, "extra": 1},
    {"batch": 2, "staleness": 1, "redundancy": 1, "size": 2, "extra": 0},
    {"batch": 3, "staleness": 2, "redundancy": 0, "size": 1, "extra": 1},
    {"batch": 2, "staleness": 2, "redundancy": 1, "size": 2, "extra": 1},
)


def run(shape: dict[str, int], seed: int, operations: int = 400) -> ServerMachine:
    random = Random(seed)
    machine = ServerMachine()
    machine.start(**shape)

    def choice() -> int:
        return random.randrange(4096)

    def admit() -> None:
        if machine.server.fresh < 2:
            machine.admit(1)

    def commit() -> None:
        if machine.ledger.frontier > machine.ledger.version:
            machine.commit()

    def rollback() -> None:
        if machine.ledger.taken:
            machine.rollback()

    def report(*kinds: str) -> None:
        machine.report(choice(), random.choice(kinds), random.choice((0, 0, 0, 0, -1, 1)), random.randrange(10))

    weighted: tuple[tuple[int, Callable[[], object]], ...] = (
        (8, admit),
        (20, lambda: machine.place(choice(), random.choice((0, 0, 1, 2)), random.choice(("i0", "i1")))),
        (10, lambda: report("stream", "give_back")),
        (12, lambda: report("generated")),
        (5, lambda: machine.interrupt(choice())),
        (14, lambda: machine.score(choice(), 1.0)),
        (8, lambda: machine.renew(choice(), 0)),
        (1, lambda: machine.release(choice(), "no signal")),
        (4, machine.take),
        (4, machine.consume),
        (3, commit),
        (1, rollback),
    )
    weights, calls = zip(*weighted, strict=True)
    for call in random.choices(calls, weights, k=operations):
        call()
        machine.replay_gives_the_same_server()
        machine.no_prompt_is_lost_or_drawn_twice()
        machine.ledger_and_server_know_the_same_groups()
        machine.the_queue_holds_what_waits_oldest_first_and_then_fresh()
    return machine


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_lost_or_trained_twice_in_a_long_run(shape: dict[str, int]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        machine = run(shape, seed)
        assert machine.ledger.version >= 1, "the run got nowhere"
        seen.update(event[0] for event in machine.journal.events)
    assert not KINDS - set(seen) - ({"lower", "renew"} if shape["staleness"] == 0 else set())


def test_the_same_calls_write_the_same_journal() -> None:
    one, again, other = (run(SHAPES[1], seed, 120).journal.digest() for seed in (7, 7, 8))
    assert one == again != other
