"""The order in which a finite data set is read: shuffled anew in every epoch, without any state.

Prompt number ``n`` is item ``permutation(epoch)[n mod size]`` of epoch ``n div size``, and the permutation is computed
for one place at a time. So the cursor of a run is one number, and a resume from it is exact::

    order = Order(size=1000, seed=0)
    epoch, index = order.place(1234)        # (1, ...)
    assert Order(1000, 0).place(1234) == (epoch, index)
"""

from dataclasses import dataclass
from functools import lru_cache

from staleflow.tasks.task import TaskError, digest

ROUNDS = 6
MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Order:
    size: int
    seed: int
    epochs: int | None = None
    """How often the data is read; None: endlessly."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise TaskError("the data set is empty: name a file or a generator that has items")
        if self.epochs is not None and self.epochs < 1:
            raise TaskError(f"epochs={self.epochs}: read the data at least once, or leave it out to read it endlessly")

    def place(self, number: int) -> tuple[int, int] | None:
        """(epoch, index) of prompt ``number``; None past the last epoch."""
        if number < 0:
            raise TaskError(f"prompt number {number}: numbers start at 0")
        epoch, at = divmod(number, self.size)
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return epoch, permute(at, self.size, _keys(self.seed, epoch)) if self.shuffle else at


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(digest("order", seed, epoch, turn) for turn in range(ROUNDS))


def permute(at: int, size: int, keys: tuple[int, ...]) -> int:
    """A permutation of ``range(size)``: a Feistel network on the next even number of bits, repeated until in range.

    The network is a permutation of at most ``4 * size`` numbers, whatever its round function. Following its cycles from
    a number below ``size`` to the next one below ``size`` is then a permutation of those.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = at >> half, at & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        at = left << half | right
        if at < size:
            return at


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit changes every output bit half of the time."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31
