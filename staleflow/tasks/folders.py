"""Folders that are made once and found again: written beside their place, then renamed.

A maker that is cut off leaves nothing that could be taken for its result; of two that make the same folder at once,
the second finds the first one's::

    folder = made_once(cache / "model-1f3a", lambda draft: model.save_pretrained(draft))
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from staleflow.tasks.task import TaskError


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, filled by ``make`` if it is not there yet."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise TaskError(
            f"{target.parent}: cannot be written ({error.strerror}): name another folder as cache"
        ) from None
    try:
        make(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


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
