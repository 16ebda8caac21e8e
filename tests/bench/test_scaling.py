"""The bench of scaling: one small cell of it, and the arithmetic on given costs."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


def test_a_small_fleet_is_measured_with_the_production_code() -> None:
    import scaling  # pyright: ignore[reportMissingImports]

    cell = scaling.simulated(instances=2, steps=1)
    assert cell["in_flight"] == 2 * scaling.IN_FLIGHT // 48 * 48
    assert 0 < cell["running"] <= cell["in_flight"]
    assert 0 < cell["decision_ms"]["p50"] <= cell["decision_ms"]["p99"] <= cell["decision_ms"]["max"]
    assert set(cell["us_per_trajectory"]) == {"decide", "report", "score", "commit"}


def test_an_empty_fleet_is_filled_without_a_simulator() -> None:
    import scaling  # pyright: ignore[reportMissingImports]

    found = scaling.filling(instances=100, decisions=4)
    assert found["decisions"] >= 1
    assert 0 < found["p50_ms"] <= found["max_ms"]


def test_the_first_to_be_full_follows_from_the_costs() -> None:
    import scaling  # pyright: ignore[reportMissingImports]

    cell = {"instances": 10, "running": 200.0, "trajectories_per_s": 5.0, "tokens_per_trajectory": 1_000.0}
    cell |= {"us_per_trajectory": {"decide": 60.0, "report": 40.0}, "step_s": 100.0}
    beside = {"trajectory_us": 100.0, "stream_us": 10.0, "trajectory_bytes": 2_000.0}
    beside |= {"stream_bytes": 500.0, "log_bytes": 100.0}
    end = scaling.saturation(cell, {"bytes_per_trajectory": 1_000.0}, beside)
    # an instance: half a trajectory of 200 us a second; all of them: the streams of 1,024 that send ten of 10 us each
    streams = 1_024 * 10 * 10e-6
    assert end["instances"]["a core"] == pytest.approx((1 - streams) / 100e-6, rel=1e-3)
    assert end["of_it_streams"] == pytest.approx(streams, rel=1e-3)
    assert end["instances"]["the network"] == pytest.approx(scaling.LINK / 6_000)
    seconds = scaling.MOST_SENDING * scaling.WEIGHTS / scaling.NODE_LINK
    assert [scaling.spread_s(nodes) / seconds for nodes in (2, 8, 26, 80, 81)] == pytest.approx([1, 2, 3, 4, 5])
    assert end["first"] == min(end["instances"], key=end["instances"].get)
