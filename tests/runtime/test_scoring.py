"""Rewards that fail, are late, or never come: each trajectory is scored or given up, once and in time."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.runtime.scoring import Scoring
from staleflow.servers.lifecycle import Group, Trajectory
from tests.runtime.fakes import FakeRewards, now, on_virtual_time

TIMEOUT, TRIES = 10.0, 3


def trajectory(name: str = "p0/0") -> Trajectory:
    return Trajectory(name, Group("p0", 0, 0, 100, 1), state="generated")


class Office:
    def __init__(self) -> None:
        self.rewards = FakeRewards()
        self.given_up: list[tuple[float, str, str]] = []
        self.scoring = Scoring(
            self.rewards, TIMEOUT, TRIES, lambda each, why: self.given_up.append((now(), each.name, why))
        )


def test_a_worker_that_fails_is_asked_again_and_then_given_up_with_its_last_reason() -> None:
    async def main() -> None:
        office = Office()
        office.scoring.ask(trajectory())
        for why in ("out of memory", "no route", "bad answer"):
            assert not office.given_up
            office.scoring.failed("p0/0", why)
        assert office.rewards.asked == ["p0/0"] * TRIES
        assert office.given_up == [(0.0, "p0/0", "bad answer")]
        office.scoring.failed("p0/0", "too late to matter")
        assert not office.scoring.answered("p0/0")
        assert len(office.given_up) == 1

    on_virtual_time(main())


def test_a_worker_that_never_answers_does_not_hold_the_group_for_ever() -> None:
    async def main() -> None:
        office = Office()
        office.scoring.ask(trajectory())
        await asyncio.sleep(TIMEOUT * TRIES + 1)
        assert office.rewards.asked == ["p0/0"] * TRIES
        assert office.given_up == [(TIMEOUT * TRIES, "p0/0", "reward timed out")]

    on_virtual_time(main())


def test_a_late_answer_to_an_earlier_try_counts_and_a_second_one_does_not() -> None:
    async def main() -> None:
        office = Office()
        office.scoring.ask(trajectory())
        await asyncio.sleep(TIMEOUT + 1)
        assert len(office.rewards.asked) == 2
        assert office.scoring.answered("p0/0")
        assert not office.scoring.answered("p0/0")
        await asyncio.sleep(TIMEOUT * TRIES)
        assert len(office.rewards.asked) == 2, "an answered trajectory is not asked for again"
        assert not office.given_up

    on_virtual_time(main())


def test_how_long_an_answer_took_is_told_once() -> None:
    async def main() -> None:
        office, seconds = Office(), list[float]()
        office.scoring.on_answer = seconds.append
        office.scoring.ask(trajectory())
        await asyncio.sleep(3.0)
        office.scoring.answered("p0/0")
        office.scoring.answered("p0/0")
        office.scoring.answered("never asked")
        assert seconds == [3.0]

    on_virtual_time(main())


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    async def main() -> None:
        office = Office()
        assert not office.scoring.answered("p9/0")
        office.scoring.failed("p9/0", "why not")
        assert not office.rewards.asked
        assert not office.given_up

    on_virtual_time(main())


def test_nobody_is_asked_after_the_end_of_the_run() -> None:
    async def main() -> None:
        office = Office()
        office.scoring.ask(trajectory())
        office.scoring.close()
        await asyncio.sleep(TIMEOUT * TRIES * 2)
        assert office.rewards.asked == ["p0/0"]
        assert not office.given_up
        assert not office.scoring.answered("p0/0")

    on_virtual_time(main())


outcomes = st.tuples(st.sampled_from(["answer", "fail", "silence"]), st.floats(0.0, 2.5 * TIMEOUT))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.lists(outcomes, min_size=TRIES, max_size=TRIES)), max_size=6))
def test_every_trajectory_ends_once_and_within_its_tries(plans: list[tuple[float, list[tuple[str, float]]]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        asked: Counter[str] = Counter()
        ended: dict[str, list[float]] = {}
        tries = {f"p{at}/0": tries for at, (_, tries) in enumerate(plans)}

        class Worker:
            def score(self, trajectory: Trajectory) -> None:
                kind, delay = tries[trajectory.name][asked[trajectory.name]]
                asked[trajectory.name] += 1
                if kind == "answer":
                    loop.call_later(delay, answer, trajectory.name)
                elif kind == "fail":
                    loop.call_later(delay, scoring.failed, trajectory.name, "failed")

        def answer(name: str) -> None:
            if scoring.answered(name):
                ended.setdefault(name, []).append(now())

        def give_up(each: Trajectory, why: str) -> None:
            assert asked[each.name] == TRIES, "given up before every try was made"
            assert why in ("failed", "reward timed out")
            ended.setdefault(each.name, []).append(now())

        scoring = Scoring(Worker(), TIMEOUT, TRIES, give_up)
        for at, (start, _) in enumerate(plans):
            loop.call_later(start, scoring.ask, trajectory(f"p{at}/0"))
        await asyncio.sleep(200)
        for at, (start, _) in enumerate(plans):
            (end,) = ended[f"p{at}/0"]
            assert end <= start + TIMEOUT * TRIES + 1e-6

    on_virtual_time(main())
