"""What a run has measured beyond lengths is used as it was meant, and what cannot be true is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shared_cores import alone, teaches
from staleflow.coordinator.cost import CostModel
from staleflow.errors import ConfigError
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.trace import Trace
from staleflow.study.measured import line, read_run, training_costs

SUMMARY: dict[str, Any] = {
    "groups": 2, "group_size": 2, "staleness": 1, "instances": 2, "training_gpus": 1,
    "kv_tokens": 4096, "max_running": 8, "chunk": 64, "redundancy": 1, "extra_members": 0,
    "strategies": {"consume": "batch", "headroom": 64, "unheard_of": 3},
    "cycle_s": 0.05, "pull_s": 0.002, "report_s": 0.01, "reward_s": 0.02, "finish_s": 0.03,
    "wall_s": 10.0, "trainer_busy_s": 8.0, "instance_idle": 0.25, "instance_cpu_share": 0.5,
    "cpu_s": {"trainer": 4.0},
}  # fmt: skip
COSTS = {"floor": 0.002, "base": 0.002, "per_sequence": 1e-4, "fixed": 0.0, "per_context_token": 0.0}


def step_of(taught: int, idle: int, prompts: list[int]) -> dict[str, Any]:
    """A group that teaches and one that does not; training takes 0.1 s and 1 ms for each token that is taught."""
    return {
        "lengths": [taught // 2, taught - taught // 2, idle // 2, idle - idle // 2],
        "tokens": taught + idle,
        "tokens_without_signal": idle,
        "groups_without_signal": 1,
        "prompt_tokens": 40,
        "train_s": 0.1 + 0.001 * (taught + 20),
        "prompts": prompts,
        "signal": [True, False],
    }


def run_directory(folder: Path, summary: dict[str, Any] | None = None, **changes: Any) -> str:
    steps = [step_of(100 + 37 * at % 90, 60 + 53 * at % 70, [2 * at + 1, 2 * at]) for at in range(12)]
    steps[0] |= changes
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (folder / "summary.json").write_text(json.dumps(SUMMARY | (summary or {})))
    (folder / "profile.json").write_text(json.dumps({"coefficients": COSTS | {"per_prefill_token": 1e-5}}))
    return str(folder)


def test_everything_that_was_measured_is_applied(tmp_path: Path) -> None:
    setting = read_run(run_directory(tmp_path)).setting()
    assert (setting.kv_tokens, setting.max_running, setting.prefill_tokens, setting.redundancy) == (4096, 8, 64, 1)
    assert (setting.strategies.consume, setting.strategies.headroom) == ("batch", 64)
    assert (setting.cycle_s, setting.push_s) == (0.05, 0.03)
    assert setting.reward_s == pytest.approx(0.03), "the report and the reward, one after the other"
    assert setting.weight_bytes / setting.link_bandwidth == pytest.approx(0.002)
    assert setting.trainer_fixed_s == pytest.approx(0.1)
    assert setting.rollout.floor == 0.002
    setting.check()


def test_the_coordinator_does_not_know_what_it_only_learned_afterwards(tmp_path: Path) -> None:
    """A real run decides by a guess; with what its engines turned out to cost it would have decided otherwise."""
    guess = COSTS | {"floor": 0.5, "per_prefill_token": 1e-5}
    assert read_run(run_directory(tmp_path)).setting().believed is None, "an older run does not say it"
    setting = read_run(run_directory(tmp_path, {"believed": guess})).setting()
    assert setting.believed == CostModel(**guess)
    cluster = Cluster(setting, seed=0)
    assert cluster.control.settings.cost.floor == 0.5
    assert {rollout.engine.instance.cost.floor for rollout in cluster.rollouts} == {0.002}


@pytest.mark.parametrize("believed", [3, {}, {"floor": 1.0}, dict.fromkeys([*COSTS, "per_prefill_token"], 0.0)])
def test_a_belief_that_is_none_is_one_line(tmp_path: Path, believed: Any) -> None:
    with pytest.raises(ConfigError, match=r"believed is .* give the file as the run wrote it"):
        read_run(run_directory(tmp_path, {"believed": believed}))


def test_alone_is_cpu_seconds_of_what_teaches(tmp_path: Path) -> None:
    run = read_run(run_directory(tmp_path))
    setting = alone(run)
    assert setting.rollout.floor == pytest.approx(0.001), "instances had half of a core"
    assert setting.trainer_fixed_s == pytest.approx(0.05), "and so had the trainer"
    assert setting.trainer_per_token_gpu_s == pytest.approx(0.0005)
    assert (setting.cycle_s, setting.push_s) == (0.05, 0.03), "waiting takes as long"


def test_groups_are_asked_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    run = read_run(run_directory(tmp_path))
    source = run.setting().workload.source
    assert isinstance(source, Trace)
    assert source.outputs[:2] == ((30, 30), (50, 50)), "prompt 0 was trained after prompt 1"
    assert [teaches(run)(prompt) for prompt in (0, 1, 2, 24, 25)] == [False, True, False, False, True]


@pytest.mark.parametrize("missing", ["prompts", "signal"])
def test_without_knowing_which_groups_teach_all_of_them_cost(tmp_path: Path, missing: str) -> None:
    nothing: dict[str, Any] = {missing: []}
    run = read_run(run_directory(tmp_path, None, **nothing))
    assert run.training.per_taught_token_s == 0
    assert teaches(run)(0)
    assert alone(run).trainer_per_token_gpu_s == pytest.approx(0.5 * run.training.per_token_s)


def test_a_run_without_cpu_times_cannot_be_alone(tmp_path: Path) -> None:
    run = read_run(run_directory(tmp_path, {"instance_cpu_share": None}))
    with pytest.raises(ConfigError, match="does not say what CPU time"):
        alone(run)


def test_few_steps_cost_by_the_token_alone() -> None:
    steps = [{"tokens": 90, "prompt_tokens": 10, "train_s": 1.0}, {"tokens": 190, "prompt_tokens": 10, "train_s": 3.0}]
    found = training_costs(steps)
    assert (found.per_token_s, found.fixed_s, found.per_taught_token_s) == (pytest.approx(4 / 300), 0.0, 0.0)


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=20), st.floats(0.01, 10), st.floats(1e-3, 1))
def test_a_line_is_found_again(sizes: list[float], fixed: float, slope: float) -> None:
    found_fixed, found_slope, miss = line(sizes, [fixed + slope * size for size in sizes])
    if max(sizes) - min(sizes) > 1:
        assert (found_fixed, found_slope) == (pytest.approx(fixed, rel=1e-3, abs=1e-3), pytest.approx(slope, rel=1e-3))
    assert miss == pytest.approx(0, abs=1e-6) or max(sizes) - min(sizes) <= 1


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0.01, 10)), min_size=1, max_size=20))
def test_no_step_and_no_token_costs_less_than_nothing(points: list[tuple[float, float]]) -> None:
    fixed, slope, _ = line([size for size, _ in points], [seconds for _, seconds in points])
    assert fixed >= 0
    assert slope > 0


@pytest.mark.parametrize(
    ("summary", "changes", "said"),
    [
        ({"pull_s": -1}, {}, "pull_s is -1"),
        ({"reward_s": "long"}, {}, "reward_s is 'long'"),
        ({"strategies": 3}, {}, "strategies is 3"),
        ({}, {"prompts": 7}, "step 1: prompts is 7"),
        ({}, {"prompts": ["a"]}, "step 1: prompts is ['a']"),
        ({}, {"signal": [1, 0]}, "step 1: signal is [1, 0]"),
    ],
)
def test_what_cannot_be_true_is_one_line(
    tmp_path: Path, summary: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(run_directory(tmp_path, summary, **changes)).setting()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strategy_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    run = read_run(run_directory(tmp_path, {"strategies": {"consume": "never"}}))
    with pytest.raises(ConfigError, match=r"strategies\.consume=never: write one of stream, batch"):
        run.setting()
