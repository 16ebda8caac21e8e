"""Payload on disk: plain files beside the journal, each byte written once and synced, whole files deleted.

A transaction's chunks go to one range of one file; the journal then commits that range. So a range that the journal
knows is whole, and other bytes are leftovers of a crash: they are overwritten, or their file is removed. A file is
deleted when nothing in it is needed. ``stores`` in bench/servers.py compares this with blobs in SQLite, which writes
each byte twice and syncs two files.
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
"""A file that has reached this size is followed by a new one."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Named = tuple[str, Chunk]


class FileRange(NamedTuple):
    """The range of a file that holds a transaction's chunks."""

    file: int
    offset: int
    size: int
    crc: int


class PayloadFiles:
    def __init__(self, folder: Path, known: Iterable[FileRange]) -> None:
        """``known``: the ranges that the journal has committed. All other files are removed."""
        self._folder = folder
        self._handle: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        files = {place.file for place in known}
        for each in folder.glob("*.bin"):
            if int(each.stem) not in files:
                each.unlink()
        self._file = max(files, default=0)
        self._end = FILE_BYTES  # a new attempt begins a new file

    def write(self, chunks: Iterable[Named]) -> FileRange:
        """Write and sync. The range may be overwritten until ``keep``, after the journal has committed it."""
        body = _encode([(name, each.start, each.tokens, each.logprobs) for name, each in chunks])
        if self._handle is None or self._end >= FILE_BYTES:
            self._begin()
        assert self._handle is not None
        written = 0
        while written < len(body):
            written += os.pwrite(self._handle, memoryview(body)[written:], self._end + written)
        os.fdatasync(self._handle)
        return FileRange(self._file, self._end, len(body), zlib.crc32(body))

    def keep(self, place: FileRange) -> None:
        self._end = place.offset + place.size

    def read(self, place: FileRange) -> list[Named] | None:
        """The chunks of a range; None if they are damaged."""
        try:
            with self._path(place.file).open("rb") as file:
                if not 0 <= place.offset <= place.offset + place.size <= os.fstat(file.fileno()).st_size:
                    return None
                file.seek(place.offset)
                body = file.read(place.size)
        except FileNotFoundError:
            return None
        if zlib.crc32(body) != place.crc:
            return None
        return [(name, Chunk(start, *arrays)) for name, start, *arrays in cast(list[Any], _decode(body))]

    def remove(self, file: int) -> None:
        """Delete a file that is no longer needed; the one that is being written stays."""
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
