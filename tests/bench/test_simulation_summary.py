"""The first screen of the simulated results says what the tables of the page say."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_the_summary_and_the_chart_are_those_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    import simulation_summary  # pyright: ignore[reportMissingImports]

    page = simulation_summary.DOCUMENT.read_text()
    assert len(simulation_summary.settings(page)) == 30
    simulation_summary.write(page, tmp_path / "simulation.md")
    for each in ("simulation.md", "simulation.svg"):
        assert (tmp_path / each).read_text() == simulation_summary.DOCUMENT.with_name(each).read_text(), (
            f"{each}: python bench/simulation_summary.py"
        )
