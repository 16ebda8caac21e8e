"""Tensors in a slot: where each is, and how they get there.

A slot is laid out as a safetensors file, so its bytes can be saved and opened by any tool. Tied tensors are stored
once; their other names are in the metadata. The metadata also holds the version and a checksum for every tensor, at
fixed places, so that a pull reads a few bytes of the header and not all of it.

    layout = SlotLayout.of(model.state_dict(), torch.bfloat16)
    views = layout.views(memory)                      # one tensor for each stored one, inside the slot
    digest, copied = store_tensor(views[0], tensor, None, scratch)
"""

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from staleflow.servers.weights.segments import WeightsError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 4096
"""Alignment of the first tensor in a slot: large copies from the beginning of a page are a quarter faster. The others
are aligned to their own elements."""
CHUNK = 1 << 20
"""Bytes copied before they are checksummed: small enough to be still in the cache."""
SAMPLE = 512
"""Bytes compared to guess whether a tensor changed; the guess affects only the speed."""
DIGEST = 16
"""Hexadecimal digits of a checksum."""

Cast = torch.dtype | Mapping[str, torch.dtype] | None
"""What floating-point tensors are stored as: one dtype for all, some by name, or as they are."""


class StoredTensor(NamedTuple):
    """A stored tensor; ``start`` and ``stop`` are bytes from the beginning of the slot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SlotLayout:
    """Where every tensor is in a slot. Fixed by the first push of a store."""

    def __init__(self, places: dict[str, Any], ties: dict[str, str], start: int, tail: bytes) -> None:
        self.entries = [
            StoredTensor(
                name, DTYPES[place["dtype"]], tuple(place["shape"]), *(start + at for at in place["data_offsets"])
            )
            for name, place in places.items()
        ]
        self.ties = ties
        """Other names of stored tensors."""
        self.size = max(entry.stop for entry in self.entries)
        """Bytes of a slot, with its header."""
        self.data = self.size - start
        self.index = {entry.name: number for number, entry in enumerate(self.entries)}
        self.index.update([(alias, self.index[name]) for alias, name in ties.items()])
        self.checksums = slice(8 + HEAD, 8 + HEAD + DIGEST * len(self.entries))
        """Where in a slot the checksums are, one after the other."""
        self.checksum_at = slice(8 + HEAD - AFTER_CHECKSUM - DIGEST, 8 + HEAD - AFTER_CHECKSUM)
        self._tail = tail

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], cast: Cast) -> "SlotLayout":
        if not tensors:
            raise WeightsError("there is nothing to push: pass the model's tensors by name")
        stored = {name: stored_dtype(name, tensor, cast) for name, tensor in tensors.items()}
        ties = find_ties(tensors)
        return cls.planned({name: (stored[name], tensors[name].shape) for name in stored if name not in ties}, ties)

    @classmethod
    def planned(cls, kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]], ties: dict[str, str]) -> "SlotLayout":
        """For tensors of these types and shapes."""
        places = placed(kinds)
        tail = f'","tied":{json.dumps(json.dumps(ties))}}},{json.dumps(places)[1:]}'.encode()
        tail += b" " * (-(8 + HEAD + DIGEST * len(places) + len(tail)) % ALIGNMENT)
        return cls(places, ties, 8 + HEAD + DIGEST * len(places) + len(tail), tail)

    @classmethod
    def parse(cls, header: bytes) -> "SlotLayout":
        """The layout from the bytes of a slot up to its first tensor."""
        table: dict[str, Any] = json.loads(header[8:])
        ties: dict[str, str] = json.loads(table.pop("__metadata__")["tied"])
        return cls(table, ties, len(header), header[8 + HEAD + DIGEST * len(table) :])

    @staticmethod
    def version_in(header: bytes) -> int:
        start = 8 + len(_BEFORE_VERSION)
        return int(header[start : start + VERSION_DIGITS])

    def header(self, version: int, checksum: str, digests: list[str]) -> bytes:
        body = _head(version, checksum) + "".join(digests).encode() + self._tail
        return len(body).to_bytes(8, "little") + body

    def checksum(self, digests: list[str]) -> str:
        """The checksum of a version: equal if all stored tensors are, by name, in any order."""
        lines = sorted(f"{entry.name}={digest}\n" for entry, digest in zip(self.entries, digests, strict=True))
        return xxhash.xxh3_64_hexdigest("".join(lines).encode())

    def split(self, checksums: bytes) -> list[str]:
        text = checksums.decode()
        return [text[at : at + DIGEST] for at in range(0, len(text), DIGEST)]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [memory[entry.start : entry.stop].view(entry.dtype).view(entry.shape) for entry in self.entries]

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """``WeightsError`` if these cannot be another version of what was stored first."""
        for name in tensors.keys() ^ self.index.keys():
            if name in tensors:
                raise WeightsError(f"tensor {name!r} was not in the first push: start a new store for another model")
            raise WeightsError(f"tensor {name!r} is missing: the first push had it, and every push must")
        for name, tensor in tensors.items():
            self.check_tensor(name, tensor, "shapes and kinds are fixed by the first push; start a new store")
        for alias, name in self.ties.items():
            tied, kept = tensors[alias], tensors[name]
            if identity(tied) != identity(kept) and not same(tied, kept):
                raise WeightsError(
                    f"tensors {alias!r} and {name!r} were one in the first push and differ now: tie them, or start a "
                    "new store with them apart"
                )

    def check_tensor(self, name: str, tensor: torch.Tensor, fix: str) -> None:
        entry = self.entries[self.index[name]]
        if tensor.shape != entry.shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(tensor.shape)} and is stored with shape {entry.shape}: {fix}"
            )
        if tensor.dtype != entry.dtype and not (tensor.is_floating_point() and entry.dtype.is_floating_point):
            raise WeightsError(
                f"tensor {name!r} is {tensor.dtype} and is stored as {entry.dtype}, and only floating-point types are "
                f"converted into each other: {fix}"
            )
        check_strided(name, tensor)


VERSION_DIGITS = 20
_BEFORE_VERSION = '{"__metadata__":{"format":"pt","version":"'


def placed(kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, Any]:
    """Tensors of these types and shapes one behind the other, as the header of a safetensors file has them. The largest
    elements come first, which keeps all aligned without gaps."""
    found: dict[str, Any] = {}
    stop = 0
    for name in sorted(kinds, key=lambda name: -kinds[name][0].itemsize):
        dtype, shape = kinds[name]
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    return found


def _head(version: int, checksum: str) -> bytes:
    """The header up to the tensors' checksums: equally long for every version."""
    return f'{_BEFORE_VERSION}{version:0{VERSION_DIGITS}d}","checksum":"{checksum}","checksums":"'.encode()


HEAD = len(_head(0, "0" * DIGEST))
AFTER_CHECKSUM = len('","checksums":"')


def stored_dtype(name: str, tensor: torch.Tensor, cast: Cast) -> torch.dtype:
    check_strided(name, tensor)
    if name == "__metadata__":
        raise WeightsError("no tensor can be called '__metadata__', the format needs that name: rename it")
    wanted = cast.get(name) if isinstance(cast, Mapping) else cast
    dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
    if dtype not in NAMES:
        raise WeightsError(f"tensor {name!r} would be stored as {dtype}, which safetensors has no name for: convert it")
    return dtype


def check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightsError(f"tensor {name!r} has no plain memory (it is sparse or on 'meta'): pass a dense tensor")


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same elements of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def find_ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names whose tensor already has an earlier name, and that name."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
            kept = first.setdefault(identity(tensor), name)
            if kept != name:
                ties[name] = kept
    return ties


# Memory


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are equal bit by bit: not every dtype can be compared, and NaN is never equal."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in memory are its elements in order: then it can be copied without torch."""
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg() and not tensor.is_complex()


def raw(address: int, size: int) -> Any:
    """The memory as an array to slice, compare and hash."""
    return (ctypes.c_char * size).from_address(address)


def digest_of(address: int, size: int) -> str:
    digest = xxhash.xxh3_64()
    for at in range(0, size, CHUNK):
        digest.update(raw(address + at, min(CHUNK, size - at)))
    return digest.hexdigest()


def store_tensor(
    view: torch.Tensor, tensor: torch.Tensor, known: str | None, scratch: torch.Tensor
) -> tuple[str, bool]:
    """Copy ``tensor`` into the slot's ``view`` if it differs. Returns its checksum, and whether it was copied.

    ``known`` is the checksum of what the view holds. If a sample shows a change, copy and checksum go chunk by chunk
    through the cache; if it seems the same, the checksum comes first and may save the copy."""
    size = view.nbytes
    if not size:
        return EMPTY, False
    if not is_plain(tensor):
        view.copy_(tensor.detach())
        return digest_of(view.data_ptr(), size), True
    if tensor.dtype != view.dtype:
        return _store_cast(view.view(-1), tensor.detach().view(-1), known, scratch.view(view.dtype))
    if size > CHUNK:
        return _store_large(view.data_ptr(), tensor.data_ptr(), size, known)
    source = tensor.data_ptr()
    digest = xxhash.xxh3_64_hexdigest(raw(source, size))
    if digest == known:
        return digest, False
    ctypes.memmove(view.data_ptr(), source, size)
    return digest, True


EMPTY = xxhash.xxh3_64_hexdigest(b"")


def _store_large(target: int, source: int, size: int, known: str | None) -> tuple[str, bool]:
    if known is not None and ctypes.string_at(target, SAMPLE) == ctypes.string_at(source, SAMPLE):
        digest = digest_of(source, size)
        if digest == known:
            return digest, False
    hasher = xxhash.xxh3_64()
    for at in range(0, size, CHUNK):
        length = min(CHUNK, size - at)
        ctypes.memmove(target + at, source + at, length)
        hasher.update(raw(target + at, length))
    return hasher.hexdigest(), True


def _store_cast(view: torch.Tensor, tensor: torch.Tensor, known: str | None, scratch: torch.Tensor) -> tuple[str, bool]:
    """The same for a tensor whose dtype changes, which torch does while copying."""
    sample = min(SAMPLE, view.numel())
    if known is not None and same(scratch[:sample].copy_(tensor[:sample]), view[:sample]):
        hasher = xxhash.xxh3_64()
        for at in range(0, tensor.numel(), scratch.numel()):
            part = tensor[at : at + scratch.numel()]
            hasher.update(raw(scratch.data_ptr(), scratch[: part.numel()].copy_(part).nbytes))
        if hasher.hexdigest() == known:
            return known, False
    hasher = xxhash.xxh3_64()
    for at in range(0, tensor.numel(), scratch.numel()):
        piece = view[at : at + scratch.numel()].copy_(tensor[at : at + scratch.numel()])
        hasher.update(raw(piece.data_ptr(), piece.nbytes))
    return hasher.hexdigest(), True
