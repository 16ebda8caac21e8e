"""Waiting for what can be read."""

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from staleflow.readable import readable

HIGH = 1500
"""``select.select`` takes descriptors below 1,024 only."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH + 1:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 2), hard))
    low, write = os.pipe()
    read = fcntl.fcntl(low, fcntl.F_DUPFD, HIGH)
    yield read, write
    for each in (low, read, write):
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_beyond_the_first_thousand_are_waited_for(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert readable([read], 0.0) == []
    os.write(write, b"x")
    assert readable([read], None) == [read]
    assert os.read(read, 9) == b"x"
    assert readable([read], -1.0) == []


def test_an_end_that_is_gone_can_be_read() -> None:
    read, write = os.pipe()
    os.close(write)
    assert readable([read], None) == [read]
    assert os.read(read, 9) == b""
    os.close(read)
