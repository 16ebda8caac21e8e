"""Whether a checkpoint is whole: a checksum of each of its files, written last, and compared before it is used.

    seal(folder)            # writes checksums.json beside the files, and brings all of it to the disk
    damage(folder)          # "", or which file is not what was written, and how

A checkpoint without ``checksums.json`` is of an earlier release, unless its ``trainer.json`` says that it was sealed.
Its files are then checked as far as they tell by themselves: JSON that can be read, tensors as long as announced.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
TRAINER, OPTIMISER = "trainer.json", "optimiser.safetensors"
UNFINISHED, REPLACED, REMOVED = ".unfinished-", ".replaced-", ".removed-"
"""How the names of checkpoints begin that are being written, or that are on their way out."""
SEALED = "sealed"
"""In ``trainer.json``: there is a ``checksums.json``."""
PIECE = 1 << 22


def seal(folder: Path) -> None:
    """Note what is in the folder. Its files and the folder itself are on the disk when this returns."""
    for file in folder.iterdir():
        sync(file)
    (folder / CHECKSUMS).write_text(_render(folder, [file.name for file in folder.iterdir()]))
    sync(folder / CHECKSUMS)
    sync(folder)


def sealed(folder: Path) -> bool:
    return (folder / CHECKSUMS).exists()


def damage(folder: Path) -> str:
    """What is wrong with the checkpoint, by file; empty if nothing is. Files beside those that were saved may be."""
    try:
        return _changed(folder) if sealed(folder) else _implausible(folder)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({' '.join(str(error).split())})"


def _changed(folder: Path) -> str:
    content = (folder / CHECKSUMS).read_text()
    noted: dict[str, dict[str, Any]] = json.loads(content)
    for name, was in noted.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != was["bytes"]:
            return f"{name} has {size:,} bytes instead of {was['bytes']:,}"
    if content == (found := _render(folder, list(noted))):
        return ""
    now = json.loads(found)
    return next((f"{name} has other content than was saved" for name in noted if now[name] != noted[name]), CHECKSUMS)


def _render(folder: Path, names: list[str]) -> str:
    """One text for one content, so that the checksums themselves can be compared as they are."""
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
    """Of a checkpoint without checksums."""
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
    """How long a safetensors file says it is, if it is one: 8 bytes with the length of its head, head, and tensors."""
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
