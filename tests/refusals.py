"""How bad input is refused: one line that says what to write instead."""

import re
from collections.abc import Callable

import pytest

from staleflow.cli import main
from staleflow.commands.train import START, TRIES
from staleflow.errors import ConfigError


def refused(call: Callable[..., object], *arguments: object) -> str:
    """The line with which a call refuses its arguments."""
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which ``staleflow`` refuses these words; it exits with 2 and prints nothing else."""
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out in ("", f"{START}\n", f"{TRIES}\n")
    assert said.err.startswith("staleflow: error: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    return said.err


def without_progress(said: str) -> str:
    """Standard error without the lines that say how far a command is: how many there are depends on the machine."""
    return "".join(line for line in said.splitlines(True) if not re.match(r"staleflow \w+: \d+% in ", line))
