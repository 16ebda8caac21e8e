"""Channels lose nothing for good while both ends live, and keep the order where sockets would."""

import asyncio
from random import Random

import pytest

from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.network import TROUBLES, Channel


def sent(kind: str, ordered: bool, seed: int = 1, cut_at: float = float("inf")) -> list[tuple[int, float]]:
    """Which of 40 messages, one every second, arrived when; the trouble is from 10 s to 30 s."""
    loop = VirtualLoop()
    channel, arrived = Channel(loop, Random(seed), ordered), list[tuple[int, float]]()

    async def main() -> None:
        loop.call_at(10, channel.trouble, kind, 20.0)
        if cut_at < 1000:
            loop.call_at(cut_at, channel.cut)
        for number in range(40):
            channel.send(lambda which: arrived.append((which, loop.now)), number)
            await asyncio.sleep(1)
        await asyncio.sleep(200)

    loop.run(main())
    return arrived


@pytest.mark.parametrize("kind", TROUBLES)
@pytest.mark.parametrize("ordered", [False, True])
def test_every_message_arrives_and_where_order_is_kept_once_and_in_order(kind: str, ordered: bool) -> None:
    for seed in range(20):
        arrived = sent(kind, ordered, seed)
        assert {number for number, _ in arrived} == set(range(40))
        assert all(time >= number for number, time in arrived)
        assert [time for number, time in arrived if number < 10] == list(range(10)), "at once without trouble"
        if ordered:
            assert [number for number, _ in arrived] == list(range(40))


def test_messages_overtake_each_other_or_come_twice_where_order_is_not_kept() -> None:
    late = [number for number, _ in sent("very late", ordered=False)]
    assert late != sorted(late)
    assert len(sent("repeated", ordered=False)) > 40


def test_nothing_overtakes_what_is_late_because_the_clock_has_jumped() -> None:
    loop = VirtualLoop()
    channel, arrived = Channel(loop, Random(1), ordered=True), list[str]()

    async def main() -> None:
        channel.trouble("held back", 5.0)
        channel.send(arrived.append, "first")
        loop.jump(10.0)
        channel.send(arrived.append, "second")
        await asyncio.sleep(1)

    loop.run(main())
    assert arrived == ["first", "second"]


def test_what_is_on_its_way_when_an_end_dies_arrives_nowhere_and_the_next_connection_is_a_new_one() -> None:
    arrived = [number for number, _ in sent("held back", ordered=True, cut_at=20.5)]
    assert arrived == [*range(10), *range(21, 40)]
