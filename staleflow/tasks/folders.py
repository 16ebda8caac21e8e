"""Folders that are made once and found again: written under another name, then renamed.

A process that is killed leaves nothing that could be taken for a result; of two that make the same folder at once, the
second finds the first one's::

    folder = made_once(cache / "model-1f3a", lambda draft: model.save_pretrained(draft))

A process locks its draft while it runs, so that the next one knows which drafts are abandoned, and removes them.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from staleflow.tasks.task import TaskError

PARTIAL = ".partial"
YOUNG_S = 60.0
"""A younger draft may not be locked yet."""


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, filled by ``make`` if it is not there yet."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in abandoned(target.parent):
            shutil.rmtree(left, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=PARTIAL, dir=target.parent))
        held = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        raise TaskError(
            f"{target.parent}: cannot be written ({error.strerror}): name another folder as cache"
        ) from None
    try:
        make(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(held)
    return target


def abandoned(folder: Path) -> Iterator[Path]:
    """Drafts whose process is dead."""
    for draft in folder.glob(f"*{PARTIAL}"):
        if time.time() - draft.stat().st_mtime < YOUNG_S:
            continue
        held = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(held)
        yield draft


def _publish(draft: Path, target: Path) -> None:
    for path in draft.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    draft.chmod(0o755)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # else another process made the same folder first
            raise
