"""``staleflow evaluate``: an engine here and a server elsewhere get the same figures for the same model."""

import json
import socket
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.observe.progress import Progress
from staleflow.rollout.engine import EngineError, Request, Sampling
from staleflow.rollout.server import Server
from staleflow.tasks import adder
from tests.commands.served import served
from tests.tiny_models import save_tiny

STOPS = (adder.END,)
PROTOCOLS = {"openai": ("/v1", True), "openai, text only": ("/v1", False), "tokens": ("/inference/v1/generate", True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", seed=5)


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict:
    asked = ["problems=6", "max_tokens=6", "kv_tokens=512", "reward.function=tests.runtime.local.rewards:evenness"]
    assert main(["evaluate", f"model={folder}", *asked, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.processes
def test_servers_get_the_figures_of_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = evaluated(capsys, folder)
    assert (here["responses"], here["not_scored"]) == (6, 0)
    assert 0 < here["figures"]["reward"] < 1
    with served(folder, STOPS) as url:
        there = evaluated(capsys, folder, "--server", f"{url}/inference/v1/generate")
        openai = evaluated(capsys, folder, "--server", f"{url}/v1")
    assert there["figures"] == openai["figures"] == here["figures"]
    assert openai["by"] == f"tiny at {url}/v1"


@pytest.mark.processes
def test_a_reward_service_that_is_away_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "say", lambda _, text: said.append(text))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"
    words = ["problems=2", "max_tokens=4", "kv_tokens=512", f"reward.function={address}", "reward.patience_s=0.3"]
    assert main(["evaluate", f"model={folder}", *words, "--json"]) == 2
    assert any("did not answer" in line for line in said)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_gives_the_same_tokens_and_a_busy_server_is_asked_again(folder: Path, protocol: str) -> None:
    path, with_tokens = PROTOCOLS[protocol]
    asked = [Request(str(at), 1, [5 + at, 7], sampling=_sampling()) for at in range(4)]
    with served(folder, STOPS) as url:
        expected = dict(Server(f"{url}/inference/v1/generate", folder).respond(asked))
    with served(folder, STOPS, with_tokens, busy_at=(2, 3)) as url:
        found = dict(Server(url + path, folder, pause_s=0.0).respond(asked))
    assert expected.keys() == {"0", "1", "2", "3"}
    assert _said(found) == _said(expected)


def _said(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """Without tokens that no text shows."""
    return {name: [token for token in tokens if token != adder.PAD] for name, tokens in found.items()}


def _sampling() -> Sampling:
    return Sampling(max_tokens=6, temperature=0.0, stop_tokens=STOPS)


def test_a_server_that_is_away_or_has_no_such_model_is_one_line(folder: Path) -> None:
    with served(folder, STOPS) as url:
        wrong = Server(f"{url}/v1", folder, model="other", pause_s=0.0)
        with pytest.raises(EngineError, match=r"status 404: .*no other at /v1/completions.*correct --server"):
            list(wrong.respond([Request("a", 1, [5], sampling=_sampling())]))
        with pytest.raises(EngineError, match="lists no model: give its name by --served-model"):
            Server(f"{url}/v2", folder)
    with pytest.raises(EngineError, match="does not answer"):
        Server(f"{url}/v1", folder, pause_s=0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--server", "localhost:8000"], "write it as in http://localhost:8000/v1"),
        (["evaluate", "--served-model", "x"], "give --server too"),
        (["train", "rollout.engine=http://localhost:8000/v1"], "a server can only evaluate"),
        (["train", "rollout.engine=https://api.example.com/v1"], "staleflow evaluate --server"),
    ],
)
def test_what_a_server_cannot_do_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
