"""All commands take settings in the same way, and the command lines in the documents do so too."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli import main, parse
from staleflow.commands import compare, profile
from staleflow.commands import train as train_command
from staleflow.commands.common import given_settings, read_setting
from staleflow.config import PRESETS, load, to_yaml
from staleflow.errors import RunError
from staleflow.runtime.control import StalledError
from staleflow.servers.database import JournalError
from staleflow.simulate.setting import assumptions, preset, setting_of

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "simulate", "compare", "plan", "profile", "evaluate")
TINY = ("--steps", "3", "--groups", "4", "--group-size", "2", "--json")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "words",
    [
        "chunk=3",
        "stalenes=1",
        "temperature=0.5",
        "rollout.max_tokens=many",
        "rollout.instances=0",
        "training_gpus=0",
        "staleness=1 staleness=2",
        "rollout.max_tokens=9 max_tokens=9",
        "nowhere.yaml",
        "lapptop",
        "laptop one-gpu",
    ],
)
def test_all_commands_refuse_a_mistake_in_the_same_words(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert len({refused(capsys, command, *words.split()) for command in COMMANDS}) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_simulated_but_where_a_model_is_missing(name: str) -> None:
    overrides = ["model=adder"] if name == "plain" else []
    config = load(name, overrides)
    setting = setting_of(config, name)
    setting.check()
    assert (setting.groups, setting.instances, setting.max_running) == (
        config.groups,
        config.rollout.instances,
        config.rollout.max_running,
    )
    assert (assumptions(config, setting) == []) == name.startswith("paper")


def test_a_file_of_train_is_simulated_compared_and_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("staleness: 1\nrollout: {instances: 3}\ncluster: {mean_tokens: 20}\n")
    assert main(["train", "run.yaml", "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["simulate", "run.yaml", *TINY]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["preset"], row["staleness"], row["instances"], row["group_size"]) == ("run.yaml", 1, 3, 2)
    assert "lognormal lengths with a mean of 20 tokens are assumed" in row["notes"][0]
    assert main(["compare", "run.yaml", *TINY, "--jobs", "1", "--seeds", "1", "--policies", "staleflow"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["staleness"] == 1
    assert main(["plan", "run.yaml", *TINY, "--jobs", "1", "--most-staleness", "0", "--most-groups", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["start"]["staleness"] == 1


def test_the_configuration_of_a_run_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load(None, ["staleness=1", "strategies.consume=batch"])))
    assert main(["simulate", str(path), *TINY]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main(["simulate", "laptop", *TINY, "--staleness", "1", "consume=batch"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == from_file["hash"]


def test_a_file_below_a_folder_with_an_equals_sign_is_not_taken_for_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1e-5").mkdir()
    Path("lr=1e-5/run.yaml").write_text("staleness: 1\n")
    wanted = given_settings(parse(["train", "lr=1e-5/run.yaml", "steps=3"]))
    assert (wanted.source, wanted.words) == ("lr=1e-5/run.yaml", ["steps=3"])
    assert wanted.config().staleness == 1


def test_an_option_is_short_for_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    short = given_settings(parse(["simulate", "--instances", "3", "--seed", "7", "--trace", "7.csv"]))
    assert short.words == ["rollout.instances=3", "seed=7", "cluster.trace=7.csv"]
    config = short.config()
    assert (config.rollout.instances, config.seed, config.cluster.trace) == (3, 7, "7.csv")
    assert "give --instances or rollout.instances=, not both" in refused(
        capsys, "simulate", "--instances", "3", "instances=4"
    )


def test_lengths_of_r1_may_be_stretched_to_a_mean() -> None:
    assert preset("paper-14b", "mean_tokens=500").workload.mean_tokens() == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize(("error", "code"), [(StalledError, 1), (JournalError, 2), (RunError, 2)])
def test_a_run_that_cannot_continue_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    code: int,
) -> None:
    def stuck(*_: Any, **__: Any) -> None:
        raise error("step 3 waits for group p7")

    monkeypatch.setattr(train_command, "train", stuck)
    assert main(["train", f"runs={tmp_path}"]) == code
    assert capsys.readouterr().err == "staleflow: error: step 3 waits for group p7\n"


def test_a_dry_run_shows_a_plan_that_does_not_fit_and_refuses_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", "--dry-run", f"runs={tmp_path}", "rollout.instances=100000"]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "does not fit: the run needs" in printed.out
    assert printed.err.count("\n") == 1
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problem"].startswith("the run needs")


def test_nvidia_smi_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_for: list[None] = []
    monkeypatch.setattr("staleflow.config.machine._gpus", lambda: asked_for.append(None) or ())
    assert main(["train", "--dry-run", f"runs={tmp_path}"]) == 0
    assert len(asked_for) == 1


def test_the_package_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "staleflow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("staleflow ")


# The documents


def documented() -> list[str]:
    """Every command line in a block of code."""
    found: list[str] = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if match := re.match(rf"(?:\.venv/bin/)?staleflow ((?:{'|'.join(COMMANDS)})\b.*)", line):
                    found.append(match[1].partition(" #")[0].strip())
    return found


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_line_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its parsing is tested here; what it runs is tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("staleness: 1\n")
    Path("lengths.csv").write_text("prompt_tokens,output_tokens\n10,20\n")
    Path("mine.json").write_text(json.dumps({"coefficients": load("paper-14b").cluster.costs}))
    Path("models/mine").mkdir(parents=True)
    options = parse(shlex.split(line))
    if options.command == "profile":
        profile.read(options)
    elif options.command == "compare":
        compare.read(options)
    elif options.command in ("train", "evaluate"):
        given_settings(options).config()
    else:
        read_setting(options, given_settings(options))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([command, "--help"])
    assert caught.value.code == 0
    assert "CONFIG | KEY=VALUE" in capsys.readouterr().out
