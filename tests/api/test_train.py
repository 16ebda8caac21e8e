"""``sf.train``, from where people call it: a notebook whose event loop runs, with functions that only it has."""

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import staleflow as sf
from staleflow.api.train import _changes, with_rewards
from staleflow.config import load
from staleflow.reward.options import Reward
from tests.refusals import refused
from tests.run.test_resuming import tree
from tests.tiny_models import save_chat

pytestmark = pytest.mark.processes

SMALL = (
    "steps=2", "groups=2", "group_size=2", "rollout.instances=1", "rollout.max_tokens=8", "rollout.kv_tokens=2048",
    "evaluation.problems=4", "evaluation.every=0", "processes.standby=false",
)  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": f"Say {at}"}], "answer": str(at)} for at in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("model"))


def configured(model: Path, folder: Path, *changes: str) -> sf.Config:
    folders = [f"model={model}", f"runs={folder / 'runs'}", f"cache={folder / 'cache'}", "data.chat=true"]
    return sf.load("plain", [*folders, "data.max_prompt_tokens=64", *SMALL, *changes])


def test_a_run_in_a_notebook_with_its_own_rewards_and_rows_and_its_resume(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    length = 4

    def even(_problem: sf.Problem, response: sf.Response) -> float:
        return sum(token % 2 == 0 for token in response.tokens) / len(response.tokens)

    async def whole(problem: sf.Problem, response: sf.Response) -> float:
        assert problem.prompt == [{"role": "user", "content": f"Say {problem.facts['answer']}"}]
        return float(not response.cut and len(response.tokens) < length)

    async def notebook() -> sf.Result:
        return sf.train(configured(model, tmp_path), reward={even: 1.0, whole: 0.5}, data=ROWS, on_step=seen.append)

    result = asyncio.run(notebook())
    assert [row["step"] for row in seen] == [0, 1]
    assert [row["step"] for row in result.metrics] == [0, 1]
    assert result.reward == result.summary["accuracy_final"] is not None
    assert result.accuracy is None, "these rewards are not 0 or 1"
    assert result.checkpoint == result.run / "checkpoints" / "step-000002"
    assert result.best == result.run / "checkpoints" / "best"
    assert {"reward/even", "reward/whole", "cut", "reward_std"} <= set(result.metrics[0])
    assert {each.step for each in result.samples} == {0, 1}
    assert all(set(each.rewards) == {"even", "whole"} for each in result.samples)
    assert all(each.prompt in [row["prompt"] for row in ROWS] for each in result.samples)
    assert not result.summary["binary"]
    printed = capsys.readouterr().out
    assert f"run {result.run}" in printed, "what the run says is said where this program's output goes"
    assert "step 2/2" in printed
    assert "held-out mean reward" in printed, "these rewards are not 0 or 1"
    said = ["reads the data and tries the reward", "loads the tokenizer", f"run {result.run}",
            "data: 18 problems to train on, 2 held out", "starts its processes: waits for trainer",
            "evaluates version 0 on 2 held-out problems", "step 1/2", "evaluates version 2 on 2 held-out problems",
            "this command took"]  # fmt: skip
    places = [printed.find(each) for each in said]
    assert -1 not in places, "whatever takes long is said"
    assert places == sorted(places)

    # Continued, by the same program: the functions are given again, the rows have the same name.
    longer = configured(model, tmp_path, "steps=3")
    with pytest.raises(sf.ConfigError, match=r"other settings of reward\.function"):
        sf.train(longer, reward=even, data=ROWS, resume=result.run)
    again = sf.train(longer, reward={even: 1.0, whole: 0.5}, data=ROWS, resume=result.run, on_step=seen.append)
    assert (again.run, again.summary["steps"]) == (result.run, 3)
    assert [row["step"] for row in seen] == [0, 1, 2], "steps of earlier attempts are not told again"
    assert capsys.readouterr().out.startswith(
        f"resumes {result.run}: 2 of 3 steps are made, 1 is left; from checkpoint"
    )

    # Once more, though nothing is left: the result is there, and nothing is started or changed.
    before = tree(result.run)
    ended = sf.train(longer, reward={even: 1.0, whole: 0.5}, data=ROWS, resume=result.run, on_step=seen.append)
    assert (ended.run, ended.summary) == (again.run, again.summary)
    assert tree(result.run) == before
    assert "nothing is left to do" in capsys.readouterr().out


def test_what_is_wrong_is_an_exception_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path)
    with pytest.raises(sf.StaleFlowError, match="the reward is None, a NoneType: return a number"):
        sf.train(config, reward=lambda *_: None, data=ROWS)
    with pytest.raises(sf.ConfigError, match=r"give data\.chat=true"):
        sf.train(configured(model, tmp_path, "data.chat=false"), reward="exact-match", data=ROWS)
    with pytest.raises(sf.ConfigError, match="staleflow runs lists what is here"):
        sf.train(config, reward="exact-match", data=ROWS, resume=tmp_path / "nowhere")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_on_step_that_raises_ends_the_run_in_good_order(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run then said that SIGTERM had stopped it."""

    def stop(_row: dict[str, Any]) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        sf.train(configured(model, tmp_path, "steps=1000"), reward=lambda *_: 1.0, data=ROWS, on_step=stop)
    run = tmp_path / "runs" / "latest"
    assert list((run / "checkpoints").glob("step-*")), "with a checkpoint"
    by = "the program that called it (LookupError)"
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == by
    call = f"staleflow.train(resume='{run.resolve()}', reward=<lambda>)"
    assert f"stopped by {by}; continue with: {call}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_the_run_in_good_order_and_is_raised(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=1000")
    (tmp_path / "run.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in flat(config).items()))
    script = """
        import staleflow as sf
        try:
            sf.train("run.yaml", reward=lambda p, r: 1.0, data=[f"Say {n}" for n in range(20)],
                     on_step=lambda row: print("step", row["step"], flush=True))
        except KeyboardInterrupt as stopped:
            assert isinstance(stopped, sf.Interrupted)
            print("interrupted", stopped.result.summary["steps"], stopped.result.checkpoint, flush=True)
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program:
        for line in program.stdout:
            if line.startswith("step 0") and "/" not in line:
                program.send_signal(signal.SIGINT)
                break
        last = program.stdout.read().splitlines()[-1]
    assert program.returncode == 0
    assert last.startswith("interrupted")
    assert Path(last.split()[-1]).is_dir()


def flat(config: sf.Config) -> dict[str, Any]:
    """A few settings as a file has them."""
    names = ("model", "runs", "cache", "steps", "groups", "group_size")
    sections = {"data": {"chat": True, "answer": None, "max_prompt_tokens": 64}}
    sections |= {"rollout": {"instances": 1, "max_tokens": 8, "kv_tokens": 2048}}
    sections |= {"evaluation": {"problems": 4, "every": 0}}
    return {"preset": "plain", **{name: getattr(config, name) for name in names}, **sections}


def test_rewards_that_are_written_for_another_library_are_refused_with_the_way_to_write_them() -> None:
    def of_trl(prompts: Any, completions: Any, **rest: Any) -> list[float]:
        raise AssertionError(prompts, completions, rest)

    def of_verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        raise AssertionError(data_source, solution_str, ground_truth, extra_info)

    def of_verifiers(prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        raise AssertionError(prompt, completion, answer, state)

    assert "takes completions, as TRL's rewards do; here it is called for each response" in refused(
        with_rewards, Reward(), of_trl
    )
    assert "takes solution_str, as verl's rewards do" in refused(with_rewards, Reward(), {of_verl: 2.0})
    assert "write def of_verifiers(problem, response)" in refused(with_rewards, Reward(), of_verifiers)
    refusal = refused(with_rewards, Reward("my:own", {"weight": 2}), lambda problem, response: 1.0)  # noqa: ARG005
    assert "(got an unexpected keyword argument 'weight')" in refusal


def test_rewards_are_named_and_weighed() -> None:
    def one(*_: Any) -> float:
        return 1.0

    options, own = with_rewards(Reward(), one)
    assert (options.function, own) == ("python:one", {"one": one})
    options, own = with_rewards(Reward(), {one: 0.5, "my:two": 2})
    assert (options.functions, options.weights, options.names) == (("python:one", "my:two"), (0.5, 2.0), ("one", "two"))
    options, own = with_rewards(Reward(), ["exact-match", one])
    assert (options.all_weights, list(own)) == ((1.0, 1.0), ["one"])
    assert with_rewards(Reward("exact-match"), None) == (Reward("exact-match"), {})
    assert "the weight None of a reward is a NoneType: give a number" in refused(with_rewards, Reward(), {one: None})
    assert "give a function, or module:function" in refused(with_rewards, Reward(), [7])
    assert "reward=7 is a int: give a function, or module:function" in refused(with_rewards, Reward(), 7)
    assert "two of the same name" in refused(with_rewards, Reward(), [lambda: 1, lambda: 2])


@pytest.mark.parametrize("command", [sf.train, sf.simulate, sf.compare, sf.plan])
def test_settings_in_a_mapping_are_refused_with_how_to_make_one(command: Any) -> None:
    assert "is a dict: give sf.load(preset or file, changes)" in refused(command, {"steps": 2})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sf.train(on_step=3), "on_step is a int: give a function"),  # type: ignore[arg-type]
        (lambda: sf.train(resume=3), "resume is a int: give a name or a path"),  # type: ignore[arg-type]
        (lambda: sf.load(5), "the configuration is a int: give a name or a path"),  # type: ignore[arg-type]
        (lambda: sf.load(None, [5]), "5 is not a setting: write key=value"),  # type: ignore[list-item]
        (lambda: sf.compare(staleness="x"), "argument --staleness: 'x' is not a list of whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_kind_is_refused_with_what_to_give(call: Callable[[], object], says: str) -> None:
    assert says in refused(call)


def test_what_a_resumed_run_is_to_do_otherwise_is_all_that_differs() -> None:
    """A setting that one of the two did not name was a KeyError, or its change was dropped without a word."""
    plain = load("laptop", ["steps=30"])
    changed = load("laptop", ["steps=30", "evaluation.patience=3", "training.gamma=0.9", "rollout.temperature=0.7"])
    there = ["rollout.temperature=0.7", "training.gamma=0.9", "evaluation.patience=3"]
    back = ["rollout.temperature=1.0", "training.gamma=1.0", "evaluation.patience=0"]
    assert sorted(_changes(plain, changed)) == sorted(there)
    assert sorted(_changes(changed, plain)) == sorted(back)
    assert _changes(plain, plain) == []
