"""Files that are written whole or not at all, and disks without room for them."""

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

NO_ROOM_IN_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file whole or not at all: if this fails, what was there before stays.

    What is not a file, such as /dev/null or a pipe, is written to and stays what it is.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    try:
        _replace(path.resolve(), text, mode)  # behind a link, as /dev/stdout is one
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(path: Path, text: str, mode: int) -> None:
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.")
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
