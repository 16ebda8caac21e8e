"""Whole runs of episodes over HTTP, in processes: whatever is killed in mid-turn, bound 0 trains what it would have."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import Config, load
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events
from staleflow.runtime.local.run import LocalRun
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.lifecycle import Trajectory
from tests.runtime.local.test_run import run_once
from tests.tiny_models import save_chat

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("model"), seed=3)


def configured(model: Path, folder: Path) -> Config:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {at}", "answer": "x"}) + "\n" for at in range(40)))
    words = {
        "model": model,
        "runs": folder / "runs",
        "data.source": data,
        "data.chat": "true",
        "data.max_prompt_tokens": 80,
        "data.held_out_count": 2,
        "environment.play": "tests.agents.turns_by_turns:three",
        "environment.max_given": 160,
        "rollout.max_tokens": 24,
        "rollout.kv_tokens": 4096,
        "groups": 3,
        "group_size": 4,
        "staleness": 0,
        "steps": STEPS,
        "training.learning_rate": 1e-3,
        "evaluation.every": 0,
        "evaluation.problems": 2,
    }
    return load(None, [f"{name}={value}" for name, value in words.items()])


def trained(directory: RunDirectory) -> list[tuple[float, list[int], float]]:
    return [(row["loss"], sorted(row["lengths"]), row["reward"]) for row in read_metrics(directory.metrics)]


def kill_instance(run: LocalRun) -> None:
    os.kill(run.crew.children["i0"].pid, signal.SIGKILL)


def kill_environments(run: LocalRun) -> None:
    assert run.playing is not None
    for player in run.playing._pool._players:  # pyright: ignore[reportPrivateUsage]
        os.kill(player._process.pid, signal.SIGKILL)  # pyright: ignore[reportPrivateUsage]


def test_kills_in_mid_turn_lose_and_repeat_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, tmp_path)
    _, calm = run_once(config, model)
    kills: dict[int, Callable[[LocalRun], None]] = {1: kill_instance, 2: kill_environments}
    runs: list[LocalRun] = []
    given = EpisodeServer.given

    def killing(server: EpisodeServer, name: str, begin: int, *rest: Any) -> Trajectory | None:
        """Kills as soon as somebody has asked for a second turn: looking now and then may miss all of them."""
        asked = given(server, name, begin, *rest)
        if begin and runs and server.ledger.version in kills:
            kills.pop(server.ledger.version)(runs[0])
        return asked

    monkeypatch.setattr(EpisodeServer, "given", killing)
    summary, directory = run_once(config, model, watch=runs.append)
    assert not kills, "it never came to that"
    assert summary["violations"] == 0
    for (loss, lengths, reward), (other, *same) in zip(trained(directory), trained(calm), strict=True):
        assert (lengths, reward) == tuple(same)
        assert loss == pytest.approx(other, abs=1e-6)
    events: list[Any] = [each.event for each in read_events(directory)]
    assert not [event for event in events if event[0] in ("again", "release")]
    ended = {event[1] for event in events if event[0] == "ended"}
    assert all(sum(event[:2] == ("turn", name) for event in events) == 3 for name in ended)
