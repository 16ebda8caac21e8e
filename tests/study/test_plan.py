"""``staleflow plan``: what it recommends and why, from a preset or from what a run has measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staleflow.cli import main
from staleflow.config import load, to_yaml
from staleflow.errors import ConfigError
from staleflow.simulate.lengths import Constant
from staleflow.simulate.setting import preset
from staleflow.simulate.trace import Trace
from staleflow.simulate.workload import Sampled
from staleflow.study.measured import read_run
from staleflow.study.plan import Search, make_plan

SMALL = ("--jobs", "1", "--gpus", "14", "--groups", "8", "--group-size", "4", "--steps", "8", "--most-groups", "16")
BASE = replace(preset("paper-14b"), instances=6, training_gpus=8, groups=8, group_size=4, steps=10)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *SMALL, *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_a_plan_says_what_to_use_why_and_what_each_knob_brings(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys)
    best = found["recommended"]
    assert best["rollout_gpus"] + best["training_gpus"] == 14
    assert best["law"]["binds"] in ("training", "rollout", "tail")
    assert all(best["law"][f"{term}_s"] > 0 for term in ("training", "rollout", "tail"))
    assert {knob["knob"] for knob in found["knobs"]} == {"split", "bound", "batch", "cap"}
    assert [trial["staleness"] for trial in found["bounds"]] == [0, 1, 2, 3]
    assert found["notes"] == []
    for trial in (found["start"], best, *found["bounds"]):
        assert 0 < trial["percent_of_limit"] < 101
        assert trial["mean_staleness"] <= trial["staleness"]


def test_where_the_trainer_binds_no_knob_but_the_split_is_worth_turning() -> None:
    setting = replace(BASE, workload=replace(BASE.workload, source=Sampled(Constant(400))), training_gpus=1)
    found = make_plan(setting, Search(most_groups=8))
    assert found.best.law.binds == "training"
    assert found.best.setting.staleness <= 1
    assert found.best.setting.groups == 8
    assert found.best.setting.training_gpus > 1
    assert found.best.tokens_per_s > found.start.tokens_per_s


def test_where_the_tail_binds_the_bound_is_worth_turning() -> None:
    found = make_plan(BASE, Search(most_groups=8))
    turned = [turn for turn in found.turns if turn.knob == "bound" and turn.taken]
    assert [turn.value for turn in turned] == [1, 2, 3][: len(turned)]
    assert turned
    assert all(turn.gain >= 0.05 for turn in turned)
    assert found.best.setting.staleness == turned[-1].value


def test_no_cap_cuts_off_more_than_a_few_responses() -> None:
    found = make_plan(BASE, Search(most_staleness=0, most_groups=8, most_cut=0.0))
    caps = [turn for turn in found.turns if turn.knob == "cap"]
    assert [turn.taken for turn in caps] == [False]
    assert caps[0].after.cut > 0
    assert found.best.setting.workload.max_tokens == 20_000
    free = make_plan(BASE, Search(most_staleness=0, most_groups=8, most_cut=1.0))
    assert free.best.setting.workload.max_tokens < 20_000


def test_the_plan_does_not_depend_on_the_number_of_processes() -> None:
    setting, search = replace(BASE, groups=4, group_size=2, steps=4), Search(most_staleness=1, most_groups=8)
    assert make_plan(setting, search, jobs=2) == make_plan(setting, search)


def test_table_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert main(["plan", *SMALL, "--picture", str(path)]) == 0
    text = capsys.readouterr().out
    for word in ("Recommended for paper-14b on 14 GPUs", "What binds is", "what each knob is worth", "by bound"):
        assert word in text
    ElementTree.fromstring(path.read_text())


# From a run


def run_directory(folder: Path, **changes: Any) -> Path:
    """A finished run as ``staleflow train`` leaves it; a change of None takes a key out."""
    folder.mkdir(exist_ok=True)
    lengths = [40, 60, 50, 400, 30, 45, 80, 120]
    step = {"step": 0, "time": 3.0, "lengths": lengths, "tokens": sum(lengths), "prompt_tokens": 80, "train_s": 1.5}
    step = {key: value for key, value in (step | changes).items() if value is not None}
    rows = [step | {"step": at} for at in range(2)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = {"groups": 2, "group_size": 4, "staleness": 1, "instances": 2, "training_gpus": 1, "reward": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_brings_its_own_lengths_and_costs(tmp_path: Path) -> None:
    run = read_run(str(run_directory(tmp_path)))
    setting = run.setting()
    source = setting.workload.source
    assert isinstance(source, Trace)
    assert source.outputs[0] == (40, 60, 50, 400)
    assert source.prompts[0] == 10
    assert setting.trainer_per_token_gpu_s == pytest.approx(1.5 / (825 + 80))
    assert (setting.groups, setting.group_size, setting.staleness, setting.instances) == (2, 4, 1, 2)
    assert setting.rollout == preset("paper-14b").rollout


def test_the_profile_of_a_run_is_used(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    names = ("floor", "base", "per_sequence", "fixed", "per_context_token", "per_prefill_token")
    (folder / "profile.json").write_text(json.dumps({"coefficients": dict.fromkeys(names, 0.002)}))
    assert read_run(str(folder)).setting().rollout.floor == 0.002


def test_a_run_is_planned_as_it_was_configured_and_what_is_asked_for_wins(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    words = ["max_tokens=500", "staleness=1", "group_size=4", "strategies.mu=0.7", "kv_tokens=9000"]
    (folder / "config.yaml").write_text(to_yaml(load(None, words)))
    run = read_run(str(folder))
    setting = run.setting()
    assert (setting.workload.max_tokens, setting.strategies.mu, setting.kv_tokens) == (500, 0.7, 9000)
    assert setting.trainer_per_token_gpu_s == pytest.approx(1.5 / (825 + 80))
    changed = run.setting(["cluster.trainer_per_token_gpu_s=2", "groups=5"])
    assert (changed.trainer_per_token_gpu_s, changed.groups) == (2, 5)


def test_a_plan_from_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    small = ("--jobs", "1", "--gpus", "4", "--steps", "4", "--most-groups", "4")
    assert main(["plan", "--json", "--run-dir", str(folder), *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["preset"] == "measured run"
    assert "has no profile.json" in found["notes"][0]
    assert found["recommended"]["max_tokens"] == 400


def test_a_line_that_was_being_written_when_the_run_died_is_left_out(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "len')
    assert len(read_run(str(folder)).lengths) == 16


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lengths": None}, "holds no training step with lengths"),
        ({"lengths": []}, "step 1: lengths is []"),
        ({"lengths": [5, -1]}, "step 1: a length is -1"),
        ({"lengths": [5, 1.5]}, "step 1: a length is 1.5"),
        ({"lengths": "five"}, "step 1: lengths is 'five'"),
        ({"train_s": None}, "step 1: train_s is missing"),
        ({"train_s": "long"}, "step 1: train_s is 'long'"),
        ({"train_s": 0}, "no step took any time"),
        ({"prompt_tokens": None}, "step 1: prompt_tokens is missing"),
        ({"tokens": -3}, "step 1: tokens is -3"),
    ],
)
def test_what_a_run_does_not_say_is_one_line(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(str(run_directory(tmp_path, **change)))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("text", [None, "", "[]", "nonsense"])
def test_a_missing_or_broken_file_is_one_line(tmp_path: Path, name: str, text: str | None) -> None:
    folder = run_directory(tmp_path)
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_run(str(folder))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--run-dir nowhere", "nowhere is not a run directory"),
        ("--run-dir . --trace x.csv", "cluster.trace and --run-dir both say how long responses are"),
        ("--run-dir . lengths=long", "cluster.lengths and --run-dir both say how long responses are"),
        ("--worth -1", "--worth -1 is impossible"),
        ("--most-staleness -1", "--most-staleness -1 is impossible"),
        ("--most-groups 0", "--most-groups 0 is impossible"),
        ("--jobs -1", "--jobs -1 is impossible: give 1 or more"),
        ("policy=quota", "policy is now the option --policy of simulate"),
        ("--picture x.png", "give a name that ends in .svg"),
        ("--gpus 0", "--gpus 0 are too few"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.chdir(run_directory(tmp_path))
    assert main(["plan", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert line in printed.err
