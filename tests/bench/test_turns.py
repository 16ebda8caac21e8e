"""Processes that have one card in turn, and the prices of their steps."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import simulated  # noqa: E402
from bench.gpu.turns import SWITCH_S, CardCluster, Passes, slice_for, trainers_share  # noqa: E402
from staleflow.coordinator.cost import CostModel  # noqa: E402
from staleflow.simulate.cluster import Cluster  # noqa: E402
from staleflow.simulate.lengths import Constant, Lognormal  # noqa: E402
from staleflow.simulate.setting import Setting, preset  # noqa: E402
from staleflow.simulate.workload import Sampled, Workload  # noqa: E402

DECODING_S = 0.001


def setting(step_s: float = DECODING_S, **changes: Any) -> Setting:
    """Decoding steps that take the same however many run; the trainer always has something to do."""
    costs = CostModel(floor=step_s, base=0.0, per_sequence=0.0, fixed=0.0, per_context_token=0.0, per_prefill_token=0.0)
    small: dict[str, Any] = {
        "groups": 4, "group_size": 4, "instances": 1, "training_gpus": 1, "steps": 8, "staleness": 2,
        "kv_tokens": 20_000, "max_running": 64, "trainer_per_token_gpu_s": 2e-4, "trainer_fixed_s": 0.0,
        "push_s": 0.0, "reward_s": 0.0, "cycle_s": 0.01, "weight_bytes": 1.0, "rollout": costs,
        "workload": Workload(Sampled(Constant(200), prompt=Constant(16)), max_tokens=2_000),
    }  # fmt: skip
    return replace(preset("paper-14b"), **small | changes)


def ran(setting: Setting, slice_s: float | None, passes: Passes | None = None) -> CardCluster:
    cluster = CardCluster(setting, 0, slice_s, passes)
    cluster.run()
    return cluster


@pytest.mark.parametrize("bound", [0, 2])
def test_with_a_card_for_everyone_nobody_waits(bound: int) -> None:
    plain = Cluster(setting(staleness=bound), 0)
    plain.run()
    cluster = ran(setting(staleness=bound), None)
    assert [mark.time for mark in cluster.marks] == pytest.approx([step.time for step in plain.recorder.steps])
    assert cluster.recorder.token_staleness == plain.recorder.token_staleness
    assert trainers_share(cluster) == pytest.approx(1.0, rel=0.01)


def test_a_short_step_takes_less_from_the_trainer_than_a_long_one() -> None:
    """A share of the card that is always the same lets versions come too early while many sequences run."""
    slice_s = 0.002
    for step_s in (0.0005, 0.001, 0.02):
        busy = setting(step_s, trainer_per_token_gpu_s=1e-5)  # the instance is never idle for long
        share = slice_s / (slice_s + min(step_s, slice_s) + 2 * SWITCH_S)
        assert trainers_share(ran(busy, slice_s)) == pytest.approx(share, abs=0.05)


def test_an_instance_waits_a_slice_for_every_step_beside_a_trainer() -> None:
    slow = setting(steps=2, staleness=1, trainer_per_token_gpu_s=0.01)
    beside, apart = (ran(slow, slice_s).rollouts[0].engine.instance for slice_s in (0.002, None))
    assert beside.generated_tokens >= apart.generated_tokens * 0.9
    most = (DECODING_S + 0.002 + 2 * SWITCH_S) / DECODING_S
    assert 1.2 < beside.busy_seconds / apart.busy_seconds <= most * 1.05


def test_the_slice_is_found_again_from_the_trainers_share() -> None:
    wanted = setting(trainer_per_token_gpu_s=0.001)
    share = trainers_share(ran(wanted, 0.003))
    assert trainers_share(ran(wanted, slice_for(wanted, share))) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("bound", [0, 1])
def test_passes_that_cost_nothing_change_nothing(bound: int) -> None:
    """Tokens are worked off in the order in which they come, unless groups wait for others."""
    wanted = setting(staleness=bound, groups=8)
    fluid, passes = (ran(wanted, 0.002, how) for how in (None, Passes(0.0, 16_384, at_once=True)))
    assert [mark.time for mark in passes.marks] == pytest.approx([mark.time for mark in fluid.marks], rel=0.01)
    assert passes.marks[-1].tokens == fluid.marks[-1].tokens


def test_groups_that_gather_cost_few_passes() -> None:
    wanted = setting(staleness=1, groups=16, trainer_per_token_gpu_s=1e-6)
    lengths = Workload(Sampled(Lognormal(200, 1.5), prompt=Constant(16)), max_tokens=2_000)
    wanted = replace(wanted, workload=lengths)
    once, gathered = (ran(wanted, 0.002, Passes(0.02, 16_384, at_once)) for at_once in (True, False))
    assert gathered.marks[-1].tokens == once.marks[-1].tokens
    assert gathered.marks[-1].time < once.marks[-1].time
    busy_s = [each.marks[-1].time - each.marks[-1].trainer_idle_s for each in (once, gathered)]
    assert busy_s[1] < 0.7 * busy_s[0]


def test_prices_between_and_beyond_what_was_measured() -> None:
    line = ((1, 1.0), (3, 2.0), (4, 4.0))
    assert [simulated.between(line, size) for size in (0, 1, 2, 3, 3.5, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0]


def cells() -> dict[str, Any]:
    """Decoding that bends at 8 sequences, and prefill that does not rise evenly."""
    one = {1: 0.5, 8: 0.6, 32: 0.95, 256: 1.2}
    found: dict[str, Any] = {
        f"m {n} x {context} few": {"ms": ms + 4e-6 * n * context} for n, ms in one.items() for context in (256, 1024)
    }
    found |= {f"m prefill {tokens}": {"with_ms": 1 + ms, "without_ms": 1.0} for tokens, ms in ((32, 1.0), (2048, 11.0))}
    return {"what": "cells of two calls", "call 1": found, "call 2": {"m 1 x 256 plain": {"ms": 9.0}}}


def test_decoding_with_a_bend_is_priced_as_it_was_measured() -> None:
    price = simulated.priced(cells(), "m", 1e-6)
    for name, cell in simulated.named(cells()):
        if name.endswith("few"):
            running, context = (int(each) for each in name.split()[1:4:2])
            assert 1e3 * price.step(running, running * context) == pytest.approx(cell["ms"], rel=0.03)
    assert 1e3 * (price.step(8, 0, 1040) - price.step(8, 0)) == pytest.approx(6.0), "half-way from 32 to 2,048"
    assert price.steps(3, 8, 100, 32) == pytest.approx(sum(price.step(8, 100 + 8 * at, 32) for at in range(3)))


def test_the_last_of_the_same_cells_counts() -> None:
    again = {"call 3": {"m 8 x 256 few": {"ms": 0.9}, "m 8 x 1024 few": {"ms": 0.9 + 4e-6 * 8 * 768}}}
    prices = [simulated.priced(each, "m", 1e-6) for each in (cells(), cells() | again, again | cells())]
    first, later, earlier = (1e3 * price.step(8, 8 * 256) for price in prices)
    assert (first, later) == (pytest.approx(0.608, abs=0.02), pytest.approx(0.9, abs=0.02))
    assert earlier == first


def test_what_decoding_takes_beside_a_prefill_is_a_price_too() -> None:
    beside = {"m prefill 512": {"with_ms": 9.0, "without_ms": 1.3}}
    price = simulated.priced({**cells(), "m prefill 32": beside["m prefill 512"], **beside}, "m", 1e-6)
    assert 1e3 * price.step(64, 64 * 512) == pytest.approx(1.2), "the mean of 1.3, 1.0 and 1.3"
    assert 1e3 * price.step(32, 32 * 256) == pytest.approx(0.983, rel=0.03)


def test_a_step_with_prefill_that_is_no_graph_costs_its_launches() -> None:
    price = simulated.priced(cells(), "m", 1e-6, launches=0.018)
    assert price.step(8, 0, 4000) - price.step(8, 0) == pytest.approx(0.022)


def test_what_the_worker_does_between_two_steps_is_not_forgotten() -> None:
    made: list[list[Any]] = [
        [0.0, 1.0, "pull", 0, 0, 0],
        [0.01, 90.0, "not ahead", 8, 0, 64],
        [0.2, 1.0, "pull", 0, 0, 1],
    ]
    made += [[0.201 + 0.0012 * at, 1.0, "ahead", 8, 0, 64] for at in range(50)]
    made += [[9.0, 1.0, "ahead", 1, 0, 8], [9.5, 5.0, "prefill", 1, 64, 8], [9.6, 0.9, "ahead", 2, 0, 16]]
    eight, one = simulated.decoding_in(made)
    assert eight.running == 8
    assert eight.seconds == pytest.approx(0.0012, rel=0.02), "the first steps and the wait for work do not count"
    assert one.seconds == pytest.approx(0.002), "half a second without work is not the price of a step"


def test_without_a_run_of_bound_2_another_says_how_the_card_is_shared(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2-stream"):
        simulated.contended(made(tmp_path, "0-batch"))
    assert simulated.contended(made(tmp_path, "1-batch", "1-batch.run")).name == "1-batch"
    assert simulated.contended(made(tmp_path, "3-batch", "2-stream")).name == "2-stream"


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
    return folder


def test_results_of_several_days_are_read_and_runs_of_another_kind_are_not() -> None:
    row, head = {"steps": 3}, "skewed m, 1 x rollout, bound"
    found = {
        "2026-11-18": {"run": {"date": ""}, f"{head} 1, batch": row},
        f"{head} 2, stream": row,
        f"{head} 2, stream (traced)": row,
        "skewed m on vllm, 1 x rollout, bound 3, stream": row,
    }
    assert simulated.written(found, "m", 1) == {"1-batch": row, "2-stream": row}


def test_runs_of_which_only_results_are_left_are_predicted_by_a_few_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, values: Any) -> str:
        (tmp_path / name).write_text(json.dumps(values))
        return str(tmp_path / name)

    row = {"steps": 4, **dict.fromkeys(simulated.METRICS, 1.0)}
    names = ("0, batch", "1, batch", "2, stream")
    day = {f"skewed tiny, 1 x rollout, bound {name}": row for name in names}
    tiny = {name.replace("m ", "tiny ", 1): cell for name, cell in cells()["call 1"].items()}
    other = {f"tiny {n} x {context} few": {"ms": 900.0} for n in (1, 8) for context in (256, 1024)}
    figures = {"train_us": 20.0, "share": 0.6, "prefill_us": 2.0, "settings": ["cluster.push_s=0.3"]}
    given = ["--figures", written("figures", figures), "--shape", "tiny", "--lengths", "8", "32", "8"]
    given += ["--tail", written("tail", {"call 1": tiny, "call 2": other}), "--without", "call 2"]
    given += ["--measured", written("system", {"one day": day, "another": {}})]
    rows = simulated.main([*given, "--section", "one day"])
    assert list(rows) == ["0-batch", "1-batch", "2-stream"]
    assert all(set(ways) == {"in turn", "as if alone"} for ways in rows.values())
    step_s = rows["0-batch"]["in turn"]["step_s"]["predicted"]
    assert 0.3 < step_s < 1.0, "the push is among the settings, and the other engine's steps are not"
    slow = figures | {"decoding": [[1, 8, 0.02], [8, 64, 0.02]]}
    rest, kept = [*given[2:], "--section", "one day"], str(tmp_path / "kept")
    slower = simulated.main(["--figures", written("slow", slow), *rest, "--keep-figures", kept])
    assert slower["0-batch"]["in turn"]["step_s"]["predicted"] > step_s + 0.3
    assert simulated.main(["--figures", kept, *rest]) == slower
    capsys.readouterr()
    passes = simulated.main([*given, "--section", "one day", "--pass-s", "0.1", "--at-once"])
    alone = 20.0 - 1e5 / 16_384
    assert f"training alone: {alone:.2f} us a token" in capsys.readouterr().err, "the 20 were measured in full passes"
    assert all({"in turn", "as if alone", "gathered"} == set(ways) for ways in passes.values())
    streamed = {way: figures["step_s"]["predicted"] for way, figures in passes["2-stream"].items()}
    assert streamed["gathered"] < streamed["in turn"], "few passes, in the same slices"
    gathered = simulated.main([*given, "--section", "one day", "--pass-s", "0.1"])
    assert "gathered" not in gathered["2-stream"], "that is how they are"
    with pytest.raises(SystemExit, match="2-stream"):
        simulated.main([*given, "--section", "another"])
