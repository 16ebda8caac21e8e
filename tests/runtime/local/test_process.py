"""How a process ended is told as what it was."""

import signal

import pytest

from staleflow.errors import ending


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-signal.SIGKILL, "killed (SIGKILL; out of memory?)"),
        (-signal.SIGSEGV, "killed (SIGSEGV)"),
        (-250, "killed (signal 250)"),
        (1, "exit code 1"),
        (0, "exit code 0"),
        (None, "closed its connection"),
    ],
)
def test_an_exit_status_in_words(code: int | None, told: str) -> None:
    assert ending(code) == told
