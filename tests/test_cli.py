"""The command line as a person meets it."""

import pytest

from staleflow.cli import main


def test_train_runs_what_exists_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    output = capsys.readouterr().out
    assert "not part of this version yet" in output
    assert "0 groups beyond the bound" in output


def test_an_unknown_command_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err
