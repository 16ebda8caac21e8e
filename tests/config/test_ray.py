"""``runtime=ray``: what is refused before anything is started, in one line with the fix."""

import importlib.util
import socket

import pytest

from staleflow.cli import main
from staleflow.config import ray
from staleflow.config.loading import load


def problems(monkeypatch: pytest.MonkeyPatch, *settings: str, installed: bool = True) -> list[str]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object() if installed else None)
    return list(ray.problems(load("laptop", ["runtime=ray", *settings])))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "runtime=ray"]) == 2
    assert capsys.readouterr().err.endswith(
        "runtime=ray needs Ray, which is not installed: pip install 'staleflow[ray]'\n"
    )


def test_nothing_is_said_of_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(monkeypatch) == problems(monkeypatch, "ray.address=auto") == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert problems(monkeypatch, f"ray.address=127.0.0.1:{server.getsockname()[1]}") == []
    assert list(ray.problems(load("laptop", ["ray.address=nowhere"]))) == []


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("ray.address=127.0.0.1:1", "no Ray cluster is there"),
        ("ray.address=ray://127.0.0.1:10001", "is not the address of a Ray cluster: give HOST:PORT, or auto"),
        ("ray.address=127.0.0.1", "is not the address of a Ray cluster"),
        ("ray.address=127.0.0.1:99999999", "no Ray cluster is there"),
    ],
)
def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str, said: str) -> None:
    (problem,) = problems(monkeypatch, setting)
    assert said in problem
    assert "\n" not in problem


def test_a_cluster_chooses_the_gpu_and_one_of_the_runs_own_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(monkeypatch, "ray.address=auto", "training.device=cuda:1")
    assert problem == "training.device=cuda:1, but the Ray cluster chooses the GPU: give training.device=cuda"
    assert problems(monkeypatch, "training.device=cuda:1") == []


def test_the_variable_is_named_where_it_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert problems(monkeypatch)[0].startswith("RAY_ADDRESS=127.0.0.1:1: no Ray cluster is there")
