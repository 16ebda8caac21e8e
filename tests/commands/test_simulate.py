"""``staleflow simulate`` as a person or a script meets it: what it prints, writes and refuses."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staleflow.cli import main
from staleflow.runtime.control import StalledError
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.setting import preset
from staleflow.study.result import busy_seconds, distance
from staleflow.study.timeline import LANES, SAMPLES, Timeline, draw
from tests.refusals import refused_command, without_progress

SMALL = ("--instances", "8", "--groups", "8", "--group-size", "4", "--steps", "4")

NAMES: dict[type, str] = {
    str: "policy hash",
    int: "staleness rollout_gpus training_gpus violations max_staleness lost_groups repeated_groups",
    float: "trained_tokens_per_s mean_staleness wasted_fraction length_shift wall_s_per_step",
    dict: "staleness_histogram wasted trainer_idle instance_idle",
}


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The row of a small run."""
    assert main(["simulate", "--json", *SMALL, *arguments]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    return json.loads(printed.out)


# The row


def test_the_row_has_the_names_that_outside_checks_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    row = simulate(capsys)
    for kind, names in NAMES.items():
        assert {name: type(row[name]) for name in names.split()} == dict.fromkeys(names.split(), kind)
    assert row["policy"] == "staleflow"
    assert (row["rollout_gpus"], row["training_gpus"], row["staleness"]) == (8, 40, 2)
    assert (row["violations"], row["lost_groups"], row["repeated_groups"]) == (0, 0, 0)


def test_the_numbers_of_the_row_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    row = simulate(capsys, "redundancy=4", "extra_members=2", "--seed", "3")
    histogram = {int(age): count for age, count in row["staleness_histogram"].items()}
    tokens = sum(histogram.values())
    assert tokens == row["trained_tokens"]
    assert row["max_staleness"] == max(histogram) <= row["staleness"]
    assert row["mean_staleness"] == pytest.approx(sum(age * count for age, count in histogram.items()) / tokens)
    wasted = sum(row["wasted"].values())
    assert row["wasted"]["surplus"] > 0
    assert row["wasted_fraction"] == pytest.approx(wasted / (tokens + wasted))
    for idle in (row["trainer_idle"], row["instance_idle"]):
        assert all(0 <= share <= 1 for share in idle.values())
        assert sum(idle.values()) < 1


def test_equal_seeds_give_equal_rows_and_other_seeds_other_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (simulate(capsys, "--seed", seed) for seed in ("1", "1", "2"))
    for row in (first, again):
        del row["wall_s_per_step"]
    assert first == again
    assert other["hash"] != first["hash"]


def test_dropping_the_longest_members_shows_as_a_length_shift(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(capsys)["length_shift"] < 0.01
    assert simulate(capsys, "extra_members=3")["length_shift"] > 0.2


def test_distance_is_the_mean_difference_of_quantiles() -> None:
    assert distance([1, 2, 3], [3, 1, 2]) == 0
    assert distance([1, 2, 3], [11, 12, 13]) == pytest.approx(10)
    assert distance([0, 10], [5]) == pytest.approx(5)


def test_the_last_unfinished_segment_counts_as_busy() -> None:
    cluster = small_cluster()
    cluster.run()
    now = cluster.loop.time()
    for rollout in cluster.rollouts:
        counted = busy_seconds(rollout.engine.instance, now)
        engine = copy.deepcopy(rollout.engine.instance)
        engine.crash(now)  # counts what is under way, to the second
        assert counted == pytest.approx(engine.busy_seconds, abs=0.2)


# Options and overrides


def test_an_override_changes_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    stream, batch = simulate(capsys), simulate(capsys, "consume=batch")
    assert batch["hash"] != stream["hash"]
    assert batch["simulated_s"] > stream["simulated_s"]


def test_overrides_and_options_may_be_mixed_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    row = simulate(capsys, "training_gpus=16", "--staleness", "1", "mu=0.3", "prompts=null", "filter=none")
    assert (row["training_gpus"], row["staleness"]) == (16, 1)


def test_settings_of_the_workload_can_be_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    short = simulate(capsys, "max_tokens=50", "kv_tokens=4096")
    assert short["trained_tokens"] <= 8 * 4 * 4 * 50


def test_the_table_says_what_the_row_says(capsys: pytest.CaptureFixture[str]) -> None:
    row = simulate(capsys, "--seed", "5")
    assert main(["simulate", *SMALL, "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("paper-14b, seed 5: 4 steps of 8 groups x 4, staleness up to 2")
    table = {line[:16].strip(): line[16:] for line in lines[2:]}
    assert table["hash"] == row["hash"]
    assert table["throughput"].startswith(f"{row['trained_tokens_per_s']:,.0f} trained tokens/s")
    assert table["violations"].startswith("0 ")
    assert max(map(len, lines)) <= 120


def test_faults_are_part_of_the_run_and_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    calm, first, again = simulate(capsys), simulate(capsys, "--faults", "5"), simulate(capsys, "--faults", "5")
    assert first["hash"] == again["hash"] != calm["hash"]
    assert (first["violations"], first["lost_groups"], first["repeated_groups"]) == (0, 0, 0)


# Traces


def test_a_trace_is_trained_with_the_lengths_it_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{100 + group},{10 * (group + 1) + member},g{group}" for group in range(5) for member in range(4)]
    trace.write_text("\n".join(["prompt_tokens,output_tokens,group", *rows]) + "\n")
    row = simulate(capsys, "--trace", str(trace), "kv_tokens=1024", "max_tokens=200")
    lengths = [10 * (prompt % 5 + 1) + member for prompt in range(8 * 4) for member in range(4)]
    assert row["trained_tokens"] == sum(lengths)
    assert row["length_shift"] == 0
    assert (row["lost_groups"], row["repeated_groups"]) == (0, 0)


def test_a_cap_that_cuts_recorded_lengths_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n10,20\n10,20\n10,20\n10,90\n")
    row = simulate(capsys, "--trace", str(trace), "max_tokens=50")
    assert row["trained_tokens"] == 8 * 4 * (3 * 20 + 50)
    assert row["notes"][0].startswith("rollout.max_tokens=50 cuts off 25.0% of the recorded responses")


def test_a_trace_without_prompt_lengths_says_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("output_tokens\n20\n20\n20\n20\n")
    longer, shorter = (simulate(capsys, "--trace", str(trace), *more) for more in ((), ("prompt_tokens=64",)))
    assert any(note.endswith("give cluster.prompt_tokens") for note in longer["notes"])
    assert not any("prompt_tokens" in note for note in shorter["notes"])
    assert longer["trained_tokens"] == shorter["trained_tokens"] == 8 * 4 * 4 * 20
    assert longer["simulated_s"] > shorter["simulated_s"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prompt_tokens,output_tokens\n10,-5\n", "line 2: output_tokens is '-5'"),
        ("prompt_tokens,output_tokens\n-1,5\n", "line 2: prompt_tokens is '-1'"),
        ("prompt_tokens,output_tokens\n10,20\n10,\n", "line 3: output_tokens is missing"),
        ("prompt_tokens\n10\n", "no column output_tokens"),
        ("", "the file is empty"),
        ("prompt_tokens,output_tokens\n300000,10\n", "kv_tokens=289000 cannot hold the longest trajectory of 300010"),
        ("prompt_tokens,output_tokens\n300000,10\n", "give 300272 or more"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    assert line in refused(capsys, "--trace", str(trace))


# Refusals


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused_command(capsys, "simulate", *SMALL, *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--preset nope", "preset nope is unknown: choose one of laptop"),
        ("--policy nope", "policy 'nope' is unknown; choose from staleflow, synchronous, one_step"),
        ("policy=nope", "policy is now the option --policy of simulate"),
        ("routing=nope", "strategies.routing=nope: write one of waterfall"),
        ("consum=batch", "consum is unknown: write strategies.consume"),
        ("qqqq=1", "qqqq is unknown: choose one of model, seed, "),
        ("name=mine", "name is unknown"),
        ("batch", "preset batch is unknown: choose one of laptop"),
        ("mu=high", "strategies.mu=high: write a number"),
        ("mu=.nan", "strategies.mu=nan is not finite: give a number"),
        ("mu=3", "strategies.mu=3.0 is too high: give at most 1"),
        ("kv_tokens=1.5", "rollout.kv_tokens=1.5: write a whole number"),
        ("kv_tokens=99999999999999999999", "rollout.kv_tokens=99999999999999999999"),
        ("filter_uniform=maybe", "filter_uniform is now filter: write filter=no-signal"),
        ("mu=0.1 mu=0.2", "strategies.mu is given twice: give it once"),
        ("instances=4", "give --instances or rollout.instances=, not both"),
        ("--unknown 3", "unrecognized arguments: --unknown"),
        ("--seed one", "invalid int value: 'one'"),
        ("--steps 0", "steps=0 is too low: give 1 or more"),
        ("--instances 0", "rollout.instances=0 is too low"),
        ("training_gpus=0", "cluster.training_gpus=0 is too low: give 1 or more"),
        ("gpus_per_instance=0", "cluster.gpus_per_instance=0 is too low"),
        ("chunk=0", "chunk is now rollout.prefill_tokens"),
        ("prefill_tokens=0", "rollout.prefill_tokens=0 is too low"),
        ("--staleness -1", "staleness=-1 is too low: give 0 or more"),
        ("redundancy=8", "redundancy=8 drops a whole step for each that is trained: give at most 7"),
        ("extra_members=4", "extra_members=4 drops as much as group_size=4 keeps: give at most 3"),
        (
            "kv_tokens=100",
            "rollout.kv_tokens=100 cannot hold a prompt of 512 tokens, a response of",
        ),
        ("headroom=1000000", "strategies.headroom=1000000: give "),
        ("max_tokens=0", "rollout.max_tokens=0 is too low"),
        ("prompts=31", "cluster.prompts=31 are too few"),
        ("reward_success=2", "cluster.reward_success=2.0 is too high: give at most 1"),
        ("filter=no-signal reward_success=1", "filter=no-signal drops every group"),
        ("--faults -1", "--faults -1 is impossible: give 0 or more"),
        ("--trace nowhere.csv", "nowhere.csv"),
        ("--picture out.png", "give a name that ends in .svg"),
        ("--picture missing/out.svg", "give a file in a folder that exists"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments.split()
    if "--picture" not in words:
        words += ["--picture", "out.svg"]
    assert line in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_stuck_run_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(_: Cluster) -> None:
        raise StalledError("step 0 waits for group p0")

    monkeypatch.setattr(Cluster, "run", stuck)
    assert main(["simulate", *SMALL, "--picture", str(tmp_path / "out.svg")]) == 1
    printed = capsys.readouterr()
    assert without_progress(printed.err) == "staleflow: error: the run is stuck: step 0 waits for group p0\n"
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


# The picture


def small_cluster(instances: int = 8, **changes: Any) -> Cluster:
    return Cluster(
        replace(preset("paper-14b"), instances=instances, groups=8, group_size=4, steps=4, **changes), seed=1
    )


def test_the_picture_is_one_well_formed_file_and_does_not_change_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "run.svg"
    plain, drawn = simulate(capsys), simulate(capsys, "--picture", str(picture))
    assert plain["hash"] == drawn["hash"]
    assert list(tmp_path.iterdir()) == [picture]
    root = ElementTree.parse(picture).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"trainer", "i0", "i7", "simulated seconds", "4"} <= texts


def test_the_waits_in_the_picture_are_those_in_the_row() -> None:
    cluster = small_cluster(push_s=2.0)
    timeline = Timeline(cluster)
    cluster.run()
    timeline.end()
    drawn: dict[str, float] = {}
    for wait in timeline.waits:
        drawn[wait.cause] = drawn.get(wait.cause, 0.0) + wait.end - wait.start
    assert drawn == pytest.approx({cause: seconds for cause, seconds in cluster.trainer.idle.items() if seconds})
    ends = [wait.end for wait in timeline.waits]
    assert all(start >= end - 1e-9 for (start, _, _), end in zip(timeline.waits[1:], ends, strict=False))


def test_a_large_or_long_run_keeps_the_picture_small() -> None:
    cluster = small_cluster(instances=LANES + 9)
    timeline = Timeline(cluster)
    cluster.run()
    assert len(timeline.lanes) == LANES
    assert len(timeline.times) == len(timeline.levels) < SAMPLES
    assert f"{LANES + 9} instances ({LANES} shown)" in draw(timeline)


def test_watching_does_not_displace_another_watcher() -> None:
    cluster = small_cluster()
    seen: list[float] = []
    cluster.loop.on_instant = lambda: seen.append(cluster.loop.time())
    Timeline(cluster)
    cluster.run()
    assert len(seen) == cluster.loop.instants
