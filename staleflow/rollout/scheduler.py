"""What the next step runs: one token of every decoding sequence, and a bounded number of prompt tokens.

Waiting sequences are admitted in order, as rows and pages allow; an admitted one has pages for all its tokens. Running
ones never wait for admission. When a decoding sequence needs a page and none is left, the most recently admitted
sequence gives way: it returns to the head of the queue and is prefilled again later, from the cache where possible.
While a group's prompt is being prefilled, its other members wait for it and then share its pages.

Where a step with prefill costs much more than one without (``patience``), waiting sequences are gathered and join
together: as soon as what they would have decoded meanwhile is worth that cost. ::

    scheduler.waiting.append(sequence)
    plan = scheduler.plan()
    ...                          # run it
    scheduler.computed(plan)
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from staleflow.rollout.pages import PagePool, digest
from staleflow.rollout.rows import Ints, Rows
from staleflow.rollout.sequence import NO_ROW, Sequence


class PrefillPart(NamedTuple):
    """``length`` tokens of a sequence to prefill, from ``start`` on."""

    sequence: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        """Whether it ends the prefill, so that a token can be drawn."""
        return self.start + self.length == len(self.sequence.tokens)


class Backlog(NamedTuple):
    """Who waits: ``joining`` have a row and pages and join when prefill comes to them, ``stuck`` do not."""

    joining: int = 0
    tokens: int = 0
    """Of those who join."""
    pages: int = 0
    """That they will take."""
    stuck: int = 0


@dataclass(slots=True)
class StepPlan:
    decode: list[Sequence]
    """Longest first."""
    order: Ints
    """Their rows."""
    prefill: list[PrefillPart] = field(default_factory=list[PrefillPart])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Pages to copy (from, to), all read before any is written, and before the step writes anything."""
    exhausted: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences that fill the whole memory and cannot continue; they have been released."""
    stayed: Ints | None = None
    """Of a plan that follows another: where each of its sequences was in that one. None: nobody left."""


class Scheduler:
    def __init__(self, pool: PagePool, rows: Rows, prefill_tokens: int) -> None:
        self.pool = pool
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.version = 0
        """Of the weights; sequences admitted now compute their KV entries under it."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        """In the order of their admission."""
        self.preempted = 0
        """How often a sequence had to give way."""
        self.prefilled = 0
        """Tokens that were prefilled."""
        self.reused = 0
        """Tokens that needed no prefill because their pages were still there."""
        self.patience = 0.0
        """What a step with prefill costs, in steps without."""
        self._missed = 0.0
        """Of the steps since somebody waits, the share that those who wait would have had."""
        self._leaders: dict[str, Sequence] = {}
        """By group: the sequence that prefills the prompt."""
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._order: Ints = np.zeros(0, np.int64)
        self._changed = False

    def plan(self) -> StepPlan:
        self._sort()
        exhausted = self._grow()
        self._sort()
        plan = StepPlan(self._decoding, self._order, exhausted=exhausted)
        budget = self.prefill_tokens
        for sequence in self._prefilling:
            budget = self._prefill(plan, sequence, budget)
        if budget and (self._prefilling or self._joining()):
            self._admit(plan, budget)
            if not plan.prefill:
                self._missed = 0.0
            if self._changed:  # one whose prefix is all there decodes at once
                self._sort()
                plan.decode, plan.order = self._decoding, self._order
        return plan

    def following(self) -> StepPlan | None:
        """The plan after one that only decodes, made before its tokens are known: with the same sequences, except those
        that have left since. None if it cannot be known yet, because others may join."""
        if self._prefilling or self._joining():
            return None
        stayed = None
        if self._changed:
            stayed = np.array([at for at, each in enumerate(self._decoding) if each.row != NO_ROW], np.int64)
            self._decoding, self._order = [self._decoding[at] for at in stayed], self._order[stayed]
            self._changed = False
        position = self.rows.position[self._order]
        if not len(position) or np.count_nonzero(position % self.pool.page_size == 0) > self.pool.available:
            return None
        self._grow()
        return StepPlan(self._decoding, self._order, stayed=stayed)

    def undo_following(self) -> None:
        """Forget that such a plan ran: what it computed is computed again."""
        for sequence in self.running.values():
            if sequence.pending == 0:
                sequence.computed -= 1
                self.rows.follow(sequence)

    def assume_computed(self) -> None:
        """Admit all that waits as if its KV entries were there: for measurements, where only time counts."""
        plan = StepPlan([], self._order)
        while self.waiting and self.rows.free and self._place(plan, self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.computed = len(sequence.tokens) - 1

    def computed(self, plan: StepPlan) -> None:
        """The plan ran: its tokens have KV entries. To be called before new tokens are appended."""
        self.rows.position[plan.order] += 1
        for sequence in plan.decode:
            sequence.computed += 1
        for sequence, start, length in plan.prefill:
            sequence.computed = start + length
            self.prefilled += length
            self._changed = True
            group = sequence.request.group
            if group is not None and self._leaders.get(group) is sequence:
                self._share_prompt(group, sequence)

    def remove(self, sequence: Sequence, keep: bool = True) -> list[int]:
        """Take out a running sequence; ``keep`` what it computed for whoever has the same prefix.

        Returns the pages that no one holds now.
        """
        if keep and sequence.pure:
            self._register(sequence, sequence.computed)
        elif not keep:
            self.pool.discard(sequence.pages)
        idle = self.pool.release(sequence.pages)
        self.rows.close(sequence)
        sequence.pages, sequence.computed, sequence.pure = [], 0, True
        del self.running[sequence.request.name]
        group = sequence.request.group
        if group is not None and self._leaders.get(group) is sequence:
            del self._leaders[group]
        self._changed = True
        return idle

    def restart(self) -> None:
        """The weights changed and KV entries are recomputed: all running go back to the head of the queue, in order."""
        self.waiting.extendleft(reversed(self.running.values()))
        for sequence in self.running.values():
            sequence.row, sequence.pages, sequence.computed, sequence.pure = NO_ROW, [], 0, True
        self.running.clear()
        self._leaders.clear()
        self.pool.clear()
        self.rows.clear()
        self._changed = True

    def keep_entries(self) -> None:
        """The weights changed and KV entries stay: they are their sequence's alone from now on."""
        self.pool.forget()
        self._leaders.clear()
        for sequence in self.running.values():
            sequence.pure = False

    def backlog(self) -> Backlog:
        """Who waits for prefill only, and who for others to leave. A prompt that a group shares is counted once."""
        pool, rows = self.pool, self.rows.free
        free, reserve = pool.available, pool.total // 100
        joining = tokens = pages = 0
        groups = {sequence.request.group for sequence in self.running.values()} if self.waiting else set[str | None]()
        for sequence in self.waiting:
            length, group = len(sequence.tokens), sequence.request.group
            needed = pool.pages_for(length)
            if group is not None and group in groups:
                needed -= (sequence.prompt - 1) // pool.page_size
            left = free - pages - needed
            if joining >= rows or left < (reserve if joining or self.running else 0):
                break  # and nobody overtakes it
            joining, tokens, pages = joining + 1, tokens + length, pages + needed
            groups.add(group)
        return Backlog(joining, tokens, pages, len(self.waiting) - joining)

    def discard_waiting(self, names: Iterable[str]) -> list[Sequence]:
        unwanted = set(names)
        gone = [sequence for sequence in self.waiting if sequence.request.name in unwanted]
        if gone:
            self.waiting = deque(s for s in self.waiting if s.request.name not in unwanted)
        return gone

    def _sort(self) -> None:
        if not self._changed:
            return
        running = self.running.values()
        self._prefilling = [sequence for sequence in running if sequence.pending > 1]
        self._decoding = [sequence for sequence in running if sequence.pending == 1]
        self._decoding.sort(key=lambda sequence: -sequence.computed)
        self._order = np.array([sequence.row for sequence in self._decoding], np.int64)
        self._changed = False

    def _grow(self) -> list[Sequence]:
        """Give every decoding sequence the page for its next token. Returns those for which there is none."""
        size = self.pool.page_size
        exhausted: list[Sequence] = []
        decoding = self._decoding
        for index in np.flatnonzero(self.rows.position[self._order] % size == 0):
            sequence = decoding[index]
            if sequence.row < 0 or len(sequence.pages) * size > sequence.computed:
                continue
            while not self.pool.available and sequence.row >= 0:
                victim = next(reversed(self.running.values()))
                self.remove(victim)
                if victim is sequence and not self.running:
                    exhausted.append(victim)
                else:
                    self.preempted += 1
                    self.waiting.appendleft(victim)
            if sequence.row >= 0:
                self.rows.add_page(sequence, self.pool.allocate())
        return exhausted

    def _joining(self) -> bool:
        """Whether those who wait join in the next step; to be asked once for each."""
        able = min(len(self.waiting), self.rows.free)
        if not able:
            self._missed = 0.0
            return False
        self._missed += able / (able + len(self.running))
        if not self.running or self._missed > self.patience:
            self._missed = math.inf  # until all have joined: members of a group follow the one that prefills
        return self._missed == math.inf

    def _admit(self, plan: StepPlan, budget: int) -> None:
        skipped: list[Sequence] = []
        while self.waiting and budget and self.rows.free:
            sequence = self.waiting.popleft()
            leader = self._leaders.get(sequence.request.group or "")
            if leader is not None:
                skipped.append(sequence)
                continue
            if not self._place(plan, sequence):
                self.waiting.appendleft(sequence)
                break
            budget = self._prefill(plan, sequence, budget)
        self.waiting.extendleft(reversed(skipped))

    def _place(self, plan: StepPlan, sequence: Sequence) -> bool:
        pool = self.pool
        size = pool.page_size
        known = len(sequence.tokens) - 1  # the last token is run in any case, to draw the next
        prefix = pool.match(sequence.chain(known // size, size), sequence.tokens[:known])
        pages = pool.pages_for(len(sequence.tokens))
        # What runs will grow: admit only what leaves it a page in a hundred, or one would soon give way to the other.
        reserve = pool.total // 100 if self.running else 0
        if pool.room_for(prefix, pages) < reserve:
            return False
        sequence.pages, copy = pool.take(prefix, pages)
        if copy is not None:
            plan.copies.append(copy)
        sequence.computed = len(prefix.pages) * size + prefix.tail_tokens
        sequence.kv_version = self.version
        self.reused += sequence.computed
        self.rows.open(sequence)
        self.running[sequence.request.name] = sequence
        group = sequence.request.group
        if group is not None and sequence.computed < sequence.prompt - 1:
            self._leaders[group] = sequence
        self._changed = True
        return True

    def _prefill(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Let the sequence have of the budget what it needs. Returns what is left."""
        count = min(budget, sequence.pending)
        if sequence.pending > 1 and count:
            plan.prefill.append(PrefillPart(sequence, sequence.computed, count))
            return budget - count
        return budget

    def _share_prompt(self, group: str, leader: Sequence) -> None:
        """Make what the leader has computed of the prompt known; at its end the members may follow."""
        known = min(leader.computed, leader.prompt - 1)
        if leader.pure:
            self._register(leader, known)
        if known == leader.prompt - 1:
            del self._leaders[group]

    def _register(self, sequence: Sequence, tokens: int) -> None:
        """Make the first ``tokens`` tokens of the sequence known to the pool."""
        pool = self.pool
        size = pool.page_size
        full = tokens // size
        chain = sequence.chain(full, size)
        for page, key in zip(sequence.pages, chain, strict=False):
            pool.register(page, size, key)
        rest = sequence.tokens[full * size : tokens]
        if rest:
            pool.register(sequence.pages[full], len(rest), digest(chain[-1] if chain else b"", rest))
