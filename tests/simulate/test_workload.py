"""Workloads: the right distribution, the same draw for the same trajectory, and one clear line for bad input."""

import csv
import gzip
import math
import pickle
import runpy
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev, variance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.simulate.lengths import (
    Bimodal,
    Constant,
    Distribution,
    Lognormal,
    PowerLaw,
    QuantileTable,
    Uniform,
    servegen_r1_output,
)
from staleflow.simulate.trace import Trace, read_trace
from staleflow.simulate.workload import Sampled, Workload

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "data" / "length-traces"
HISTOGRAM = TRACES / "servegen_r1_output_tokens_pmf.csv.gz"
needs_traces = pytest.mark.skipif(not HISTOGRAM.exists(), reason="the public traces are not next to this checkout")

ONE = Sampled(Constant(1))
DISTRIBUTIONS: list[tuple[Distribution, float]] = [
    (Constant(700), 700),
    (Uniform(10, 1000), 505),
    (Lognormal.from_mean(1500, cv=1.5), 1500),
    (PowerLaw(100, 2.5), 100 * 2.5 / 1.5),
    (Bimodal(200, 4000, long_share=0.1), 580),
    (Bimodal(200, 4000, long_share=0.0), 200),
    (Bimodal(200, 4000, long_share=1.0), 4000),
    (QuantileTable((0, 0.5, 1), (100, 100, 300)), 150),
    (servegen_r1_output(), 1527.42),
]


def servegen_r1(between: float = 0.0, *, scale: float = 1.0, max_tokens: int = 20_000, seed: int = 0) -> Workload:
    return Workload(Sampled(servegen_r1_output(), between=between, seed=seed), max_tokens=max_tokens, scale=scale)


def load_trace(path: Path, scale: float = 1.0, max_tokens: int = 1 << 20, **more: Any) -> Workload:
    return Workload(read_trace(path, **more), max_tokens=max_tokens, scale=scale)


def lengths(workload: Workload, prompts: int, samples: int) -> list[list[int]]:
    return [[workload.length(p, s) for s in range(samples)] for p in range(prompts)]


def between_share(groups: list[list[float]]) -> float:
    """One-way analysis of variance, balanced groups."""
    size = len(groups[0])
    within = fmean(variance(group) for group in groups)
    between = variance([fmean(group) for group in groups]) - within / size
    return between / (between + within)


@pytest.mark.parametrize(("distribution", "mean"), DISTRIBUTIONS, ids=lambda x: str(x)[:40])
def test_a_distribution_has_its_mean_and_rises_up_to_the_last_float(distribution: Distribution, mean: float):
    workload = Workload(Sampled(distribution, seed=3))
    assert workload.mean_tokens() == pytest.approx(mean, rel=1e-3)
    assert fmean(workload.length(p, 0) for p in range(10_000)) == pytest.approx(mean, rel=0.05)
    us = [1e-300, 1e-9, *(i / 200 for i in range(1, 200)), 1 - 1e-9, 1 - 2.0**-53]
    values = [distribution.quantile(u) for u in us]
    assert values == sorted(values)
    assert 0 < values[0] <= mean <= values[-1] < math.inf


@pytest.mark.parametrize("between", [0.0, 0.2, 0.7, 0.95, 1.0])
def test_the_share_of_variance_between_prompts_is_recovered(between: float):
    workload = Workload(Sampled(Lognormal(50_000, 1.0), between=between, seed=2))
    groups = lengths(workload, prompts=1500, samples=8)
    assert between_share([[math.log(x) for x in group] for group in groups]) == pytest.approx(between, abs=0.03)


@pytest.mark.parametrize("between", [0.0, 0.7, 1.0])
def test_correlation_within_prompts_leaves_the_overall_distribution_alone(between: float):
    distribution = Lognormal.from_mean(1500, cv=0.8)
    workload = Workload(Sampled(distribution, between=between, seed=4))
    drawn = sorted(x for group in lengths(workload, prompts=10_000, samples=2) for x in group)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.8, rel=0.03)
    for u in (0.1, 0.5, 0.9):
        assert drawn[int(u * len(drawn))] == pytest.approx(distribution.quantile(u), rel=0.05)


def test_draws_do_not_move_when_anything_else_does():
    base = Workload(Sampled(Lognormal(1000, 1.0), between=0.5, seed=9), max_tokens=8000)
    expected = [[base.length(p, s) for s in range(4)] for p in range(20)]
    backwards = [[base.length(p, s) for s in reversed(range(4))] for p in reversed(range(20))]
    assert [group[::-1] for group in backwards[::-1]] == expected
    longer = replace(base, max_tokens=16_000)
    assert all(min(longer.length(p, s), 8000) == expected[p][s] for p in range(20) for s in range(4))
    assert all(base.length(p, s, 0, version=5) == expected[p][s] for p in range(20) for s in range(4))


def test_another_attempt_sample_prompt_or_seed_is_another_draw():
    workload = Workload(Sampled(Lognormal(100_000, 1.0), between=0.5))
    reseeded = workload.with_seed(1)
    one = {workload.length(1, 2, 0), workload.length(1, 2, 1), workload.length(1, 3, 0), workload.length(2, 2, 0)}
    assert len(one | {reseeded.length(1, 2, 0)}) == 5
    alike = Workload(Sampled(Lognormal(100_000, 1.0), between=1.0))
    assert alike.length(1, 0, attempt=0) == alike.length(1, 5, attempt=3)


def test_lengths_do_not_change_between_releases():
    workload = servegen_r1(0.7, scale=4, seed=1)
    assert [workload.length(7, s, a) for s in range(3) for a in range(2)] == [2914, 1879, 1474, 1432, 1128, 1851]
    assert servegen_r1(seed=1).prompt_tokens(7) == 512


def test_the_cap_truncates_after_scaling():
    short = Workload(Sampled(Lognormal(1000, 1.0), seed=5))
    capped = replace(short, scale=4, max_tokens=6000)
    for p in range(300):
        exact = short.source.length(p, 0, 0) * 4
        assert capped.length(p, 0) == min(6000, round(exact))
    assert capped.mean_tokens() < 6000
    assert capped.mean_tokens() == pytest.approx(fmean(capped.length(p, 0) for p in range(20_000)), rel=0.02)


def test_lengths_drift_with_the_version_up_to_the_cap():
    workload = Workload(Sampled(Constant(1000)), max_tokens=2000, drift=0.01)
    assert [workload.length(0, 0, 0, version) for version in (0, 1, 10, 100)] == [1000, 1010, 1105, 2000]
    assert workload.mean_tokens(version=10) == pytest.approx(1105)
    assert replace(workload, drift=-0.5).length(0, 0, 0, 3) == 125


@given(
    st.sampled_from([*(known for known, _ in DISTRIBUTIONS), PowerLaw(1e12, 1e-9), Lognormal(1e12, 10)]),
    st.floats(0, 1),
    st.integers(1, 1 << 20),
    st.floats(1e-9, 1e12),
    st.floats(-0.99, 0.99),
    st.integers(0, 10**7),
    st.integers(0, 10**9),
)
def test_every_length_lies_between_one_and_the_cap(
    distribution: Distribution, between: float, cap: int, scale: float, drift: float, version: int, prompt: int
):
    workload = Workload(Sampled(distribution, between=between), max_tokens=cap, scale=scale, drift=drift)
    length = workload.length(prompt, 1, 2, version)
    assert isinstance(length, int)
    assert 1 <= length <= cap


def test_prompts_have_a_distribution_of_their_own():
    workload = Workload(Sampled(Constant(100), prompt=Uniform(100, 300), seed=1))
    drawn = [workload.prompt_tokens(p) for p in range(3000)]
    assert 100 <= min(drawn) < 110
    assert 290 < max(drawn) <= 300
    assert fmean(drawn) == pytest.approx(workload.mean_prompt_tokens(), rel=0.02)
    assert workload.mean_prompt_tokens() == pytest.approx(200, rel=1e-3)


def test_a_workload_travels_to_worker_processes():
    copy = pickle.loads(pickle.dumps(servegen_r1(0.5)))
    assert copy == servegen_r1(0.5)
    assert copy.length(3, 1) == servegen_r1(0.5).length(3, 1)


@needs_traces
def test_the_packaged_table_is_the_histogram_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with gzip.open(HISTOGRAM, "rt", encoding="utf-8") as lines:
        rows = [(float(row["value"]), float(row["probability"])) for row in csv.DictReader(lines)]
    table = servegen_r1_output()
    for cap in (20_000, 40_000):
        mean = sum(min(tokens, cap) * p for tokens, p in rows)
        assert servegen_r1(max_tokens=cap).mean_tokens() == pytest.approx(mean, rel=0.001)
    below, quantiles = 0.0, dict.fromkeys((0.1, 0.5, 0.9, 0.99, 0.999), 0.0)
    for tokens, p in rows:
        below += p
        quantiles = {u: tokens if not old and below >= u else old for u, old in quantiles.items()}
    for u, tokens in quantiles.items():
        assert table.quantile(u) == pytest.approx(tokens, rel=0.003)
    written = tmp_path / "table.csv"
    monkeypatch.setattr(sys, "argv", ["derive_lengths.py", str(HISTOGRAM), "--to", str(written)])
    runpy.run_path(str(ROOT / "scripts" / "derive_lengths.py"), run_name="__main__")
    packaged = ROOT / "staleflow" / "simulate" / "data" / "servegen_r1_output.csv"
    assert written.read_text() == packaged.read_text()


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_trace_without_prompt_lengths_is_read_with_the_length_that_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "output_tokens\n5\n7\n9\n")
    assert read_trace(path, group_size=2, prompt_tokens=30) == Trace((30, 30), ((5, 7), (9,)), has_prompts=False)
    named = write(tmp_path / "named.csv", "output_tokens,group\n5,a\n7,b\n9,a\n")
    assert read_trace(named, prompt_tokens=30) == Trace((30, 30), ((5, 9), (7,)), has_prompts=False)


GROUPED = "group,prompt_tokens,output_tokens\na,10,100\nb,20,200\na,10,110\n"


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_is_replayed_by_group_in_file_order(tmp_path: Path, name: str):
    workload = load_trace(write(tmp_path / name, GROUPED), group_size=99)
    assert workload.source == Trace((10, 20), ((100, 110), (200,)))
    assert lengths(workload, prompts=3, samples=3) == [[100, 110, 100], [200, 200, 200], [100, 110, 100]]
    assert [workload.prompt_tokens(p) for p in range(3)] == [10, 20, 10]
    assert workload.length(0, 1, attempt=4) == 110
    assert workload.mean_tokens() == pytest.approx((105 + 200) / 2)
    assert workload.mean_prompt_tokens() == pytest.approx(15)
    assert workload.with_seed(5) == workload


def test_a_trace_without_groups_takes_rows_in_a_row(tmp_path: Path):
    rows = "".join(f"{10 * i},{i}\n" for i in range(1, 6))
    path = write(tmp_path / "trace.csv", "prompt_tokens,output_tokens\n" + rows)
    assert load_trace(path, group_size=2).source == Trace((10, 30, 50), ((1, 2), (3, 4), (5,)))
    assert load_trace(path, group_size=2, scale=10, max_tokens=35).length(1, 1) == 35


def test_a_trace_from_elsewhere_is_read(tmp_path: Path):
    text = '\ufeffContextTokens , GeneratedTokens\r\n"10", 100\r\n\r\n20,200\r\n'
    assert load_trace(write(tmp_path / "t.csv", text), group_size=1).source == Trace((10, 20), ((100,), (200,)))


@needs_traces
def test_the_public_traces_are_read_as_they_are():
    azure = load_trace(TRACES / "azure_llm_2023_conv.csv", group_size=1)
    assert azure.mean_tokens() == pytest.approx(211, abs=0.5)
    assert azure.prompt_tokens(0) == 374
    mooncake = load_trace(TRACES / "mooncake_fast25_conversation.csv", group_size=1)
    assert mooncake.mean_tokens() == pytest.approx(343, abs=0.5)


NUMBER = ": write a whole number of tokens from 1 to 1000000000"
TWO = "prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty: write a header line prompt_tokens,output_tokens and then the rows"),
        (TWO, "the file holds no rows: write a header and one row for each trajectory"),
        (TWO + "1,2\n1,-5\n", "line 3: output_tokens is '-5'" + NUMBER),
        (TWO + "1,0\n", "line 2: output_tokens is '0'" + NUMBER),
        (TWO + "1\n", "line 2: output_tokens is missing" + NUMBER),
        (TWO + "1,many\n", "line 2: output_tokens is 'many'" + NUMBER),
        (TWO + "1," + "9" * 5000, "line 2: output_tokens is '" + "9" * 56 + "..." + NUMBER),
        (TWO + '1,"2\n3"\n', "line 3: output_tokens is '2\\n3'" + NUMBER),
        (TWO + "1,1,024\n", "line 2: more values than the 2 columns: write 1024, not 1,024"),
        ("prompt_tokens,len\n1,2\n", "line 1: no column output_tokens, only 'prompt_tokens,len': "
         "name it output_tokens in the header"),
        ("group," + TWO + ",1,2\n", "line 2: group is missing: write the name of the prompt the row belongs to"),
        ("group," + TWO + "a,1,2\na,3,2\n", "line 3: group 'a' has prompt_tokens 3 here and 1 before: "
         "rows of a group share one prompt, so write the same number or another group"),
        (TWO + "1,\0\n", "holds binary data: write the path of a .csv or .csv.gz trace"),
        (TWO + "1," + "9" * 200_000, "is not CSV (field larger than field limit (131072)): "
         "write the path of a .csv or .csv.gz trace"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str, message: str):
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError) as raised:
        load_trace(path)
    assert str(raised.value) == f"{path}: {message}"
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "plain.csv.gz").write_text(GROUPED)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(GROUPED.encode())[:-9])
    (tmp_path / "latin.csv").write_bytes(b"group\xe9\n")
    with pytest.raises(ConfigError, match=r"absent\.csv: no such file: write the path of a \.csv"):
        load_trace(tmp_path / "absent.csv")
    for path in (tmp_path, *tmp_path.iterdir()):
        with pytest.raises(ConfigError, match=r"cannot be read \(.*\): write the path of") as raised:
            load_trace(path)
        assert len(str(raised.value).splitlines()) == 1


@given(st.text(alphabet="ab,1\n\"' -.\r\0é", max_size=60), st.sampled_from(["", TWO, "group," + TWO]))
def test_no_text_makes_a_trace_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, text: str, header: str):
    path = write(tmp_path_factory.getbasetemp() / "any.csv", header + text)
    with suppress(ConfigError):
        assert load_trace(path).length(0, 0) >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampled(Constant(1), between=1.5), "between is 1.5: write a number from 0 to 1"),
        (lambda: Workload(ONE, max_tokens=0), "max_tokens is 0: write a whole number from 1 upwards"),
        (lambda: Workload(ONE, scale=0), "scale is 0: write a number above 0 and at most 1e+12"),
        (lambda: Workload(ONE, drift=-1), "drift is -1: write the relative change per version, such as 0.01"),
        (lambda: Uniform(5, 4), "high is 4: write a number from low = 5 upwards"),
        (lambda: Lognormal(math.nan, 1), "median is nan: write a number above 0 and at most 1e+12"),
        (lambda: Bimodal(100, 110, 0.5), "long is 110: write at least 122.222, so that the modes stay apart"),
        (lambda: QuantileTable((0, 1), (2, 1)), "a value is 1: write one not below its predecessor 2"),
        (lambda: Trace((), ()), "prompts is (): write at least one prompt length"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_is_refused_when_it_is_made(make, message: str):
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value) == message
