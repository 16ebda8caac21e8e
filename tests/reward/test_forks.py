"""Functions that no other process could import are scored in forks, and cost no more than others when they go wrong."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.caller import REWARDS, VARIABLE
from staleflow.errors import ConfigError
from staleflow.reward.forks import Forks, own_functions
from staleflow.reward.function import Response
from staleflow.reward.options import Reward
from staleflow.reward.pool import RewardPool
from staleflow.tasks.task import Problem

pytestmark = pytest.mark.processes

PROBLEM = Problem("four", {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def scored(options: Reward, texts: list[str], problem: Problem = PROBLEM, cut: bool = False) -> list[Any]:
    """What each text gets: (reward, parts), or why there is none."""

    async def main() -> list[Any]:
        answers: dict[str, Any] = {}
        came = asyncio.Event()

        def answer(name: str, what: Any) -> None:
            answers[name] = what
            came.set()

        pool = RewardPool(options, lambda name, reward, parts: answer(name, (reward, parts)), answer)
        await pool.start()
        for at, text in enumerate(texts):
            pool.submit(str(at), problem, text=text, cut=cut)
        async with asyncio.timeout(60):
            while len(answers) < len(texts):
                came.clear()
                await came.wait()
        await pool.close()
        return [answers[str(at)] for at in range(len(texts))]

    return asyncio.run(main())


def test_a_closure_a_lambda_and_a_coroutine_score_with_their_weights(folder: Path) -> None:
    bonus = {"value": 2.0}

    async def awaited(_problem: Problem, response: Response) -> float:
        await asyncio.sleep(0)
        return float(response.cut)

    own: dict[str, Callable[..., Any]] = {
        "lambda": lambda _problem, response: len(response.text) * bonus["value"],
        "awaited": awaited,
    }
    options = Reward(("python:lambda", "python:awaited", "tests.reward.functions:weighed"), weights=(1.0, 10.0, 0.5))
    with Forks(own, folder / REWARDS):
        bonus["value"] = 0.0  # forks have what was there when they were made
        assert scored(options, ["ab"], cut=True) == [(4.0 + 10.0 + 0.5 * 2.0, (4.0, 1.0, 2.0))]


def test_one_that_hangs_or_dies_costs_no_other_response_anything(folder: Path) -> None:
    def behave(_problem: Problem, response: Response) -> float:
        if response.text == "hang":
            time.sleep(600)
        elif response.text == "crash":
            os._exit(3)
        elif response.text == "raise":
            raise KeyError("gold")
        return 1.0

    with Forks({"behave": behave}, folder / REWARDS):
        options = Reward("python:behave", timeout_s=1.0)
        found = scored(options, ["good", "hang", "crash", "raise", "good"])
    assert found[0] == found[4] == (1.0, ())
    assert found[1] == "the reward took more than 1 s"
    assert found[2] == "the reward worker ended"
    assert found[3].startswith("KeyError: 'gold' (test_forks.py, line ")


def test_nothing_is_left_behind_when_the_program_ends(folder: Path) -> None:
    forks = Forks({"pid": lambda _problem, _response: float(os.getpid())}, folder / REWARDS)
    [(pid, _)] = scored(Reward("python:pid"), ["good"])
    forks.close()
    forks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert own_functions(Reward("tests.reward.functions:behave")) is None


def test_what_workers_see_of_the_environment_is_what_others_see(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    with Forks({"seen": lambda *_: float("MY_API_KEY" in os.environ)}, folder / REWARDS):
        assert scored(Reward("python:seen"), ["x"]) == [(0.0, ())]
        assert scored(Reward("python:seen", environment=("MY_API_KEY",)), ["x"]) == [(1.0, ())]


def test_a_failure_is_logged_with_its_traceback_and_the_sample(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(problem: Problem, _response: Response) -> float:
        return problem.facts["gold"]

    with Forks({"broken": broken}, folder / REWARDS):
        scored(Reward("python:broken"), ["a response"], Problem("a prompt", {"answer": 4}))
    logged = capfd.readouterr().err
    assert "a prompt" in logged
    assert "a response" in logged
    assert "{'answer': 4}" in logged
    assert 'return problem.facts["gold"]' in logged


def test_a_failure_whose_text_cannot_be_sent_is_a_failure_and_not_the_end_of_its_worker(folder: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise LookupError("nothing to say")

    def broken(_problem: Problem, response: Response) -> float:
        print("half a character: \ud83d")
        raise MuteError if response.text == "mute" else ValueError("half a character: \ud83d")

    with Forks({"broken": broken}, folder / REWARDS):
        half, mute = scored(Reward("python:broken"), ["half", "mute"])
    assert half.startswith(r"ValueError: half a character: \ud83d (test_forks.py")
    assert mute.startswith("MuteError: (its text cannot be made: LookupError)")


def test_a_function_of_a_program_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (None, tmp_path):
        monkeypatch.delenv(VARIABLE, raising=False) if where is None else monkeypatch.setenv(VARIABLE, str(where))
        with pytest.raises(ConfigError, match=r"continue there, with staleflow\.train\(\.\.\., reward=correct, resume"):
            own_functions(Reward("python:correct"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="earlier versions do not warn")
def test_forking_a_program_with_threads_is_silent(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    Forks({}, folder / REWARDS).close()
    assert not recwarn.list
