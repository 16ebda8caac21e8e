"""The requests on a simulated instance and their key/value cache, counted in blocks, never token by token.

``SimScheduler`` is an instance at a step boundary, without time: what waits, prefills and runs. A request owns the
blocks of its context past the shared part of its prompt; that part, the whole blocks of the prompt, is held once for
all members of a group. A running sequence takes a new block once in ``block`` steps, so ``KvPool`` only counts the
running sequences by the step (modulo ``block``) in which they do, and knows what any number of steps takes::

    pool.hold(group, context); pool.start(step, context)     # admitted; then decoding
    pool.growth(step, 5_000, running=40)                     # blocks that 5,000 steps take: a sum over a slice
    pool.steps(step, 5_000, running=40)                      # how many of these steps fit
"""

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


@dataclass(slots=True)
class SimRequest:
    """One trajectory to generate. ``generated`` is brought up to date when the request leaves the instance."""

    name: str
    group: str  # members of one group share the key/value cache of their prompt
    prompt: int
    generated: int  # more than 0 for a trajectory that was begun elsewhere
    target: int  # all the tokens it will have generated at its end; known to the simulator only
    epoch: int = 0
    cached: int = 0  # tokens whose entries are still here from its last turn


class PromptGroup:
    """Requests with one prompt on one instance: how many are here, are admitted, and have been prefilled."""

    __slots__ = ("admitted", "blocks", "present", "prompt", "ready")

    def __init__(self, prompt: int, block: int) -> None:
        self.prompt = prompt
        self.blocks = prompt // block
        self.present = 0
        self.admitted = 0
        self.ready = 0


class Seat:
    """A request on the instance: waiting, then admitted and in the prefill queue, then admitted and running."""

    __slots__ = ("end", "group", "left", "request")

    def __init__(self, request: SimRequest, group: PromptGroup) -> None:
        self.request = request
        self.group = group
        self.left = 0  # tokens still to prefill, once the prefill has begun
        self.end = -1  # the step at whose end it finishes, while it runs


class PrefillSteps(NamedTuple):
    """The prefill of ``steps`` equal steps, of ``tokens`` each.

    ``filled`` are those whose prefill the (then only) step completes; ``partial`` starts with ``left`` tokens to
    prefill, of which each step has ``taken``.
    """

    tokens: int
    steps: int
    filled: list[Seat]
    partial: Seat | None
    left: int
    taken: int


class KvPool:
    """Invariant: ``used`` is the number of blocks held by admitted requests and by the prompts of their groups."""

    __slots__ = ("_turns", "block", "capacity", "used")

    def __init__(self, capacity: int, block: int) -> None:
        self.capacity = capacity
        self.block = block
        self.used = 0
        self._turns = [0] * block  # running sequences that take a block in step s, by s modulo block

    def fits(self, group: PromptGroup, context: int) -> bool:
        """Whether a request of ``group`` can be admitted: room for its context and for one token more."""
        need = context // self.block + 1
        if group.admitted:
            need -= group.blocks
        return self.used + need <= self.capacity

    def hold(self, group: PromptGroup, context: int) -> None:
        self.used -= -context // self.block
        if group.admitted:
            self.used -= group.blocks
        group.admitted += 1

    def free(self, group: PromptGroup, context: int) -> None:
        group.admitted -= 1
        self.used += -context // self.block
        if group.admitted:
            self.used += group.blocks

    def start(self, step: int, context: int) -> None:
        self._turns[(step - context) % self.block] += 1

    def stop(self, step: int, context: int) -> None:
        self._turns[(step - context) % self.block] -= 1

    def stop_all(self) -> None:
        self._turns = [0] * self.block

    def overfull(self, step: int) -> bool:
        """Whether the growth of the coming step would exceed the capacity."""
        return self.used + self._turns[step % self.block] > self.capacity

    def growth(self, step: int, count: int, running: int) -> int:
        """Blocks that ``running`` sequences take in ``count`` steps from ``step`` on."""
        block = self.block
        cycles, rest = divmod(count, block)
        first = step % block
        last = first + rest
        turns = self._turns
        if last <= block:
            return cycles * running + sum(turns[first:last])
        return cycles * running + sum(turns[first:]) + sum(turns[: last - block])

    def steps(self, step: int, limit: int, running: int) -> int:
        """How many of ``limit`` steps of ``running`` sequences can be made before the pool is exhausted."""
        block = self.block
        free = self.capacity - self.used
        if running * ((limit - 1) // block + 1) <= free:  # true of most segments, and saves the walk below
            return limit
        cycles, free = divmod(free, running)
        count = cycles * block
        while count < limit:  # ends within one cycle, which takes more than what is left
            free -= self._turns[(step + count) % block]
            if free < 0:
                return count
            count += 1
        return limit


class SimScheduler:
    """Invariant: a seat is in ``waiting`` or in ``admitted``, or its arrival has not been applied yet."""

    def __init__(self, capacity: int, block: int) -> None:
        self.pool = KvPool(capacity, block)
        self.step = 0
        self.running = 0
        self.context = 0  # tokens of the running requests, a shared prompt counted for each
        self.filling = 0  # the same of those in the prefill queue
        self.seats: dict[str, Seat] = {}
        self.waiting: OrderedDict[Seat, None] = OrderedDict()
        self.admitted: dict[Seat, None] = {}  # in the order of admission
        self.prefill: OrderedDict[Seat, None] = OrderedDict()  # in the same order
        self._groups: dict[str, PromptGroup] = {}
        self._ends: list[tuple[int, int, Seat]] = []  # heap; an entry is stale unless it holds its seat's end
        self._joins = 0

    def seat(self, request: SimRequest) -> Seat:
        """Make a seat, not yet in the queue; refuse a request that could never finish here."""
        pool = self.pool
        total = request.prompt + request.target
        if request.target <= request.generated:
            raise ValueError(
                f"request {request.name}: target is {request.target} with {request.generated} tokens generated; "
                "submit only requests that have tokens left to generate"
            )
        if total > pool.capacity * pool.block:
            raise ValueError(
                f"request {request.name}: prompt + target is {total} tokens, but the cache holds {pool.capacity} "
                f"blocks of {pool.block}; raise kv_blocks to {-(-total // pool.block)} or limit the length"
            )
        if request.name in self.seats:
            raise ValueError(f"request {request.name} is already here; interrupt it before it is submitted again")
        group = self._groups.get(request.group)
        if group is None:
            group = self._groups[request.group] = PromptGroup(request.prompt, pool.block)
        elif group.prompt != request.prompt:
            raise ValueError(
                f"request {request.name}: prompt is {request.prompt} tokens, but group {request.group} has "
                f"{group.prompt}; give each prompt its own group"
            )
        group.present += 1
        seat = self.seats[request.name] = Seat(request, group)
        return seat

    def forget(self, seat: Seat) -> None:
        """The request, neither waiting nor admitted any more, leaves the instance."""
        request, group = seat.request, seat.group
        del self.seats[request.name]
        group.present -= 1
        if not group.present:
            del self._groups[request.group]

    def admit(self, most: int) -> None:
        waiting, admitted, pool = self.waiting, self.admitted, self.pool
        while waiting and len(admitted) < most:
            seat = next(iter(waiting))
            request = seat.request
            context = request.prompt + request.generated
            if not pool.fits(seat.group, context):
                return
            pool.hold(seat.group, context)
            self.filling += context
            del waiting[seat]
            admitted[seat] = self.prefill[seat] = None

    def preempt(self) -> None:
        """The most recently admitted request goes back to the front of the queue."""
        seat = next(reversed(self.admitted))
        self.release(seat)
        self.waiting[seat] = None
        self.waiting.move_to_end(seat, last=False)

    def release(self, seat: Seat) -> None:
        """Take an admitted request out and free its blocks."""
        request, group, pool = seat.request, seat.group, self.pool
        request.cached = 0
        if seat.end < 0:
            del self.prefill[seat]
            seat.left = 0
            context = request.prompt + request.generated
            self.filling -= context
        else:
            request.generated = request.target - (seat.end - self.step)
            context = request.prompt + request.generated
            pool.stop(self.step, context)
            self.context -= context
            self.running -= 1
            group.ready -= 1
            seat.end = -1
        pool.free(group, context)
        del self.admitted[seat]

    def chunk(self, size: int) -> PrefillSteps:
        """What the coming steps prefill, up to the first that completes a prefill; the queue must not be empty."""
        budget = size
        filled: list[Seat] = []
        fresh: set[PromptGroup] = set()  # prefilled earlier in this same chunk
        for seat in self.prefill:
            group = seat.group
            left = seat.left
            if not left:
                left = seat.request.prompt + seat.request.generated
                known = group.blocks * self.pool.block if group.ready or group in fresh else 0
                left -= max(known, seat.request.cached)
                left = left or 1  # the last token is always computed: its output is the next one
            if left > budget:
                steps = 1 if filled else (left - 1) // size
                return PrefillSteps(size, steps, filled, seat, left, budget)
            budget -= left
            filled.append(seat)
            if not budget:
                break
            fresh.add(group)
        return PrefillSteps(size - budget, 1, filled, None, 0, 0)

    def next_end(self) -> int:
        """The step at whose end the next running request finishes; one must be running."""
        ends = self._ends
        while ends[0][2].end != ends[0][0]:
            heappop(ends)
        return ends[0][0]

    def go(self, count: int) -> None:
        """Make ``count`` steps, during which no request joins or leaves."""
        running = self.running
        if running:
            self.pool.used += self.pool.growth(self.step, count, running)
            self.context += running * count
        self.step += count

    def finish(self) -> list[SimRequest]:
        """Requests that have reached their target leave, in the order of admission."""
        finished: list[SimRequest] = []
        ends, step = self._ends, self.step
        while ends and ends[0][0] == step:
            seat = heappop(ends)[2]
            if seat.end == step:
                self.release(seat)
                self.forget(seat)
                finished.append(seat.request)
        return finished

    def join(self, filled: list[Seat]) -> None:
        """Requests whose prefill is complete decode from the next step on."""
        step = self.step
        for seat in filled:
            request = seat.request
            context = request.prompt + request.generated
            del self.prefill[seat]
            seat.left = 0
            seat.end = step + request.target - request.generated
            seat.group.ready += 1
            self.pool.start(step, context)
            self.context += context
            self.filling -= context
            self._joins += 1  # joining is in the order of admission, so this orders the heap by it
            heappush(self._ends, (seat.end, self._joins, seat))
        self.running += len(filled)

    def invalidate(self) -> None:
        """The cache is void: every admitted request is prefilled again."""
        for seat in self.admitted:
            if seat.end >= 0:
                seat.request.generated = seat.request.target - (seat.end - self.step)
            seat.end = -1
            seat.left = 0
            seat.group.ready = 0
        self.prefill = OrderedDict.fromkeys(self.admitted)
        self.filling = sum(seat.request.prompt + seat.request.generated for seat in self.admitted)
        self._ends.clear()
        self.pool.stop_all()
        self.running = 0
        self.context = 0
