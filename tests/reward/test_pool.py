"""With real processes: what a bad reward function does to the pool, and what it must not do."""

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from staleflow.reward.function import Response, RewardError
from staleflow.reward.pool import PoolPort, RewardPool, Settings
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.tasks.adder import Adder
from staleflow.tasks.task import Problem

PROBLEM = Problem("four", {})


class Desk:
    """Submits and collects the answers."""

    def __init__(self, spec: str, settings: Settings) -> None:
        self.pool = RewardPool(spec, settings, self._answer, self._answer)
        self.answers: dict[str, float | str] = {}
        self._came = asyncio.Event()

    def _answer(self, name: str, answer: float | str) -> None:
        assert name not in self.answers, "answered twice"
        self.answers[name] = answer
        self._came.set()

    async def all(self, count: int) -> dict[str, float | str]:
        async with asyncio.timeout(20):
            while len(self.answers) < count:
                self._came.clear()
                await self._came.wait()
        return self.answers

    async def __aenter__(self) -> "Desk":
        await self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(10):
            await self.pool.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def desk(workers: int = 1, timeout_s: float = 10.0, function: str = "behave") -> Desk:
    return Desk(f"tests.reward.functions:{function}", Settings(workers, timeout_s))


def test_bad_rewards_are_failures_with_a_reason_and_cost_no_other_response_anything() -> None:
    async def main() -> None:
        async with desk() as pool:
            for text in ("good", "nan", "infinite", "string", "none", "exception", "crash", "good again"):
                pool.pool.submit(text, PROBLEM, Response(text))
            pool.pool.submit("unsendable", Problem("four", {"answer": object()}), Response(""))
            answers = await pool.all(9)
            assert pool.pool.pending == 0
            assert pool.pool.replaced == 1
        assert answers["good"] == answers["good again"] == 0.5
        assert answers["nan"] == "the reward is nan: return a finite number"
        assert answers["infinite"] == "the reward is inf: return a finite number"
        assert answers["string"] == "the reward is '1.0', a str: return a number"
        assert "NoneType" in str(answers["none"])
        assert answers["exception"] == "KeyError: 'no such\\nthing'"
        assert "exit code 3" in str(answers["crash"])
        assert "keep to JSON values" in str(answers["unsendable"])

    run(main())


def test_a_worker_that_hangs_is_killed_with_its_children_and_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(timeout_s=1.0) as pool:
            pool.pool.submit("stuck", Problem("", {"file": str(tmp_path / "pid")}), Response("hang with a child"))
            pool.pool.submit("next", PROBLEM, Response("good"))
            assert await pool.all(2) == {"stuck": "the reward took more than 1 s", "next": 0.5}
            assert pool.pool.replaced == 1
        assert not alive(int((tmp_path / "pid").read_text()))

    run(main())


def alive(pid: int) -> bool:
    """A process that was killed and that nobody has waited for is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_closing_ends_a_worker_that_hangs() -> None:
    async def main() -> None:
        async with desk() as pool:
            pool.pool.submit("pid", PROBLEM, Response("pid"))
            worker = int(float((await pool.all(1))["pid"]))
            pool.pool.submit("stuck", PROBLEM, Response("hang"))
        assert not alive(worker)
        assert list(pool.answers) == ["pid"]

    run(main())


def test_workers_are_processes_of_their_own_and_as_many_as_allowed() -> None:
    async def main() -> None:
        async with desk(workers=2) as pool:
            for at in range(12):
                pool.pool.submit(str(at), PROBLEM, Response("pid"))
            found = set((await pool.all(12)).values())
        assert 1 <= len(found) <= 2
        assert os.getpid() not in found

    run(main())


def test_async_rewards_are_awaited() -> None:
    async def main() -> None:
        async with desk(function="later") as pool:
            pool.pool.submit("a", PROBLEM, Response("", (1, 2)))
            pool.pool.submit("b", PROBLEM, Response("exception"))
            assert await pool.all(2) == {"a": 7.0, "b": "RuntimeError: too late"}

    run(main())


def test_a_function_that_cannot_be_loaded_is_known_at_the_start() -> None:
    async def main(spec: str, message: str) -> None:
        with pytest.raises(RewardError, match=message):
            await Desk(spec, Settings()).pool.start()

    run(main("no_such_module:f", "importing no_such_module failed"))


def test_a_response_is_not_scored_twice_at_once_and_can_be_withdrawn() -> None:
    async def main() -> None:
        async with desk() as pool:
            for name in ("a", "a", "b", "c"):
                pool.pool.submit(name, PROBLEM, Response("good"))
            pool.pool.withdraw("b")
            pool.pool.withdraw("never asked")
            assert await pool.all(2) == {"a": 0.5, "c": 0.5}

    run(main())


def test_the_port_looks_up_the_problem_and_the_tokens() -> None:
    task = Adder()
    asked: list[tuple[str, Problem, Response]] = []
    pool = RewardPool("adder", Settings(), lambda *_: None, lambda *_: None)
    pool.submit = lambda *job: asked.append(job)  # type: ignore[method-assign]
    port = PoolPort(pool, task.problem, lambda _name: [7, 8], lambda tokens: f"{list(tokens)}")
    trajectory = Trajectory("p3/0", Group("p3", 3, 0, 4, 1), state="generated")
    port.score(trajectory)
    assert asked == [("p3/0", task.problem(3), Response("[7, 8]", (7, 8)))]
    trajectory.state = "aborted"  # while the request waited for the journal
    port.score(trajectory)
    assert len(asked) == 1


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"at least 1|above 0"):
        Settings(**settings)
