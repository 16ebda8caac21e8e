"""The event-skipping instance against its per-token twin, and what it promises by itself."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.coordinator.cost import CostModel
from staleflow.simulate.instance import Finished, Instance, InstanceEvent, Interrupted, Paused, SimRequest
from tests.simulate.per_token_instance import PerTokenInstance

REALISTIC = CostModel(0.012303, 0.0049075, 2.441e-4, 0.0019664, 1.165e-7, 2.441e-4)
CONTEXT_BOUND = CostModel(0.001, 0.0, 1e-5, 0.0003, 4e-5, 1e-5)
# Powers of two: all times are exact in floating point, so that commands can be made to arrive exactly at boundaries.
EXACT = CostModel(2**-6, 2**-8, 2**-12, 2**-9, 2**-20, 2**-14)
GRID = CostModel(2**-6, 0.0, 0.0, 2**-6, 0.0, 2**-9)


@dataclass(frozen=True)
class Setup:
    cost: CostModel
    kv_blocks: int
    block: int = 16
    max_running: int = 24
    chunk: int = 256
    groups: int = 60
    members: int = 4
    prompt: tuple[int, int] = (1, 200)
    mean: float = 60.0
    gap: float = 0.4  # seconds between groups

    @property
    def exact(self) -> bool:
        return self.cost in (EXACT, GRID)

    def build(self, kind: type[Any]) -> Any:
        return kind(self.cost, self.kv_blocks, self.block, self.max_running, self.chunk)


SETUPS = {
    "roomy": Setup(REALISTIC, kv_blocks=2000),
    "small cache": Setup(REALISTIC, kv_blocks=70, gap=0.6),
    "tiny cache, odd blocks": Setup(REALISTIC, kv_blocks=200, block=3, max_running=12, groups=40),
    "long prompts, small chunks": Setup(REALISTIC, kv_blocks=900, chunk=17, prompt=(100, 900), mean=20, groups=40),
    "context bound": Setup(CONTEXT_BOUND, kv_blocks=150, mean=150, groups=40),
    "one at a time": Setup(CONTEXT_BOUND, kv_blocks=120, max_running=1, groups=30, members=2),
    "blocks of one": Setup(CONTEXT_BOUND, kv_blocks=700, block=1, chunk=64),
    "exact": Setup(EXACT, kv_blocks=90),
    "exact, prompts of whole blocks": Setup(EXACT, kv_blocks=90, block=8, prompt=(8, 8), chunk=8),
    "commands on boundaries": Setup(GRID, kv_blocks=60, gap=0.3),
    "commands on boundaries, crowded": Setup(GRID, kv_blocks=40, chunk=40, gap=0.1, prompt=(1, 90)),
}


class Driver:
    """Drives an instance with random commands and logs what it did, so that the twin can be driven the same way."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.rng = random.Random(seed)
        self.instance: Instance = setup.build(Instance)
        self.log: list[tuple[str, float, Any]] = []
        self.events: list[tuple[str, float, str, int]] = []
        self.looks: list[Any] = []
        self.agenda: list[tuple[float, int, str, Any]] = []
        self.numbers = itertools.count()
        self.requested = 0
        time = 0.0
        for index in range(setup.groups):
            time += self.delay(setup.gap)
            prompt = self.rng.randint(*setup.prompt)
            for member in range(setup.members):
                longest = setup.kv_blocks * setup.block - prompt
                target = min(1 + int(self.rng.lognormvariate(0, 1) * setup.mean), 600, longest)
                self.plan(time, "submit", SimRequest(f"{index}.{member}", str(index), prompt, 0, target))
                self.requested += target
        for kind, each in (("interrupt", 1), ("pause", 4), ("speed", 8), ("look", 0.5), ("crash", 16)):
            for _ in range(int(setup.groups / each)):
                self.plan(self.rng.random() * time * 1.3, kind)

    def delay(self, mean: float) -> float:
        if self.setup.exact:
            return self.rng.choice([0, 0, 1, 2, 3, 8, int(mean * 128)]) / 64
        return self.rng.expovariate(1 / mean)

    def plan(self, time: float, kind: str, what: Any = None) -> None:
        if self.setup.exact and kind != "submit":
            time = math.floor(time * 64) / 64
        heapq.heappush(self.agenda, (time, next(self.numbers), kind, what))

    def run(self) -> None:
        now = 0.0
        while True:
            self.log.append(("next", now, None))
            event = self.instance.next_event()
            command = self.agenda[0][0] if self.agenda else math.inf
            if min(event, command) == math.inf:
                return
            now = min(event, command)
            if event <= command or self.rng.random() < 0.5:  # else several commands come between two advances
                self.advance(now)
            while self.agenda and self.agenda[0][0] <= now:
                _, _, kind, what = heapq.heappop(self.agenda)
                self.fire(now, kind, what)
                if self.rng.random() < 0.3:  # then further commands of this instant find the step begun
                    self.log.append(("next", now, None))
                    self.instance.next_event()

    def advance(self, now: float) -> None:
        self.log.append(("advance", now, None))
        events = self.instance.advance(now)
        self.events += map(summary, events)
        assert self.instance.kv_free >= 0
        for event in events:
            if isinstance(event, Interrupted):
                self.plan(now + self.delay(1.0), "submit", replace(event.request))
            elif isinstance(event, Paused):
                self.plan(now + self.delay(0.3), "resume")

    def fire(self, now: float, kind: str, what: Any) -> None:
        instance = self.instance
        if kind in ("look", "crash"):
            self.advance(now)
        elif kind == "interrupt":
            here = [name for name, _ in instance.progress(instance._at)]  # a time at which it can always be asked
            what = [*self.rng.sample(here, min(len(here), self.rng.choice([1, 2, 5]))), "nobody"]
            self.rng.shuffle(what)
        elif kind == "speed":
            what = self.rng.choice([0.5, 1.0, 2.0, 0.25]) if self.setup.exact else self.rng.uniform(0.3, 1.7)
        self.log.append((kind, now, replace(what) if kind == "submit" else what))
        if kind == "look":
            self.looks.append((instance.load(now), list(instance.progress(now)), instance.preemptions))
        elif kind == "crash":
            for request in instance.crash(now):
                self.looks.append(replace(request))
                self.plan(now + self.delay(1.0), "submit", replace(request))
        elif kind in ("submit", "interrupt"):
            getattr(instance, kind)(now, what)
        elif kind == "speed":
            instance.set_speed(now, what)
        else:
            getattr(instance, kind)(now)


def summary(event: InstanceEvent) -> tuple[str, float, str, int]:
    if isinstance(event, Paused):
        return ("paused", event.time, "", 0)
    return (type(event).__name__, event.time, event.request.name, event.request.generated)


def replay(log: list[tuple[str, float, Any]], twin: PerTokenInstance) -> tuple[list[Any], list[Any]]:
    events: list[Any] = []
    looks: list[Any] = []
    for kind, now, what in log:
        if kind == "next":
            twin.next_event()
        elif kind == "advance":
            events += map(summary, twin.advance(now))
        elif kind == "look":
            looks.append((twin.load(), twin.progress(), twin.preemptions))
        elif kind == "crash":
            looks += [replace(request) for request in twin.crash(now)]
        else:
            twin.command(now, kind, what)
    events += map(summary, twin.advance(log[-1][1] + 1e-6))
    return events, looks


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", SETUPS)
def test_jumps_give_what_single_steps_give(name: str, seed: int) -> None:
    setup = SETUPS[name]
    driver = Driver(setup, seed)
    driver.run()
    twin: PerTokenInstance = setup.build(PerTokenInstance)
    events, looks = replay(driver.log, twin)
    assert [(kind, who, tokens) for kind, _, who, tokens in events] == [
        (kind, who, tokens) for kind, _, who, tokens in driver.events
    ]
    apart = max(abs(ours[1] - theirs[1]) for ours, theirs in zip(driver.events, events, strict=True))
    assert apart == 0.0 if setup.exact else apart < 1e-9
    assert looks == driver.looks
    instance = driver.instance
    assert instance.preemptions == twin.preemptions
    assert instance.kv_used == 0
    assert instance.load(instance._clock) == twin.load()
    finished = [event for event in driver.events if event[0] == "Finished"]
    assert len(finished) == setup.groups * setup.members, "every request finishes exactly once"
    assert instance.generated_tokens == driver.requested, "tokens kept by interrupts and crashes are not made twice"
    assert instance.segments < twin.steps


def test_the_differential_test_has_preemptions_to_compare() -> None:
    for name in ("small cache", "tiny cache, odd blocks", "exact", "commands on boundaries, crowded"):
        driver = Driver(SETUPS[name], 0)
        driver.run()
        assert driver.instance.preemptions > 50, name


COMMANDS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(0, 5), st.integers(1, 20)),
    st.tuples(st.just("interrupt"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["pause", "resume", "next", "look"])),
    st.tuples(st.just("speed"), st.sampled_from([0.5, 1.0, 2.0])),
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    script=st.lists(st.tuples(st.integers(0, 6), COMMANDS), max_size=40),
    kv_blocks=st.integers(9, 20),
    block=st.integers(2, 4),
    max_running=st.integers(1, 4),
    chunk=st.integers(1, 12),
)
def test_any_short_script_gives_the_same(
    script: list[tuple[int, tuple[Any, ...]]], kv_blocks: int, block: int, max_running: int, chunk: int
) -> None:
    fast = Instance(GRID, kv_blocks, block, max_running, chunk)
    slow = PerTokenInstance(GRID, kv_blocks, block, max_running, chunk)
    now = 0.0
    for number, (wait, (kind, *what)) in enumerate(script):
        now += wait / 128
        if kind == "next":
            fast.next_event()
            slow.next_event()
        elif kind == "look":
            assert list(map(summary, fast.advance(now))) == list(map(summary, slow.advance(now)))
            assert fast.load(now) == slow.load()
            assert list(fast.progress(now)) == slow.progress()
        elif kind == "submit":
            group, begun, rest = what
            prompt = (0, 3, 4)[group]
            total = min(begun + rest, kv_blocks * block - prompt)
            request = SimRequest(str(number), str(group), prompt, min(begun, total - 1), total)
            fast.submit(now, replace(request))
            slow.command(now, "submit", request)
        elif kind == "interrupt":
            fast.interrupt(now, [str(what[0])])
            slow.command(now, "interrupt", [str(what[0])])
        elif kind == "speed":
            fast.set_speed(now, what[0])
            slow.command(now, "speed", what[0])
        else:
            getattr(fast, kind)(now)
            slow.command(now, kind)
    fast.resume(now)
    slow.command(now, "resume")
    while now < math.inf:
        assert list(map(summary, fast.advance(now))) == list(map(summary, slow.advance(now)))
        now = fast.next_event()
        slow.next_event()
    assert fast.preemptions == slow.preemptions
    assert (fast.kv_used, fast.waiting, fast.prefilling, fast.running) == (0, 0, 0, 0)


def test_a_long_request_costs_no_more_than_a_short_one() -> None:
    segments: list[int] = []
    for target in (20, 20_000):
        instance = Instance(REALISTIC, kv_blocks=3000)
        instance.submit(0.0, SimRequest("t", "g", 512, 0, target))
        (event,) = run_out(instance)
        assert isinstance(event, Finished)
        assert event.request.generated == target
        segments.append(instance.segments)
    assert segments == [2, 2], "one to prefill and one to decode"


def test_a_long_prompt_costs_no_more_than_a_short_one() -> None:
    instance = Instance(REALISTIC, kv_blocks=3000, chunk=16)
    instance.submit(0.0, SimRequest("t", "g", 40_000, 0, 5))
    run_out(instance)
    assert instance.segments == 3, "whole chunks, the last chunk, decoding"
    assert instance.prefilled_tokens == 40_000


def test_a_group_prefills_its_prompt_once() -> None:
    instance = Instance(REALISTIC, kv_blocks=3000)
    for member in range(4):
        instance.submit(0.0, SimRequest(f"t{member}", "g", 100, 0, 50))
    instance.advance(0.1)
    assert instance.prefilled_tokens == 100 + 3 * 4
    assert instance.load(0.1).kv_used == 16 * (6 + 4)


def test_after_a_pull_everything_admitted_is_prefilled_again() -> None:
    instance = Instance(REALISTIC, kv_blocks=3000)
    for member in range(2):
        instance.submit(0.0, SimRequest(f"t{member}", "g", 96, 0, 500))
    instance.pause(2.0)
    (event,) = instance.advance(3.0)
    assert isinstance(event, Paused)
    assert 2.0 <= event.time < 2.1
    assert instance.next_event() == math.inf, "paused: nothing happens without a command"
    instance.resume(3.0)
    instance.advance(3.1)
    done = dict(instance.progress(2.9))["t0"]
    assert done > 100
    assert instance.prefilled_tokens == (96 + 1) + (96 + done) + done
    assert instance.running == 2
    assert len(run_out(instance)) == 2


@pytest.mark.parametrize("leaver", ["old", "both"])
def test_a_preempted_request_comes_back_at_the_next_boundary(leaver: str) -> None:
    """Room that a second command makes at the boundary of a preemption is not used there, nor forgotten later."""
    instance = Instance(GRID, kv_blocks=4, block=4)
    for name in ("old", "new"):
        instance.submit(0.0, SimRequest(name, name, 4, 0, 9))
    instance.submit(0.0, SimRequest("last", "last", 4, 0, 9))
    now = 0.0
    while not instance.preemptions:
        instance.advance(now)
        now = instance.next_event()
    full, kept = instance._at, instance.running
    assert instance.preemptions == 1
    instance.interrupt(full, ["old"] if leaver == "old" else [name for name, _ in instance.progress(full)][:kept])
    instance.advance(full)
    end = instance.next_event()
    if leaver == "old":
        assert (instance.prefilling, instance.preemptions) == (0, 1), "not admitted again at the same boundary"
        assert end == full + 2**-5, "but the next boundary is looked at"
    else:
        assert instance.prefilling > 0, "alone, it must be admitted at once: nothing else would wake the instance"
    assert len(run_out(instance)) == 3 - (1 if leaver == "old" else kept)


def test_a_crash_keeps_the_tokens_of_whole_steps_only() -> None:
    instance = Instance(GRID, kv_blocks=100)
    instance.submit(0.0, SimRequest("t", "g", 16, 7, 100))
    instance.advance(0.0)
    prefilled = 2**-6 + 23 * 2**-9
    crash = prefilled + 5.5 * 2**-5
    instance.advance(crash)
    instance.submit(crash, SimRequest("just sent", "g", 16, 3, 100))
    assert [(lost.name, lost.generated) for lost in instance.crash(crash)] == [("t", 7 + 5), ("just sent", 3)]
    assert (instance.kv_used, instance.waiting, instance.next_event()) == (0, 0, math.inf)
    assert instance.generated_tokens == 5
    instance.submit(crash, SimRequest("t", "g", 16, 12, 100))
    assert len(run_out(instance)) == 1
    assert instance.generated_tokens == 5 + 88


def test_a_crash_at_a_boundary_keeps_the_step_that_ends_there() -> None:
    instance = Instance(GRID, kv_blocks=100)
    instance.submit(0.0, SimRequest("t", "g", 16, 0, 100))
    crash = 2**-6 + 16 * 2**-9 + 5 * 2**-5
    instance.advance(crash)
    assert instance.crash(crash)[0].generated == 5


def test_one_step_takes_the_time_of_the_cost_model() -> None:
    instance = Instance(REALISTIC, kv_blocks=100, speed=0.5)
    instance.submit(1.0, SimRequest("t", "g", 10, 0, 1))
    (event,) = run_out(instance)
    assert event.time == pytest.approx(1.0 + 2 * (REALISTIC.step(0, 0, 10) + REALISTIC.step(1, 10)), abs=1e-12)
    assert instance.busy_seconds == pytest.approx(event.time - 1.0)


def test_bad_input_is_refused_with_what_to_change() -> None:
    instance = Instance(REALISTIC, kv_blocks=10)
    with pytest.raises(ValueError, match=r"t: prompt \+ target is 161 tokens.*10 blocks of 16; raise.* to 11 or"):
        instance.submit(0.0, SimRequest("t", "g", 60, 0, 101))
    instance.submit(0.0, SimRequest("t", "g", 60, 0, 100))
    with pytest.raises(ValueError, match="t is already here"):
        instance.submit(0.0, SimRequest("t", "g", 60, 0, 100))
    with pytest.raises(ValueError, match="prompt is 61 tokens, but group g has 60"):
        instance.submit(0.0, SimRequest("u", "g", 61, 0, 50))
    with pytest.raises(ValueError, match="target is 5 with 5 tokens generated"):
        instance.submit(0.0, SimRequest("v", "h", 60, 5, 5))
    with pytest.raises(ValueError, match=r"time -1\.0 is before 0\.0"):
        instance.advance(-1.0)
    with pytest.raises(ValueError, match=r"speed is 0\.0"):
        instance.set_speed(0.0, 0.0)
    with pytest.raises(ValueError, match="chunk is 0"):
        Instance(REALISTIC, kv_blocks=10, chunk=0)
    assert len(run_out(instance)) == 1
    instance.submit(90.0, SimRequest("t", "g", 60, 0, 100))
    instance.next_event()
    instance.advance(90.0)
    instance.next_event()
    with pytest.raises(ValueError, match="call advance"):
        instance.load(99.0)


def run_out(instance: Instance) -> list[InstanceEvent]:
    events: list[InstanceEvent] = []
    while (due := instance.next_event()) < math.inf:
        events += instance.advance(due)
    return events
