"""The virtual clock: no waiting, no hidden order, no silent hang."""

import asyncio

import pytest

from staleflow.simulate.clock import DeadlockError, VirtualLoop


def test_a_year_of_sleep_takes_no_time_and_ends_on_the_second() -> None:
    loop = VirtualLoop()

    async def main() -> float:
        await asyncio.sleep(365 * 86400.0)
        return asyncio.get_running_loop().time()

    assert loop.run(main()) == 365 * 86400.0


def test_a_wait_for_something_that_cannot_come_names_the_tasks_that_wait() -> None:
    async def main() -> None:
        stuck = asyncio.create_task(asyncio.Event().wait(), name="trainer waits for step 3")
        await asyncio.sleep(5)
        await stuck

    with pytest.raises(DeadlockError, match=r"at 5.000 s nothing can happen .* trainer waits for step 3"):
        VirtualLoop().run(main())


def order_of(shuffle: int | None) -> list[int]:
    seen: list[int] = []

    async def note(number: int) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append(number)

    async def main() -> None:
        await asyncio.gather(*(note(number) for number in range(20)))

    VirtualLoop(shuffle).run(main())
    return seen


def test_the_ready_queue_runs_in_order_or_in_the_order_of_the_seed() -> None:
    assert order_of(None) == list(range(20))
    assert order_of(1) == order_of(1) != order_of(2)
    assert sorted(order_of(1)) == list(range(20))


def test_every_instant_is_checked_once_after_all_its_callbacks() -> None:
    loop = VirtualLoop()
    done: list[float] = []
    checked: list[tuple[float, int]] = []
    loop.on_instant = lambda: checked.append((loop.time(), len(done)))

    async def main() -> None:
        for delay in (1.0, 1.0, 2.0):
            loop.call_at(delay, done.append, delay)
        await asyncio.sleep(3)

    loop.run(main())
    assert checked == [(0.0, 0), (1.0, 2), (2.0, 3)]


def test_timers_that_were_due_while_the_process_slept_are_late_and_in_their_order() -> None:
    loop, fired = VirtualLoop(), list[tuple[str, float]]()

    async def main() -> None:
        for when in (3.0, 1.0, 2.0, 50.0):
            loop.call_at(when, lambda when=when: fired.append((f"{when:g}", loop.now)))
        loop.at(0.5, loop.jump, 10.0)
        await asyncio.sleep(60)

    loop.run(main())
    assert fired == [("1", 10.5), ("2", 10.5), ("3", 10.5), ("50", 50.0)]
