"""The control plane's process is woken up for what has come within a moment, not for each message."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from staleflow.runtime.local.patience import PatientSelector, run_patiently

Pair = tuple[socket.socket, socket.socket]


class World:
    """A clock that only sleeping moves, and what happens during the sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.meanwhile = lambda: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    with ExitStack() as held:
        found = [socket.socketpair() for _ in range(2)]
        for pair in found:
            for end in pair:
                held.enter_context(end)
        yield found


def watching(pairs: list[Pair], world: World) -> PatientSelector:
    selector = PatientSelector(0.5, world.clock, world.sleep)
    for ours, _ in pairs:
        selector.register(ours, selectors.EVENT_READ)
    return selector


def readable(selector: PatientSelector, timeout: float | None = None) -> set[object]:
    return {key.fileobj for key, _ in selector.select(timeout)}


def test_two_messages_within_a_moment_do_not_wake_the_process_twice(pairs: list[Pair]) -> None:
    (a, to_a), (b, to_b) = pairs
    world = World()
    with watching(pairs, world) as selector:
        to_a.send(b"1")
        assert readable(selector) == {a}  # nothing was there before: no wait
        assert not world.slept
        a.recv(1)
        to_a.send(b"2")
        world.meanwhile = lambda: (to_b.send(b"3"), None)[1]
        assert readable(selector) == {a, b}
        assert world.slept == [0.5]


def test_what_comes_after_a_pause_is_not_delayed(pairs: list[Pair]) -> None:
    (a, to_a), _ = pairs
    world = World()
    with watching(pairs, world) as selector:
        to_a.send(b"1")
        readable(selector)
        world.now += 0.6
        assert readable(selector) == {a}
        assert not world.slept


def test_work_at_hand_and_due_timers_do_not_wait_for_ever(pairs: list[Pair]) -> None:
    world = World()
    with watching(pairs, world) as selector:
        pairs[0][1].send(b"1")
        readable(selector)
        pairs[0][0].recv(1)
        assert readable(selector, 0) == set()
        assert not world.slept  # a callback is ready: only a look
        assert readable(selector, 0.1) == set()  # a timer is due within the moment: it comes at its end
        assert world.slept == [0.5]


def test_a_coroutine_runs_to_its_end_with_timers_threads_and_tasks() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        task = asyncio.create_task(queue.put(1))
        await asyncio.sleep(0.001)
        await queue.put(await asyncio.to_thread(lambda: 2))
        await task
        return [await queue.get(), await queue.get()]

    assert run_patiently(main()) == [1, 2]
