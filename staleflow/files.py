"""Files that are written whole or not at all, and disks without room for them."""

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

NO_ROOM_IN_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file whole or not at all: if this fails, what was there before stays."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def no_room(error: BaseException | None) -> bool:
    """Whether a full disk is behind it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in NO_ROOM_IN_SQLITE:
            return True
        error = error.__cause__ or error.__context__
    return False
