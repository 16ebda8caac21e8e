"""What the tests of the local parameter server share: small models, a clock to set, and a store with its users."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.servers.weights import segments, slots
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.segments import WeightsError
from staleflow.servers.weights.tensors import DTYPES, same

Server = LocalParameterServer
Tensors = dict[str, torch.Tensor]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    left = [name for path in tmp_path.glob("*.weights") for name in slots.segments_of(path.read_bytes()) or []]
    for name in left:
        segments.unlink_segment(name)


def filled(version: float, *names: str) -> Tensors:
    return {name: torch.full((64,), float(version)) for name in names or ("a", "b", "c")}


def zeros(like: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def pulled(server: Server, like: Tensors, **options: Any) -> tuple[int, Tensors]:
    into = zeros(like)
    return server.pull(into, **options), into


def words(server: Server) -> memoryview:
    return server._store.block._words


def slots_of(server: Server) -> list[int]:
    return server._store.block.allocated()


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, NaN included."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return ((raw & 1) if dtype == torch.bool else raw).view(dtype).view(shape)


class World:
    """A writer and three readers on one store, and what each version was."""

    def __init__(self, registry: str, model: list[tuple[str, tuple[int, ...]]], max_slots: int) -> None:
        self.model = model
        self.clock = Clock()
        self.options: dict[str, Any] = {"registry": registry, "clock": self.clock}
        self.max_slots = max_slots
        self.versions: dict[int, Tensors] = {}
        self.hooks: list[Callable[[], None]] = [lambda: None] * 4
        self.writer = Server.create("w", max_slots=max_slots, between=lambda: self.hooks[3](), **self.options)
        self.readers = [self.join(number) for number in range(3)]
        self.into = [zeros(self.tensors(0)) for _ in range(3)]

    def join(self, number: int) -> Server:
        return Server.attach("w", between=lambda: self.hooks[number](), **self.options)

    def tensors(self, seed: int) -> Tensors:
        found: Tensors = {}
        for number, (dtype, shape) in enumerate(self.model):
            found[f"t{number}"] = random_tensor(seed * (number % 3), DTYPES[dtype], shape)
        return found

    def push(self, seed: int) -> None:
        version = self.writer.newest() + 1
        tensors = self.tensors(seed)
        stats = self.writer.push(version, tensors)
        assert stats.copied + stats.skipped == sum(tensor.nbytes for tensor in tensors.values())
        assert stats.slots <= self.max_slots
        self.versions[version] = tensors

    def pull(self, number: int) -> None:
        newest = self.writer.newest()
        if newest < 0:
            with pytest.raises(WeightsError):
                self.readers[number].pull(self.into[number])
            return
        version = self.readers[number].pull(self.into[number], newest, verify=True)
        assert version == self.writer.newest()
        assert equal(self.into[number], self.versions[version])

    def overtaken(self, number: int, at: int, pushes: int) -> None:
        """The writer pushes in the middle of the pull, once."""
        calls = iter(range(100))

        def hook() -> None:
            if next(calls) == at:
                for seed in range(pushes):
                    self.push(seed + at)

        self.hooks[number] = hook
        newest = self.writer.newest()
        if newest >= 0:
            version = self.readers[number].pull(self.into[number], verify=True)
            assert version >= newest
            assert equal(self.into[number], self.versions[version])
        self.hooks[number] = lambda: None

    def stall(self, number: int) -> None:
        """A reader that stopped in the middle of a pull: its lease stays until it expires."""
        published = self.writer._store.block.published
        if published.slot >= 0:
            reader = self.readers[number]._reader
            assert reader
            reader.block.lease(reader._entry, published.slot, 10)

    def expire(self, _: int) -> None:
        self.clock.pass_(11)

    def die(self, at: int, seed: int) -> None:
        """The writer is gone after some tensors; another one takes over."""
        calls = iter(range(100))

        def hook() -> None:
            if next(calls) == at - 1:
                raise KeyboardInterrupt

        self.hooks[3] = hook
        newest = self.writer.newest()
        tensors = self.tensors(seed)
        try:
            self.writer.push(newest + 1, tensors)
            self.versions[newest + 1] = tensors
        except KeyboardInterrupt:
            assert self.writer.newest() == newest
        self.hooks[3] = lambda: None
        self.writer.detach()
        self.writer = Server.take_over("w", max_slots=self.max_slots, between=lambda: self.hooks[3](), **self.options)

    def rejoin(self, number: int) -> None:
        self.readers[number].close()
        self.readers[number] = self.join(number)
