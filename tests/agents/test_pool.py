"""With real processes: what a bad environment does to the pool, and what it must not do."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from staleflow.agents.options import Environment
from staleflow.agents.outcome import Outcome
from staleflow.agents.pool import EnvironmentPool
from staleflow.agents.tools import descendants
from staleflow.errors import ConfigError
from staleflow.reward.function import RewardError
from staleflow.tasks.task import Problem
from tests.living import alive

pytestmark = pytest.mark.processes

HERE = "tests.agents.environments"
SOON: dict[str, Any] = {"setup_s": 0.2, "agent_s": 0.2, "score_s": 0.2}


class Gate:
    """An endpoint that nobody calls."""

    url = "http://127.0.0.1:1/v1"

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.sealed: list[str] = []
        self.busy: set[str] = set()

    def open(self, episode: str) -> str:
        self.opened.append(episode)
        return f"secret of {episode}"

    def seal(self, episode: str) -> None:
        self.sealed.append(episode)

    def calls(self, episode: str) -> int:
        return int(episode in self.busy)


class Desk:
    """Begins episodes and collects their outcomes."""

    def __init__(self, play: str = "behave", stderr: int | None = None, **options: Any) -> None:
        self.gate = Gate()
        self.lost: list[str] = []
        self.again: list[str] = []
        self.asked: dict[str, str] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.pool = EnvironmentPool(
            Environment(f"{HERE}:{play}", **options), self.gate, self._end, self._lost, stderr, self.lost.append, 0.2
        )
        self._came = asyncio.Event()

    def _end(self, episode: str, _attempt: int, outcome: Outcome) -> None:
        assert episode not in self.outcomes, "ended twice"
        self.outcomes[episode] = outcome
        self._came.set()

    def _lost(self, episode: str, attempt: int) -> None:
        """As the control plane does: another worker plays it."""
        self.again.append(episode)
        self.play(self.asked[episode], episode, attempt + 1)

    def play(self, what: str, name: str = "", attempt: int = 1, **facts: Any) -> None:
        self.asked[name or what] = what
        self.pool.play(name or what, attempt, Problem(what, {"reward": 1, **facts}))

    async def all(self, count: int) -> dict[str, Outcome]:
        await until(lambda: len(self.outcomes) >= count)
        return self.outcomes

    async def __aenter__(self) -> "Desk":
        await self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(20):
            await self.pool.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not true():
            await asyncio.sleep(0.01)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_episodes_are_played_and_sealed() -> None:
    async def main() -> None:
        async with Desk(workers=2, episodes=3, arguments={"bonus": 0.5}) as desk:
            for at in range(20):
                desk.play("fine", f"p{at}/0", reward=at)
            outcomes = await desk.all(20)
            assert {name: each.reward for name, each in outcomes.items()} == {f"p{at}/0": at + 0.5 for at in range(20)}
            assert outcomes["p0/0"] == Outcome("scored", 0.5, {"base": 1.0})
            assert sorted(desk.gate.opened) == sorted(desk.gate.sealed) == sorted(outcomes)
            assert desk.pool.pending == 0

    run(main())


@pytest.mark.parametrize("phase", ["setup", "agent", "score"])
@pytest.mark.parametrize("how", ["waits", "blocks", "thread"])
def test_a_phase_that_hangs_fails_its_episode(phase: str, how: str) -> None:
    async def main() -> None:
        async with Desk(**SOON) as desk:
            desk.play(f"{phase} {how}", "bad")
            assert desk.outcomes == {}
            outcomes = await desk.all(1)
            assert outcomes["bad"].kind == "failed"
            assert outcomes["bad"].reward is None
            assert f"environment.{phase}_s=0.2" in outcomes["bad"].why
            assert bool(desk.lost) == (how != "waits"), "a worker is killed only if its episode does not stop"
            desk.play("fine", "next")
            assert (await desk.all(2))["next"].kind == "scored"

    run(main())


def test_what_has_no_phases_is_limited_too() -> None:
    async def main() -> None:
        async with Desk(**SOON) as desk:
            desk.play("outside")
            assert "environment.agent_s=0.2" in (await desk.all(1))["outside"].why
            assert not desk.lost

    run(main())


def test_an_episode_that_a_limit_ended_may_keep_its_reward() -> None:
    async def main() -> None:
        async with Desk(**SOON) as desk:
            desk.play("keep")
            ended = (await desk.all(1))["keep"]
            assert (ended.kind, ended.reward) == ("truncated", 0.5)

    run(main())


def test_time_in_which_the_model_is_asked_does_not_count() -> None:
    async def main() -> None:
        async with Desk(**SOON) as desk:
            desk.gate.busy.add("long")
            desk.play("keep", "long")
            desk.play("keep", "short")
            await desk.all(1)
            await asyncio.sleep(0)
            assert set(desk.outcomes) == {"short"}
            desk.gate.busy.clear()
            await desk.all(2)

    run(main())


def test_a_worker_that_dies_fails_only_its_episodes() -> None:
    async def main() -> None:
        async with Desk(workers=2, episodes=1) as desk:
            desk.play("outside", "other")
            desk.play("crash")
            desk.play("fine", "later")
            outcomes = await desk.all(2)
            assert outcomes["crash"].why == "its worker ended: exit code 3"
            assert outcomes["later"].kind == "scored"
            assert desk.pool.phase("other") == "agent"
            desk.pool.cancel("other")

    run(main())


def test_an_episode_that_loses_its_worker_is_played_again_once() -> None:
    async def main() -> None:
        async with Desk(episodes=2) as desk:
            desk.play("outside", "a")
            desk.play("crash", "b")
            outcomes = await desk.all(1)
            assert outcomes["b"].kind == "failed", "its second worker"
            assert desk.again[:2] == ["a", "b"], "nobody knows which of them it was"
            assert set(desk.outcomes) <= {"a", "b"}
            desk.pool.cancel("a")

    run(main())


async def kill_worker(desk: Desk, file: Path) -> None:
    """The one that plays the episode ``a``, which has begun."""
    desk.play("cannot be cancelled", "a", file=str(file))
    await until(lambda: file.exists() and file.read_text() != "")
    os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_worker_that_is_killed_takes_only_its_episodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk() as desk:
            await kill_worker(desk, tmp_path / "pid")
            assert "SIGKILL" in (await desk.all(1))["a"].why
            assert not desk.again

    run(main())


def test_a_worker_whose_death_is_not_told_yet_gets_no_episode(tmp_path: Path) -> None:
    """Else whatever begins meanwhile loses its first worker to a death that was over, and each write is a warning."""

    async def main() -> None:
        async with Desk() as desk:
            await kill_worker(desk, tmp_path / "pid")
            (player,) = desk.pool._players  # pyright: ignore[reportPrivateUsage]
            player._reader.feed_eof()  # pyright: ignore[reportPrivateUsage]
            desk.play("fine", "next")
            assert (await desk.all(2))["next"].kind == "scored"
            assert not desk.again

    run(main())


def test_a_cancelled_episode_that_continues_costs_its_worker(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "pid"
        async with Desk() as desk:
            desk.play("cannot be cancelled", "a", file=str(file))
            await until(lambda: file.exists() and file.read_text() != "")
            desk.pool.cancel("a")
            await until(lambda: not alive(int(file.read_text())))
            assert desk.outcomes == {}, "nothing is heard of a cancelled episode"
            desk.play("fine", "next")
            await desk.all(1)

    run(main())


def test_processes_of_a_cancelled_episode_end_with_the_pool(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "pid"
        async with Desk() as desk:
            desk.play("orphan", file=str(file))
            await until(lambda: file.exists() and file.read_text() != "")
            child = int(file.read_text())
            assert child in descendants(os.getpid())
        assert not alive(child)

    run(main())


def test_a_worker_that_was_just_given_up_does_not_outlive_the_pool() -> None:
    async def main() -> None:
        async with Desk() as desk:
            (player,) = desk.pool._players  # pyright: ignore[reportPrivateUsage]
            worker = player._process.pid  # pyright: ignore[reportPrivateUsage]
            assert alive(worker)
            desk.pool.lost(player, "it talks nonsense")
            await desk.pool.close()  # before the task that ends it has begun
            assert not alive(worker)

    run(main())


def test_a_new_attempt_takes_the_place_of_the_one_before() -> None:
    async def main() -> None:
        async with Desk() as desk:
            desk.play("outside", "a")
            desk.play("fine", "a", attempt=1)
            assert desk.pool.pending == 1
            desk.play("fine", "a", attempt=2)
            assert (await desk.all(1))["a"].kind == "scored"

    run(main())


@pytest.mark.parametrize(
    ("what", "facts", "why"),
    [
        ("exception", {}, "KeyError: 'no such\\nthing'"),
        ("exit", {}, "SystemExit: 4"),
        ("interrupt", {}, "KeyboardInterrupt"),
        ("base", {}, "BaseException: nobody catches this"),
        ("no text", {}, "its outcome cannot be sent (UnicodeEncodeError"),
        ("failed", {}, "the sandbox is away"),
        ("odd", {"odd": None}, "is None, a NoneType: return a number"),
        ("odd", {"odd": "1"}, "a str: return a number"),
        ("odd", {"odd": [1.0]}, "a list: return a number"),
        ("nan", {}, "the reward is nan: return a finite number"),
        ("kind", {}, "the kind 'excellent'"),
    ],
)
def test_a_bad_outcome_is_a_failure_and_never_a_zero(what: str, facts: dict[str, Any], why: str) -> None:
    async def main() -> None:
        async with Desk() as desk:
            desk.play(what, "bad", **facts)
            outcome = (await desk.all(1))["bad"]
            assert (outcome.kind, outcome.reward) == ("failed", None)
            assert why in outcome.why
            assert not desk.lost

    run(main())


def test_the_traceback_of_an_environment_is_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        with (tmp_path / "log").open("wb") as log:
            async with Desk(stderr=log.fileno()) as desk:
                desk.play("exception", "p3/1")
                await desk.all(1)
        text = (tmp_path / "log").read_text()
        assert "episode p3/1 failed" in text
        assert "environments.py" in text
        assert "what an environment prints is not an answer" in text

    run(main())


def test_a_row_that_cannot_be_sent_fails_alone() -> None:
    async def main() -> None:
        async with Desk() as desk:
            desk.play("fine", "bad", thing=object())
            desk.play("fine", "good")
            outcomes = await desk.all(2)
            assert "keep to JSON values" in outcomes["bad"].why
            assert outcomes["good"].kind == "scored"

    run(main())


@pytest.mark.parametrize(
    ("play", "options", "why"),
    [
        ("blocking", {}, "write async def blocking"),
        ("broken", {}, "cannot be called as it will be"),
        ("missing", {}, "has no missing"),
        ("behave", {"arguments": {"malus": 1}}, "malus"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start(
    play: str, options: dict[str, Any], why: str
) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=why):
            await Desk(play, **options).pool.start()

    run(main())


def test_a_variable_that_is_not_set_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(RewardError, match=r"environment\.environment names NO_SUCH_THING"):
            await Desk(environment=("NO_SUCH_THING",)).pool.start()

    run(main())
