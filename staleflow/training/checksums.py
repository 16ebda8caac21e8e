"""Whether a checkpoint is whole: a checksum of each of its files, written last and compared before use.

    seal(folder)            # writes checksums.json beside the files, and syncs everything to disk
    damage(folder)          # "", or which file has changed, and how

A checkpoint without ``checksums.json`` is of an earlier release, unless its ``trainer.json`` says that it was sealed.
Such a checkpoint is checked as far as possible without: its JSON can be read, its tensor files have the right length.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

from staleflow.errors import line_of

CHECKSUMS = "checksums.json"
TRAINER, OPTIMISER = "trainer.json", "optimiser.safetensors"
UNFINISHED, REPLACED, REMOVED = ".unfinished-", ".replaced-", ".removed-"
"""Prefixes of the names of checkpoints that are being written, replaced or removed."""
SEALED = "sealed"
"""In ``trainer.json``: there is a ``checksums.json``."""
PIECE = 1 << 22


def seal(folder: Path) -> None:
    """Write the checksums of the folder's files. All files and the folder itself are synced when this returns."""
    inside = list(folder.rglob("*"))
    for each in inside:
        sync(each)
    names = [each.relative_to(folder).as_posix() for each in inside if each.is_file()]
    (folder / CHECKSUMS).write_text(_render(folder, names))
    sync(folder / CHECKSUMS)
    sync(folder)


def sealed(folder: Path) -> bool:
    return (folder / CHECKSUMS).exists()


def damage(folder: Path) -> str:
    """The first damaged file and what is wrong with it; empty if there is none. Additional files are allowed."""
    try:
        return _changed(folder) if sealed(folder) else _implausible(folder)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({line_of(error)})"


def _changed(folder: Path) -> str:
    content = (folder / CHECKSUMS).read_text()
    noted: dict[str, dict[str, Any]] = json.loads(content)
    for name, was in noted.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != was["bytes"]:
            return f"{name} has {size:,} bytes instead of {was['bytes']:,}"
    if content == (found := _render(folder, list(noted))):
        return ""
    now = json.loads(found)
    return next((f"{name} has other content than was saved" for name in noted if now[name] != noted[name]), CHECKSUMS)


def _render(folder: Path, names: list[str]) -> str:
    """Equal for equal content, so that the whole text can be compared."""
    noted = {name: {"bytes": (folder / name).stat().st_size, "xxh3": _checksum(folder / name)} for name in names}
    return json.dumps(noted, indent=1, sort_keys=True) + "\n"


def _checksum(path: Path) -> str:
    import xxhash  # comes with what is needed for training

    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def _implausible(folder: Path) -> str:
    """What is wrong with a checkpoint that has no checksums, as far as that can be seen."""
    try:
        state = json.loads((folder / TRAINER).read_text())
        said = state.get(SEALED)
    except (OSError, ValueError, AttributeError, RecursionError):
        return f"{TRAINER} is missing or cannot be read"
    if said:
        return f"{CHECKSUMS} is missing"
    models = sorted(folder.glob("model*.safetensors"))
    if not models:
        return "model.safetensors is missing"
    for path in (*models, folder / OPTIMISER):
        if not path.is_file():
            return f"{path.name} is missing"
        if _announced(path) != path.stat().st_size:
            return f"{path.name} is cut off, or is not a safetensors file"
    return ""


def _announced(path: Path) -> int | None:
    """How long a safetensors file should be: 8 bytes with the length of its head, the head, and the tensors."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, path.stat().st_size)))
            ends = [each["data_offsets"][1] for name, each in head.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
