"""A run that was suspended is not blamed for the silence, and is for as much silence as any other."""

import asyncio

import pytest

from staleflow.runtime.control import StalledError
from staleflow.simulate.clock import VirtualLoop
from tests.runtime.fakes import World, now, on_virtual_time


def stalls_at(*stops: tuple[float, float]) -> float:
    """When a run of which nothing is heard ends. ``stops``: when everything stands still, and for how long."""

    async def main() -> float:
        world = World(settings={"stall_s": 100.0, "instance_timeout_s": 60.0})  # it looks every 15 s
        run = await world.begin()
        world.finish_and_score("p0/0", "p1/0")  # from now on it waits for the trainer
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for when, seconds in stops:
            loop.at(when, loop.jump, seconds)
        with pytest.raises(StalledError, match="nothing was heard for 100 s"):
            await run
        return now()

    return on_virtual_time(main())


def test_the_time_for_which_a_run_was_suspended_does_not_count_as_silence() -> None:
    assert stalls_at() == 120.0  # the last news is that of the look after 15 s
    assert stalls_at((20.0, 1000.0)) == 1110.0, "it was due at 30 s and looked at 1020 s: 990 s do not count"
    assert stalls_at((50.0, 90.0)) == pytest.approx(120.0 + 80.0), "also if that is less than what a run may be silent"
    assert stalls_at((20.0, 1000.0), (1052.0, 5000.0)) == 6097.0, "each time"
