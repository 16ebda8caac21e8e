"""``staleflow compare`` as a person or a script meets it: what it prints, writes and refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staleflow.cli import main
from staleflow.simulate.setting import preset
from staleflow.study import parallel
from staleflow.study.compare import Comparison, Row, first_counted, half_width, simulate
from staleflow.study.peers import POLICIES, STALEFLOW, chosen
from staleflow.study.result import speed
from tests.refusals import without_progress

SMALL = ("--instances", "6", "--groups", "8", "--group-size", "4", "--steps", "6", "training_gpus=8")

NAMES = [
    "policy", "staleness", "seeds", "rollout_gpus", "training_gpus", "trained_tokens_per_s", "ci95", "vs_synchronous",
    "vs_best_bounded", "percent_of_limit", "percent_of_law", "violations", "max_staleness", "mean_staleness",
    "wasted_fraction", "trainer_idle", "instance_idle", "length_shift", "lost_groups", "repeated_groups",
    "wall_s_per_step",
]  # fmt: skip


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compare", "--json", "--jobs", "1", *SMALL, *arguments]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    return json.loads(printed.out)


def test_the_object_has_the_names_that_outside_checks_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(capsys, "--policies", "all", "--staleness", "1,2", "--seeds", "2")
    assert list(result) == ["preset", "limit_tokens_per_s", "rows", "notes"]
    assert result["preset"] == "paper-14b"
    assert "change roles in 15 s of each step: give cluster.reshard_s" in result["notes"][0]
    rows = result["rows"]
    assert [(row["staleness"], row["policy"]) for row in rows] == [(b, name) for b in (1, 2) for name in POLICIES]
    for row in rows:
        assert list(row)[: len(NAMES)] == NAMES
        assert row["seeds"] == 2
        assert row["ci95"] >= 0
        assert row["lost_groups"] == row["repeated_groups"] == 0
        assert (row["violations"] == 0) or row["policy"].startswith("quota")
        assert row["percent_of_limit"] == pytest.approx(
            100 * row["trained_tokens_per_s"] / result["limit_tokens_per_s"]
        )
        assert all(0 <= share <= 1 for idle in ("trainer_idle", "instance_idle") for share in row[idle].values())
        assert sum(row["staleness_histogram"].values()) == pytest.approx(1)
    by_name = {row["policy"]: row for row in rows if row["staleness"] == 2}
    assert by_name["synchronous"]["vs_synchronous"] == 1
    assert (by_name["synchronous"]["rollout_gpus"], by_name["synchronous"]["training_gpus"]) == (14, 14)
    bounded = [row for row in by_name.values() if not row["violations"] and row["policy"] != "staleflow"]
    assert max(row["vs_best_bounded"] for row in bounded) == pytest.approx(1)


def test_what_has_no_reference_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = compare(capsys, "--policies", "staleflow", "--seeds", "1")["rows"]
    assert row["vs_synchronous"] is row["vs_best_bounded"] is row["ci95"] is None
    assert row["staleness"] == 2


def test_equal_calls_give_equal_rows_and_seeds_pair_policies(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("--policies", "staleflow,window_wait", "--seeds", "2", "--seed", "5")
    first, again = compare(capsys, *call), compare(capsys, *call)
    for row in first["rows"] + again["rows"]:
        del row["wall_s_per_step"]
    assert first == again
    alone = compare(capsys, "--policies", "window_wait", "--seeds", "1", "--seed", "6")["rows"][0]
    assert alone["hashes"] == first["rows"][1]["hashes"][1:]


def test_the_split_is_tuned_within_the_same_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("--policies", "staleflow,psrl_default,synchronous", "--seeds", "1", "--tune-split", "--gpus", "14")
    for row in compare(capsys, *call)["rows"]:
        shared = row["policy"] == "synchronous"
        assert row["rollout_gpus"] + row["training_gpus"] == (28 if shared else 14)


def test_tuning_tries_as_many_splits_for_every_policy() -> None:
    setting = replace(preset("paper-14b"), groups=4, group_size=2, steps=3)
    started: list[str] = []
    comparison = Comparison(setting, chosen("staleflow,quota"), [1], [1], tune=True, on_run=started.append)
    comparison.rows()
    tried = [sum(each.startswith(name) and "seed 9" in each for each in started) for name in ("stale", "quota")]
    assert all(4 <= count <= 6 for count in tried)


def test_nothing_is_simulated_twice() -> None:
    setting = replace(preset("paper-14b"), instances=6, training_gpus=8, groups=4, group_size=2, steps=3)
    started: list[str] = []
    comparison = Comparison(setting, chosen("synchronous,one_step"), [1, 2], [1, 2], on_run=started.append)
    comparison.rows()
    assert len(started) == 4, "neither uses more of the bound than 1"
    Comparison(setting, chosen("one_step"), [1, 2], [1, 2], on_run=started.append, runs=comparison.runs).rows()
    assert len(started) == 4, "what was run before is known"


def test_rows_and_runs_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(preset("paper-14b"), instances=6, training_gpus=8, groups=4, group_size=2, steps=3)

    def compared(runs: dict[str, Row], jobs: int) -> tuple[list[Row], list[str]]:
        started: list[str] = []
        policies = chosen("staleflow,synchronous,one_step,quota")
        found = Comparison(setting, policies, [1, 2], [1, 2], True, on_run=started.append, runs=runs, jobs=jobs).rows()
        return [{name: value for name, value in row.items() if name != "wall_s_per_step"} for row in found], started

    alone: dict[str, Row] = {}
    shared: dict[str, Row] = {}
    rows, started = compared(alone, jobs=1)
    same, again = compared(shared, jobs=2)
    assert same == rows
    assert shared.keys() == alone.keys()
    assert len(again) == len(started) == len(alone), "nothing is simulated twice"
    monkeypatch.delattr(parallel, "_Pool")
    assert compared(shared, jobs=2) == (same, []), "what is known starts nothing"


def test_the_pipeline_breaks_a_bound_of_0(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compare(capsys, "--policies", "one_step,staleflow,synchronous", "--staleness", "0", "--seeds", "1")["rows"]
    assert [bool(row["violations"]) for row in rows] == [True, False, False]


def test_a_row_of_compare_is_that_of_simulate_but_for_the_trimmed_start(capsys: pytest.CaptureFixture[str]) -> None:
    (ours,) = compare(capsys, "--policies", "staleflow", "--seeds", "1")["rows"]
    assert main(["simulate", "--json", *SMALL]) == 0
    single = json.loads(capsys.readouterr().out)
    assert ours["hashes"] == [single["hash"]]
    for name in ("violations", "max_staleness", "mean_staleness", "wasted_fraction", "length_shift", "instance_idle"):
        assert ours[name] == pytest.approx(single[name])


def test_tables_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "compare.svg"
    call = ("--policies", "staleflow,quota,discard", "--staleness", "1,2", "--seeds", "1", "--picture", str(path))
    assert main(["compare", "--jobs", "1", *SMALL, *call]) == 0
    text = capsys.readouterr().out
    for word in ("bound 1", "bound 2", "staleflow", "discard", "over age", "No-bubble limit", "% law", "shift"):
        assert word in text
    picture = path.read_text()
    texts = [each.text or "" for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("text")]
    assert sum("staleness bound (dashed" in each for each in texts) == 1, "the chart"
    assert [each.split(", ")[1] for each in texts if "seed 0:" in each] == ["staleflow", "discard"], "and timelines"


def test_a_whole_number_of_cycles_is_measured_after_the_start() -> None:
    assert [first_counted(20, bound) for bound in (0, 1, 2, 3)] == [5, 5, 7, 7]
    for steps in range(1, 40):
        for bound in range(5):
            first = first_counted(steps, bound)
            assert first >= bound + 1
            assert (steps - 1 - first) % (bound + 1) == 0 or steps - 1 - first <= bound
    cycling = [(10.0 * step + (30.0 if step % 2 else 0.0), 100) for step in range(20)]
    assert speed(cycling, first_counted(20, 1)) == pytest.approx(10)
    assert speed(cycling, 30) == pytest.approx(2_000 / cycling[-1][0]), "too short: all of it"


def test_half_a_confidence_interval_is_students() -> None:
    assert half_width([1.0]) is None
    assert half_width([1.0, 3.0]) == pytest.approx(12.706)
    assert half_width([2.0] * 40) == 0


def test_lengths_of_the_paper_can_be_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    limits = [
        compare(capsys, "--policies", "staleflow", "--seeds", "1", f"lengths={name}", "--steps", "2")[
            "limit_tokens_per_s"
        ]
        for name in ("independent", "long")
    ]
    assert limits[0] != limits[1]


def test_faults_happen_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    calm, rough = (
        compare(capsys, "--policies", "staleflow", "--seeds", "1", "--faults", count)["rows"][0] for count in "06"
    )
    assert calm["hashes"] != rough["hashes"]
    assert rough["violations"] == rough["lost_groups"] == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--policies nope", "policy 'nope' is unknown; choose from staleflow"),
        ("--policies window_wai", "did you mean window_wait?"),
        ("--policies ,", "--policies is empty"),
        ("policy=quota", "policy is now the option --policy of simulate, or --policies of compare"),
        ("--staleness 1,x", "give such as 1,2,3"),
        ("--staleness -1", "staleness=-1 is too low: give 0 or more"),
        ("--staleness 1 staleness=2", "staleness is given twice"),
        ("--seeds 0", "--seeds 0 is impossible"),
        ("--jobs 0", "--jobs 0 is impossible: give 1 or more"),
        ("--jobs all", "invalid int value: 'all'"),
        ("--faults 3", "--faults 3 is impossible for synchronous"),
        ("redundancy=2", "redundancy=2 is impossible for synchronous"),
        ("--gpus 1", "--gpus 1 are too few"),
        ("--gpus 40", "are 14 GPUs, not --gpus 40: leave one of the three out"),
        ("lengths=long scale=2", "cluster.lengths=long says what scale=2 is: leave one out"),
        ("lengths=nope", "cluster.lengths=nope: write one of independent, correlated, long"),
        ("--trace bad.csv", "bad.csv: line 3: output_tokens is '-5'"),
        ("--trace gap.csv", "gap.csv: line 2: output_tokens is missing"),
        ("--trace bad.csv lengths=long", "cluster.lengths has no meaning with a trace"),
        ("--picture out.png", "give a name that ends in .svg"),
        ("--policy quota", "unrecognized arguments: --policy"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("prompt_tokens,output_tokens\n5,7\n5,-5\n")
    Path("gap.csv").write_text("prompt_tokens,output_tokens\n5,\n")
    try:
        code = main(["compare", *SMALL, *arguments.split()])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("staleflow: error: ")
    assert printed.err.count("\n") == 1
    assert line in printed.err


def test_an_instance_on_more_gpus_than_there_are_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--preset", "paper-32b", "--gpus", "40", "training_gpus=40"]) == 2
    assert "cluster.training_gpus=40 of 40 leaves no instance of 2 GPUs: give 1 to 38" in capsys.readouterr().err


def test_a_run_is_a_plain_row() -> None:
    setting = replace(preset("paper-14b"), instances=4, training_gpus=4, groups=4, group_size=2, steps=3)
    json.dumps(simulate(STALEFLOW, setting, 1))
