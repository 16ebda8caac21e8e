"""Payload on disk: plain files beside the journal, each byte written once and synced, whole files deleted.

A transaction's chunks go to one place in one file; the journal then commits that place. So a place that the journal
knows is whole, and bytes that it does not know are what a crash left behind: they are overwritten, or their file is
removed. A file is deleted when nothing in it is needed any more. Measured against blobs in SQLite, which writes each
byte twice and syncs two files: ``stores`` in bench/servers.py.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.types import Chunk

FILE_BYTES = 32 << 20
"""A new file is begun behind this."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Named = tuple[str, Chunk]


class Place(NamedTuple):
    """Where a transaction's chunks are."""

    file: int
    offset: int
    size: int
    crc: int


class PayloadFiles:
    def __init__(self, folder: Path, known: Iterable[Place]) -> None:
        """``known``: the places that the journal has committed. Everything else is removed."""
        self._folder = folder
        self._handle: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        files = {place.file for place in known}
        for each in folder.glob("*.bin"):
            if int(each.stem) not in files:
                each.unlink()
        self._file = max(files, default=0)
        self._end = FILE_BYTES  # a new life begins a new file

    def write(self, chunks: Iterable[Named]) -> Place:
        """Write and sync. Nothing counts until ``keep`` is told that the journal has committed the place."""
        body = _encode([(name, each.start, each.tokens, each.logprobs) for name, each in chunks])
        if self._handle is None or self._end >= FILE_BYTES:
            self._begin()
        assert self._handle is not None
        written = 0
        while written < len(body):
            written += os.pwrite(self._handle, memoryview(body)[written:], self._end + written)
        os.fdatasync(self._handle)
        return Place(self._file, self._end, len(body), zlib.crc32(body))

    def keep(self, place: Place) -> None:
        self._end = place.offset + place.size

    def read(self, place: Place) -> list[Named] | None:
        """The chunks at a place; None if they are damaged."""
        try:
            with self._path(place.file).open("rb") as file:
                file.seek(place.offset)
                body = file.read(place.size)
        except FileNotFoundError:
            return None
        if zlib.crc32(body) != place.crc:
            return None
        return [(name, Chunk(start, *arrays)) for name, start, *arrays in cast(list[Any], _decode(body))]

    def remove(self, file: int) -> None:
        """Delete a file in which nothing is needed any more; the one that is being written stays."""
        if file != self._file:
            self._path(file).unlink(missing_ok=True)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _begin(self) -> None:
        handle = os.open(self._path(self._file + 1), os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the file's name must survive as its bytes do
        finally:
            os.close(folder)
        self.close()
        self._handle, self._file, self._end = handle, self._file + 1, 0

    def _path(self, file: int) -> Path:
        return self._folder / f"{file:08}.bin"
