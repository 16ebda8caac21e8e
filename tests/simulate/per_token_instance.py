"""The slow twin of ``staleflow.simulate.instance``: one turn of a loop per engine step, all recounted each time.

Written from the step semantics alone, with plain lists, so that the two share no reasoning about segments.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from staleflow.coordinator.cost import CostModel
from staleflow.simulate.instance import Finished, InstanceEvent, InstanceLoad, Interrupted, Paused, SimRequest


@dataclass(eq=False)
class Entry:
    request: SimRequest
    state: Literal["submitted", "waiting", "prefilling", "running"] = "submitted"
    to_prefill: int | None = None  # None: the prefill has not begun

    @property
    def context(self) -> int:
        return self.request.prompt + self.request.generated


class PerTokenInstance:
    def __init__(self, cost: CostModel, kv_blocks: int, block: int, max_running: int, chunk: int) -> None:
        self.cost, self.kv_blocks, self.block = cost, kv_blocks, block
        self.max_running, self.chunk, self.speed = max_running, chunk, 1.0
        self.time = -math.inf
        self.step_end: float | None = None
        self.paused = False
        self.commands: list[tuple[float, str, object]] = []
        self.entries: list[Entry] = []  # in the order of submission
        self.waiting: list[Entry] = []
        self.admitted: list[Entry] = []
        self.takes: list[tuple[Entry, int, int]] = []  # in the current step: who, what it had left, how much
        self.last_preemption = -math.inf
        self.preemptions = self.generated = self.prefilled = self.steps = 0

    def command(self, now: float, kind: str, what: object = None) -> None:
        if kind == "submit":
            assert isinstance(what, SimRequest)
            what = Entry(what)
            self.entries.append(what)
        if self.step_end is not None and now == self.time:
            self.step_end = None  # the step has just begun: this boundary is not over
        self.commands.append((now, kind, what))

    def crash(self, now: float) -> list[SimRequest]:
        self.time = now
        lost = [entry.request for entry in self.entries]
        self.entries, self.waiting, self.admitted, self.commands = [], [], [], []
        self.step_end, self.paused, self.speed = None, False, 1.0
        return lost

    def next_event(self) -> None:
        if self.step_end is None and not any(arrival <= self.time for arrival, _, _ in self.commands):
            self.begin_step()

    def advance(self, now: float) -> list[InstanceEvent]:
        events: list[InstanceEvent] = []
        while True:
            if self.step_end is None:
                while self.commands and self.commands[0][0] <= self.time:
                    self.apply(self.commands.pop(0), events)
                if self.time >= now:
                    return events
                self.begin_step()
            if self.step_end is None:  # idle or paused: the next command acts at once
                if not self.commands:
                    return events
                self.time = self.commands[0][0]
            elif self.step_end <= now:
                self.end_step(events)
            else:
                return events

    def apply(self, command: tuple[float, str, object], events: list[InstanceEvent]) -> None:
        _, kind, what = command
        if kind == "submit":
            assert isinstance(what, Entry)
            what.state = "waiting"
            self.waiting.append(what)
        elif kind == "interrupt":
            assert isinstance(what, Iterable)
            for name in what:
                for entry in self.entries:
                    if entry.request.name == name and entry.state != "submitted":
                        self.drop(entry)
                        events.append(Interrupted(entry.request, self.time))
                        break
        elif kind == "pause":
            self.paused = True
            events.append(Paused(self.time))
        elif kind == "resume" and self.paused:
            self.paused = False
            for entry in self.admitted:
                entry.state, entry.to_prefill = "prefilling", None
        elif kind == "speed":
            assert isinstance(what, float)
            self.speed = what

    def drop(self, entry: Entry) -> None:
        self.entries.remove(entry)
        if entry in self.waiting:
            self.waiting.remove(entry)
        else:
            self.admitted.remove(entry)

    def blocks(self, admitted: list[Entry], grow: bool) -> int:
        prompts = {entry.request.group: entry.request.prompt // self.block for entry in admitted}
        total = sum(prompts.values())
        for entry in admitted:
            shared = entry.request.prompt // self.block * self.block
            own = entry.context - shared + (1 if grow and entry.state == "running" else 0)
            total += math.ceil(own / self.block)
        return total

    def begin_step(self) -> None:
        if self.paused:
            return
        if self.time > self.last_preemption or not self.admitted:
            while self.waiting and len(self.admitted) < self.max_running:
                head = self.waiting[0]
                head.state = "running"  # so that its one token more is counted
                now, then = self.blocks(self.admitted, grow=False), self.blocks([head], grow=True)
                if any(other.request.group == head.request.group for other in self.admitted):
                    then -= head.request.prompt // self.block
                head.state = "waiting"
                if now + then > self.kv_blocks:
                    break
                head.state, head.to_prefill = "prefilling", None
                self.admitted.append(self.waiting.pop(0))
        while self.blocks(self.admitted, grow=True) > self.kv_blocks:
            last = self.admitted.pop()
            last.state = "waiting"
            self.waiting.insert(0, last)
            self.preemptions += 1
            self.last_preemption = self.time
        self.takes = self.fill_chunk()
        running = [entry for entry in self.admitted if entry.state == "running"]
        prefill = sum(taken for _, _, taken in self.takes)
        if running or prefill:
            context = sum(entry.context for entry in running)
            self.step_end = self.time + self.cost.step(len(running), context, prefill) / self.speed

    def fill_chunk(self) -> list[tuple[Entry, int, int]]:
        takes: list[tuple[Entry, int, int]] = []
        budget = self.chunk
        complete = {entry.request.group for entry in self.admitted if entry.state == "running"}
        for entry in self.admitted:
            if entry.state != "prefilling" or budget == 0:
                continue
            left = entry.to_prefill
            if left is None:
                shared = entry.request.prompt // self.block * self.block
                left = max(1, entry.context - (shared if entry.request.group in complete else 0))
            taken = min(left, budget)
            budget -= taken
            takes.append((entry, left, taken))
            if taken == left:
                complete.add(entry.request.group)
        return takes

    def end_step(self, events: list[InstanceEvent]) -> None:
        assert self.step_end is not None
        self.time, self.step_end = self.step_end, None
        self.steps += 1
        for entry in list(self.admitted):
            if entry.state == "running":
                entry.request.generated += 1
                self.generated += 1
                if entry.request.generated == entry.request.target:
                    self.drop(entry)
                    events.append(Finished(entry.request, self.time))
        for entry, left, taken in self.takes:
            self.prefilled += taken
            entry.to_prefill = left - taken
            if entry.to_prefill == 0:
                entry.state = "running"
        assert self.blocks(self.admitted, grow=False) <= self.kv_blocks

    def load(self) -> InstanceLoad:
        running = [entry for entry in self.admitted if entry.state == "running"]
        used = self.blocks(self.admitted, grow=False)
        return InstanceLoad(
            running=len(running),
            prefilling=len(self.admitted) - len(running),
            waiting=len(self.entries) - len(self.admitted),
            context_tokens=sum(entry.context for entry in running),
            kv_used=used * self.block,
            kv_free=(self.kv_blocks - used) * self.block,
            generated_tokens=self.generated,
            prefilled_tokens=self.prefilled,
        )

    def progress(self) -> list[tuple[str, int]]:
        return [(entry.request.name, entry.request.generated) for entry in self.entries]
