"""Which cores, how many threads and what priority each process of a run gets.

Two compute processes that spin on the same cores are slower than one after the other, so every process gets cores of
its own where there are enough, and one thread where there are not. The trainer then goes first: it trains whatever is
complete while the instances take what it leaves, which keeps the data young at no loss of throughput. ::

    placement([0, 1], ["i0", "i1"])["trainer"].threads == 1
"""

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    cores: tuple[int, ...]
    """Where it may run; all of the machine's if it is not pinned."""
    threads: int
    nice: int = 0


def placement(
    cores: Sequence[int], names: Sequence[str], threads: int | None = None, pin: bool = True, ranks: int = 1
) -> dict[str, Place]:
    """By process: ``trainer``, whose ranks divide what it gets, ``evaluator``, and the instances of these names."""
    everywhere, instances = tuple(cores), len(names)
    share = len(cores) // (instances + ranks)
    places: dict[str, Place] = {}
    for at, name in enumerate(names):
        own = everywhere[at * share : (at + 1) * share] if share else (everywhere[at % len(cores)],)
        places[name] = Place(own, threads or max(1, share), nice=0 if share else 5)
    left = everywhere[instances * share :] if share else everywhere
    places["trainer"] = Place(left, threads * ranks if threads else (len(left) if share else ranks))
    places["evaluator"] = Place(everywhere, 1, nice=10)
    if not pin:
        places = {name: place._replace(cores=everywhere) for name, place in places.items()}
    return places
