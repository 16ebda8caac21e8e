"""The command line as a person meets it."""

import pytest

from staleflow.cli import main


def test_train_without_arguments_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run"]) == 0
    assert "adder" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err
