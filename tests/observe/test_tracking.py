"""Trackers show a run and never end it: whatever one does, the others and the run go on."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.config import ConfigError, load
from staleflow.config.checks import check
from staleflow.observe import trackers as built_in
from staleflow.observe.tracking import MOST_WAITING, TrackedRun, Trackers, Values, scalars

ROW = {
    "step": 3,
    "time": 12.5,
    "reward": 0.25,
    "loss": float("nan"),
    "token_staleness": {"0": 30, "1": 10},
    "prompts": [1, 2],
    "signal": [True, False],
    "lengths": [10, 30],
}


class Kept:
    def __init__(self, fails: bool = False, slow: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails, self.slow, self.closed = fails, slow, False

    def log(self, step: int, values: Values) -> None:
        if self.slow is not None:
            self.slow.wait(20)
        if self.fails:
            raise OSError("no network")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_a_line_of_the_metrics_becomes_numbers() -> None:
    assert scalars(ROW) == {
        "time": 12.5,
        "reward": 0.25,
        "token_staleness/mean": 0.25,
        "token_staleness/max": 1.0,
        "lengths/mean": 20.0,
        "lengths/max": 30.0,
    }


def test_a_tracker_that_fails_is_named_once_and_the_others_get_everything() -> None:
    good, bad, said = Kept(), Kept(fails=True), list[str]()

    def never() -> Kept:
        raise RuntimeError("not logged in\nsee the manual")

    trackers = Trackers({"good": lambda: good, "bad": lambda: bad, "never": never}, said.append)
    for step in range(3):
        trackers.log(step, ROW)
    trackers.close()
    assert [step for step, _ in good.rows] == [0, 1, 2]
    assert (good.closed, bad.closed) == (True, False)
    assert [line.split(" ")[0] for line in said] == ["track=never", "track=bad"]
    assert all("\n" not in line for line in said)
    trackers.close()
    trackers.log(4, ROW)


def test_a_tracker_that_hangs_costs_steps_there_and_no_time_here() -> None:
    go, said = threading.Event(), list[str]()
    slow = Kept(slow=go)
    trackers = Trackers({"slow": lambda: slow}, said.append)
    for step in range(MOST_WAITING + 50):
        trackers.log(step, {})
    go.set()
    trackers.close()
    assert MOST_WAITING <= len(slow.rows) < MOST_WAITING + 50
    assert said == ["trackers (slow) are too slow: some steps are left out there"]


def test_without_trackers_nothing_is_started() -> None:
    before = threading.active_count()
    trackers = Trackers({}, pytest.fail)
    trackers.log(0, ROW)
    trackers.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["track=wandbb"], "track=wandbb: write wandb"),
        (["track=[wandb, wandb]"], "track has two of the same name"),
        (["track=[wandb, trackio]", "track_arguments={project: x}"], "track_arguments has project: with several"),
        (["wandb=true"], "write track=wandb"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong.replace("[", r"\[")):
        load("laptop", words)


def test_a_missing_package_is_one_line_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.registry._installed", lambda module: module != "prometheus_client")
    with pytest.raises(ConfigError, match="track=prometheus needs the package prometheus-client: pip install"):
        check(load("laptop", ["track=prometheus"]), room=False)


# With the packages themselves, where they are installed


def logged(kind: Any, path: Path, **arguments: Any) -> None:
    tracker = kind(TrackedRun("a run", path, 0, {"groups": 4}), **arguments)
    for step in (0, 1):
        tracker.log(step, {"reward": 0.5 + step, "lengths/mean": 20.0})
    tracker.log(0, {"evaluation/step": 0.0})
    tracker.close()


def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    logged(built_in.TensorBoard, tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in found.Scalars("reward")] == [(0, 0.5), (1, 1.5)]


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(built_in.WeightsAndBiases, tmp_path, mode="offline")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackio_keeps_what_was_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    logged(built_in.Trackio, tmp_path)
    assert list(tmp_path.rglob("*.db"))


def test_prometheus_has_a_file_and_an_address(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    logged(built_in.Prometheus, tmp_path, port=0)
    text = (tmp_path / "metrics.prom").read_text()
    assert 'staleflow_reward{run="a run"} 1.5' in text
    assert "staleflow_lengths_mean" in text


def test_weights_and_biases_never_goes_back_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It drops what comes with an earlier step than the last: evaluations came late and were lost."""
    steps: list[int] = []
    run = SimpleNamespace(log=lambda _values, step: steps.append(step), finish=lambda: None)
    given: dict[str, Any] = {}
    fake = SimpleNamespace(init=lambda **arguments: given.update(arguments) or run)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    logged(built_in.WeightsAndBiases, tmp_path, project="mine")
    assert steps == [0, 1, 1]
    assert (given["project"], given["id"], given["resume"]) == ("mine", "a_run", "allow")
    json.dumps(given["config"])
