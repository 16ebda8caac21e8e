"""TRL on the workloads of the experiments, where it is installed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[bench]'")
from bench.gpu import skewed, trl_grpo

LIMITS = [skewed.length(f"p{at // trl_grpo.SIZE}/{at % trl_grpo.SIZE}", 8, 16) for at in range(32)]


def test_responses_have_the_lengths_of_the_skewed_workload(tmp_path: Path) -> None:
    found = trl_grpo.main(["--smoke", "--runs", str(tmp_path), "--output", str(tmp_path / "trl.json")])
    measured = found["skewed tiny, TRL"]
    assert measured["tokens"] == [sum(LIMITS[:16]), sum(LIMITS[16:])]
    assert measured["tokens_per_s"] > 0


def test_generation_that_is_stopped_says_what_it_would_have_made_at_most(tmp_path: Path) -> None:
    stopped = ["--generating", "1e-6"]
    found = trl_grpo.main(["--smoke", *stopped, "--runs", str(tmp_path), "--output", str(tmp_path / "trl.json")])
    measured = found["skewed tiny, TRL"]
    assert measured["made_of_longest"] < measured["longest"] == max(LIMITS[:16])
    assert measured["tokens_per_s_at_most"] == pytest.approx(sum(LIMITS[:16]) / measured["stopped_after_s"], rel=0.1)
