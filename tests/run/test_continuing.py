"""How a run is continued is said in words that work: a reward of a program cannot be given on the command line."""

from pathlib import Path
from typing import Any

import pytest

from staleflow.api.train import with_rewards
from staleflow.config import load, to_yaml
from staleflow.errors import RunError
from staleflow.reward.options import Reward
from staleflow.run.continuing import continuing, stored_reward
from staleflow.run.directory import RunDirectory
from staleflow.run.requests import refuse_unless_running
from staleflow.run.resuming import outlook


def correct(*_: Any) -> float:
    return 1.0


def brief(*_: Any) -> float:
    return 1.0


def stored(tmp_path: Path, function: str) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(to_yaml(load(None, [f"reward.function={function}", f"runs={tmp_path}"])))
    return run


def test_a_run_of_the_command_line_is_continued_there(tmp_path: Path) -> None:
    for reward in (Reward(), Reward(("exact-match", "my:own"), weights=(1, 2))):
        assert continuing(tmp_path, reward) == f"staleflow train --resume {tmp_path}"
    assert continuing(tmp_path, Reward(), "steps=8") == f"staleflow train --resume {tmp_path} steps=8"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (correct, "correct"),
        ([correct, "exact-match"], "[correct, 'exact-match']"),
        ({correct: 1.0, brief: 0.25}, "{correct: 1, brief: 0.25}"),
        (lambda *_: 1.0, "<lambda>"),
    ],
)
def test_a_run_whose_reward_is_a_function_of_a_program_is_not_told_to_use_the_command_line(
    given: Any, said: str
) -> None:
    """The message named ``staleflow train --resume``, which was refused: the function is in the program."""
    options, _ = with_rewards(Reward(), given)
    call = continuing(Path("runs/it's"), options)
    assert call == f'staleflow.train(resume="runs/it\'s", reward={said})'
    if said.isidentifier() or "{" in said or "[" in said:  # what is said can be run, and gives the same rewards
        names = {"correct": correct, "brief": brief}
        assert with_rewards(options, eval(said, names))[0] == options


def test_whoever_has_only_the_directory_says_the_same(tmp_path: Path) -> None:
    run = stored(tmp_path, "python:correct")
    call = f"staleflow.train(resume='{run.path}', reward=correct)"
    assert continuing(run.path, stored_reward(run.path)) == call
    more = outlook(run, load(str(run.config_file), [])).more
    assert more == f"staleflow.train(staleflow.load('{run.config_file}', ['steps=2']), resume={call.partition('=')[2]}"
    with pytest.raises(RunError, match=r"not running: give it in staleflow.train\(staleflow.load\(.*instances=N'\]\)"):
        refuse_unless_running(run)
    run.config_file.write_text("nonsense: [")
    assert stored_reward(run.path) == Reward(), "whoever continues it is told what is wrong"


def test_scaling_a_dead_run_of_the_command_line_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not running: give rollout.instances=N to train --resume$"):
        refuse_unless_running(stored(tmp_path, "exact-match"))
