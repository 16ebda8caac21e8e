"""``staleflow plan``: what it recommends and why, from a preset or from what a run has measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staleflow.cli import main
from staleflow.config import load, to_yaml
from staleflow.config.costs import on_other_hardware
from staleflow.config.gpus import GPUS
from staleflow.coordinator.cost import CostModel
from staleflow.errors import ConfigError
from staleflow.rollout.shapes import SHAPES
from staleflow.simulate.lengths import Constant
from staleflow.simulate.setting import Setting, preset, setting_of
from staleflow.simulate.trace import Trace
from staleflow.simulate.workload import Sampled
from staleflow.study.law import splits
from staleflow.study.measured import read_run
from staleflow.study.plan import Search, make_plan
from tests.refusals import without_progress

SMALL = ("--jobs", "1", "--gpus", "14", "--groups", "8", "--group-size", "4", "--steps", "8", "--most-groups", "16")
BASE = replace(preset("paper-14b"), instances=6, training_gpus=8, groups=8, group_size=4, steps=10)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *SMALL, *arguments]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
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


def test_a_split_that_loses_is_not_taken() -> None:
    """It was called a turn that is taken, with a loss of 6 %."""
    for training_gpus in (6, 8, 10):
        setting = replace(BASE, instances=14 - training_gpus, training_gpus=training_gpus, group_size=2, staleness=0)
        split = make_plan(setting, Search(most_staleness=0, most_groups=8, least_tokens=10**9)).turns[0]
        assert split.gain >= 0
        assert split.taken == (split.value != training_gpus)


def test_a_turn_that_could_bring_too_little_is_not_simulated() -> None:
    setting = replace(BASE, workload=replace(BASE.workload, source=Sampled(Constant(400))), training_gpus=1)
    started: list[str] = []
    found = make_plan(setting, Search(most_staleness=3, most_groups=64), started.append)
    (batch,) = [turn for turn in found.turns if turn.knob == "batch"][-1:]
    assert (batch.simulated, batch.taken) == (False, False)
    assert batch.gain < 0.05
    assert not any(f"{batch.value} groups" in each for each in started)


def test_how_far_a_plan_is_only_grows_and_ends_at_1_however_many_turns_it_takes() -> None:
    for most_groups in (8, 16, 32):
        shares: list[float] = []
        search = Search(most_staleness=1, most_groups=most_groups, steps=3)
        make_plan(replace(BASE, group_size=2), search, on_share=shares.append)
        assert all(0 < share <= 1 for share in shares)
        assert shares[-1] > 0.5


def test_larger_batches_take_fewer_steps_and_those_asked_for_are_kept() -> None:
    started: list[str] = []
    found = make_plan(
        replace(BASE, groups=256, group_size=1), Search(most_staleness=0, most_groups=256), started.append
    )
    assert found.best.setting.steps < 8
    kept = make_plan(replace(BASE, groups=4, group_size=1), Search(most_staleness=0, most_groups=4, steps=3))
    assert kept.best.setting.steps == kept.start.setting.steps == 3


# GPUs, machines and the model as inputs


def small_gpus(*arguments: str) -> tuple[str, ...]:
    return (
        "--groups",
        "8",
        "--group-size",
        "2",
        "--steps",
        "3",
        "--most-groups",
        "8",
        "--most-staleness",
        "0",
        *arguments,
    )


def test_a_plan_for_a_kind_of_gpu_machines_and_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = SHAPES["qwen-1.5b"] | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ("--model", str(tmp_path), "--gpu", "h100", "--nodes", "2", "--gpus-per-node", "4", "max_tokens=2000")
    assert main(["plan", "--json", "--jobs", "1", *small_gpus(*words)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["preset"], found["gpus"]) == (str(tmp_path), 8)
    assert "on h100" in found["notes"][0]
    assert found["train"]["usable"] is False
    assert "runtime=ray" in found["train"]["why_not"]
    assert "one of the 2 machines" in found["train"]["why_not"]
    assert found["train"]["settings"][0] == "staleness=0"


def test_what_train_can_use_is_said_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = small_gpus("--model", "Qwen2.5-7B", "--gpu", "B200", "--gpus", "2")
    assert main(["plan", "--jobs", "1", *words]) == 0
    assert "To train with it: staleflow train ... staleness=0 groups=8 rollout.max_tokens=" in capsys.readouterr().out
    assert main(["plan", "--jobs", "1", *small_gpus("--gpus", "4")]) == 0
    assert "It was never trained with: staleflow train needs runtime=ray for" in capsys.readouterr().out


@pytest.mark.parametrize("name", GPUS)
def test_costs_and_memory_follow_from_the_gpu_and_the_model(name: str) -> None:
    gpu = GPUS[name]
    small, large = (on_gpu(model, name) for model in ("Qwen2.5-7B", "Qwen2.5-32B"))
    for setting in (small, large):
        setting.check()
        assert setting.kv_tokens > 40_000, "beside weights, many trajectories"
        assert setting.gpus_per_instance & (setting.gpus_per_instance - 1) == 0
        assert min(split.training_gpus for split in splits(setting)) >= setting.least_training_gpus
    assert large.gpus_per_instance >= small.gpus_per_instance
    assert large.trainer_per_token_gpu_s > 3 * small.trainer_per_token_gpu_s
    assert large.least_training_gpus * gpu.memory > 16 * 32e9
    alone = CostModel.step(small.rollout, 1, 1000)
    assert alone > 2 * 7e9 / (small.gpus_per_instance * gpu.bandwidth), "weights are read once for each token"


def test_the_paper_s_gpu_by_its_table_is_near_what_was_measured() -> None:
    by_table, measured = on_gpu("Qwen2.5-14B", "H20"), preset("paper-14b")
    assert by_table.rollout.step(64, 64 * 2000) == pytest.approx(measured.rollout.step(64, 64 * 2000), rel=0.35)
    assert by_table.trainer_per_token_gpu_s == pytest.approx(measured.trainer_per_token_gpu_s, rel=0.05)
    assert by_table.kv_tokens == pytest.approx(measured.kv_tokens, rel=0.05)
    assert (by_table.gpus, by_table.gpus_per_instance) == (measured.gpus, 1)


def on_gpu(model: str, gpu: str) -> Setting:
    words = [f"model={model}", f"cluster.gpu={gpu}"]
    config = on_other_hardware(load("paper-14b", words), {"model", "cluster.gpu"})
    return setting_of(config, model)


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
    assert main(["plan", "--run-dir", str(folder), *small]) == 0
    assert f"Recommended for the run in {folder} on 4 " in capsys.readouterr().out.replace("\n", "")
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
        ("--gpu H900", "cluster.gpu=H900 is unknown: choose one of A100-40GB, A100-80GB"),
        ("--gpu H100 --run-dir .", "cluster.gpu and --run-dir both say what everything costs"),
        ("--nodes 4 --gpus-per-node 8 --gpus 30", "--nodes and --gpus-per-node are 32 GPUs, not --gpus 30"),
        ("--nodes 0", "--nodes 0 is impossible: give 1 or more"),
        ("--gpus 30 --gpus-per-node 8", "are 8 GPUs, not --gpus 30"),
        ("--gpu L4 --model Llama-3.1-70B --gpus-per-node 8 --nodes 9", "an instance of 16 GPUs does not fit"),
        ("--gpu H100 --model Llama-3.1-70B --gpus 16", "an instance of 4 and a trainer of 18: give 22 or more"),
        ("--gpu H100 --model nowhere", "nowhere: no such folder"),
        ("--gpu H100 max_tokens=100000", "are longer than the 32768 positions of model=Qwen2.5-14B"),
        ("paper-30b-a3b --gpu H100", "or one of Qwen2.5-7B, "),
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
