"""The control plane's process is woken up for what has come within a moment, not for each message."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from staleflow.runtime.local.patience import DELAY_S, PatientLoop, PatientSelector, expect, run_patiently

Pair = tuple[socket.socket, socket.socket]


class Patient(PatientSelector):
    """By a clock that only waiting moves; something may happen while it waits."""

    def __init__(self) -> None:
        self.now = 100.2
        super().__init__(0.5, lambda: self.now)
        self.waited: list[float] = []
        self.meanwhile = lambda: None

    def wait(self, seconds: float) -> None:
        self.meanwhile()
        if not self._urgent.select(0):
            self.waited.append(round(seconds, 6))
            self.now += seconds


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    with ExitStack() as held:
        found = [socket.socketpair() for _ in range(2)]
        for pair in found:
            for end in pair:
                held.enter_context(end)
        yield found


@pytest.fixture
def selector(pairs: list[Pair]) -> Iterator[Patient]:
    with Patient() as patient:
        for ours, _ in pairs:
            patient.register(ours, selectors.EVENT_READ)
        yield patient


def readable(selector: PatientSelector, timeout: float | None = None) -> set[object]:
    return {key.fileobj for key, _ in selector.select(timeout)}


def test_two_messages_within_a_moment_do_not_wake_the_process_twice(pairs: list[Pair], selector: Patient) -> None:
    (a, to_a), (b, to_b) = pairs
    to_a.send(b"1")
    assert readable(selector) == {a}  # nothing was there before: no wait
    assert not selector.waited
    a.recv(1)
    to_a.send(b"2")
    selector.now += 0.1
    selector.meanwhile = lambda: (to_b.send(b"3"), None)[1]
    assert readable(selector) == {a, b}
    assert selector.now == pytest.approx(100.5 + DELAY_S)  # where the ticks are, not the message


def test_what_comes_after_a_pause_is_not_delayed(pairs: list[Pair], selector: Patient) -> None:
    (a, to_a), _ = pairs
    to_a.send(b"1")
    readable(selector)
    selector.now += 0.6
    assert readable(selector) == {a}
    assert not selector.waited


def test_the_trainer_does_not_wait_for_the_end_of_a_moment(pairs: list[Pair], selector: Patient) -> None:
    (a, to_a), (b, to_b) = pairs
    selector.hurry(b.fileno())
    to_a.send(b"1")
    readable(selector)
    selector.meanwhile = lambda: (to_b.send(b"2"), None)[1]
    assert readable(selector) == {a, b}
    assert not selector.waited
    selector.unregister(b)  # its connection has ended
    assert readable(selector) == {a}
    assert selector.waited


def test_what_is_expected_soon_ends_the_moment_and_the_next_one_begins_at_its_tick(
    pairs: list[Pair], selector: Patient
) -> None:
    (a, to_a), (b, to_b) = pairs
    to_a.send(b"1")
    readable(selector)
    a.recv(1)
    selector.expect(0.05)
    selector.expect(0.2)  # later than that
    selector.meanwhile = lambda: (to_a.send(b"2"), None)[1]
    assert readable(selector) == {a}
    assert selector.now == pytest.approx(100.25)
    selector.meanwhile = lambda: (to_b.send(b"3"), None)[1]
    assert readable(selector) == {a, b}
    assert selector.now == pytest.approx(100.5 + DELAY_S)
    selector.expect(10.0)  # the moment ends before
    assert readable(selector) == {a, b}
    assert selector.now == pytest.approx(101.0 + DELAY_S)


def test_only_a_patient_loop_is_told_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(PatientSelector, "expect", lambda _, seconds: told.append(seconds))

    async def main() -> None:
        expect(0.5)

    asyncio.run(main())
    assert told == []
    run_patiently(main())
    assert told == [0.5]


def test_work_at_hand_and_due_timers_do_not_wait_for_ever(pairs: list[Pair], selector: Patient) -> None:
    pairs[0][1].send(b"1")
    readable(selector)
    pairs[0][0].recv(1)
    assert readable(selector, 0) == set()
    assert not selector.waited  # a callback is ready: only a look
    assert readable(selector, 0.005) == set()  # a timer is due within the moment: it comes at its end
    assert selector.waited == [0.3 + DELAY_S]


def test_other_threads_and_signals_wake_the_loop_up_within_a_moment() -> None:
    """The trainer's step may wait for the journal's thread."""
    with closing(PatientLoop()) as loop:
        own = {key.fd for key in loop._selector.get_map().values()}  # type: ignore[attr-defined]
        assert own == {key.fd for key in loop._patient._urgent.get_map().values()}


def test_a_coroutine_runs_to_its_end_with_timers_threads_and_tasks() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        task = asyncio.create_task(queue.put(1))
        await asyncio.sleep(0.001)
        await queue.put(await asyncio.to_thread(lambda: 2))
        await task
        return [await queue.get(), await queue.get()]

    assert run_patiently(main()) == [1, 2]
