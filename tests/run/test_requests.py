"""Requests through a run's directory are answered once, or it is said why not; nothing is left of them."""

import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory
from staleflow.run.requests import Requests, ask


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_request_is_taken_once_and_its_answer_heard(directory: RunDirectory) -> None:
    requests = Requests(directory)
    assert requests.take() == []
    answered = 0

    def run(_: float) -> None:
        nonlocal answered
        for request in requests.take():
            (file,) = directory.requests.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert Requests(directory).take() == [request], "another control plane would take it"
            requests.answer(request, {"text": f"rollout {request.values['rollout']}"})
            answered += 1

    with directory.owned():
        assert ask(directory, {"rollout": 4}, 60, sleep=run) == {"text": "rollout 4"}
    assert answered == 1
    assert list(directory.requests.iterdir()) == []


def test_a_refusal_is_the_error(directory: RunDirectory) -> None:
    requests = Requests(directory)

    def run(_: float) -> None:
        for request in requests.take():
            requests.answer(request, {"error": "no room"})

    with directory.owned(), pytest.raises(RunError, match=r"^no room$"):
        ask(directory, {}, 60, sleep=run)


def test_a_run_that_is_not_there_or_ends_or_says_nothing(directory: RunDirectory) -> None:
    with pytest.raises(RunError, match="is not running"):
        ask(directory, {}, 60)
    owned = ExitStack()
    owned.enter_context(directory.owned())
    with pytest.raises(RunError, match="ended before it answered"):
        ask(directory, {}, 60, sleep=lambda _: owned.close())
    with directory.owned(), pytest.raises(RunError, match=r"has not answered within 0\.2 s"):
        ask(directory, {}, 0.2)
    assert list(directory.requests.iterdir()) == []


def test_what_nobody_waits_for_any_more_is_not_done(directory: RunDirectory) -> None:
    directory.requests.mkdir()
    (directory.requests / "old.json").write_text('{"name": "old", "values": {}, "until": 1.0}')
    (directory.requests / "torn.json").write_text('{"name": "to')
    assert Requests(directory).take() == []


def test_whoever_looks_whether_a_run_is_alive_does_not_become_its_owner(directory: RunDirectory) -> None:
    assert not directory.running
    with directory.owned():
        assert directory.running
    assert not directory.running
    with directory.owned():
        pass
