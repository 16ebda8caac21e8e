"""A file is written whole or not at all, and what is not a file stays what it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from staleflow.files import write_whole


def test_a_device_or_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("before")
    link.symlink_to(file)
    write_whole(link, "after")
    assert link.is_symlink()
    assert file.read_text() == "after"


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "file"
    with pytest.raises(FileNotFoundError) as error:
        write_whole(missing, "text")
    assert error.value.filename == str(missing)


def test_a_name_as_long_as_a_name_may_be_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    write_whole(path, "text")
    assert list(tmp_path.iterdir()) == [path]
