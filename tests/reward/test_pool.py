"""With real processes: what a bad reward function does to the pool, and what it must not do."""

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.errors import ConfigError
from staleflow.reward.environment import environment
from staleflow.reward.function import RewardError
from staleflow.reward.options import Reward
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.reward.process import started
from staleflow.reward.wire import Answer, Job, answers, pack
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Chunk
from staleflow.tasks.adder import VOCABULARY, Adder
from staleflow.tasks.task import Problem
from tests.living import alive

pytestmark = pytest.mark.processes

PROBLEM = Problem("four", {})


class Desk:
    """Submits and collects the answers."""

    def __init__(self, options: Reward, decoder: str = "") -> None:
        self.lost: list[str] = []
        self.pool = RewardPool(options, self._answer, self._answer, decoder=decoder, on_lost=self.lost.append)
        self.answers: dict[str, float | str] = {}
        self._came = asyncio.Event()

    def _answer(self, name: str, answer: float | str, _parts: tuple[float, ...] = ()) -> None:
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
    return Desk(Reward(f"tests.reward.functions:{function}", workers=workers, timeout_s=timeout_s))


def test_bad_rewards_are_failures_with_a_reason_and_cost_no_other_response_anything() -> None:
    async def main() -> None:
        async with desk() as pool:
            for text in ("good", "nan", "infinite", "string", "none", "exception", "crash", "good again"):
                pool.pool.submit(text, PROBLEM, text=text)
            pool.pool.submit("unsendable", Problem("four", {"answer": object()}))
            answers = await pool.all(9)
            assert pool.pool.pending == 0
            assert len(pool.lost) == 1
        assert answers["good"] == answers["good again"] == 0.5
        assert answers["nan"] == "the reward is nan: return a finite number"
        assert answers["infinite"] == "the reward is inf: return a finite number"
        assert answers["string"] == "the reward is '1.0', a str: return a number"
        assert "NoneType" in str(answers["none"])
        assert answers["exception"] == "KeyError: 'no such\\nthing' (functions.py, line 30)"
        assert "exit code 3" in str(answers["crash"])
        assert "keep to JSON values" in str(answers["unsendable"])

    run(main())


def test_a_worker_that_hangs_is_killed_with_its_children_and_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(timeout_s=1.0) as pool:
            pool.pool.submit("stuck", Problem("", {"file": str(tmp_path / "pid")}), text="hang with a child")
            pool.pool.submit("next", PROBLEM, text="good")
            assert await pool.all(2) == {"stuck": "the reward took more than 1 s", "next": 0.5}
            assert len(pool.lost) == 1
            child = int((tmp_path / "pid").read_text())
            async with asyncio.timeout(20):
                while alive(child):  # a signal was sent: on a busy machine it takes a while
                    await asyncio.sleep(0.01)

    run(main())


def test_what_a_reward_started_ends_with_the_worker_when_its_pool_was_killed() -> None:
    options = json.dumps({"function": "tests.reward.functions:starts"})
    connection, process = started([sys.executable, "-m", "staleflow.reward.worker", options, ""], stderr=None)
    frames, said = answers(), list[Answer]()
    with connection:
        connection.settimeout(20)
        connection.sendall(pack([Job(0, "", {}, b"", "")]))
        while len(said) < 2:  # that it is ready, and the answer
            said += frames.feed(connection.recv(1 << 16))
        child = os.pidfd_open(int(said[1].reward or 0))
    process.wait(20)
    assert select.select([child], [], [], 20)[0], "the child lives on"
    os.close(child)


def test_closing_ends_a_worker_that_hangs() -> None:
    async def main() -> None:
        async with desk() as pool:
            pool.pool.submit("pid", PROBLEM, text="pid")
            worker = int(float((await pool.all(1))["pid"]))
            pool.pool.submit("stuck", PROBLEM, text="hang")
        assert not alive(worker)
        assert list(pool.answers) == ["pid"]

    run(main())


def test_workers_are_processes_of_their_own_and_as_many_as_allowed() -> None:
    async def main() -> None:
        async with desk(workers=2) as pool:
            for at in range(12):
                pool.pool.submit(str(at), PROBLEM, text="pid")
            found = set((await pool.all(12)).values())
        assert 1 <= len(found) <= 2
        assert os.getpid() not in found

    run(main())


def test_async_rewards_are_awaited() -> None:
    async def main() -> None:
        async with desk(function="later") as pool:
            pool.pool.submit("a", PROBLEM, Chunk.of(0, [1, 2]).tokens)
            pool.pool.submit("b", PROBLEM, text="exception")
            assert await pool.all(2) == {"a": 7.0, "b": "RuntimeError: too late (functions.py, line 47)"}

    run(main())


def test_a_function_that_cannot_be_loaded_is_known_at_the_start() -> None:
    async def main(spec: str, message: str) -> None:
        with pytest.raises(RewardError, match=message):
            await Desk(Reward(spec)).pool.start()

    run(main("no_such_module:f", "importing no_such_module failed"))


def test_a_response_is_not_scored_twice_at_once() -> None:
    async def main() -> None:
        async with desk() as pool:
            for name in ("a", "a", "b", "c"):
                pool.pool.submit(name, PROBLEM, text="good")
            assert await pool.all(3) == {"a": 0.5, "b": 0.5, "c": 0.5}

    run(main())


def test_the_port_looks_up_the_problem_and_the_tokens() -> None:
    task = Adder()
    asked: list[tuple[str, Problem, bytes, bool]] = []
    pool = RewardPool(Reward(workers=2), lambda *_: None, lambda *_: None)
    pool.submit = lambda *job, cut: asked.append((*job, cut))  # type: ignore[method-assign]
    port = PoolPort(pool, task.problem, lambda _name: (b"\x07\0\0\0", b""), lambda tokens: tokens[-4:] == b"\x07\0\0\0")
    trajectory = Trajectory("p3/0", Group("p3", 3, 0, 4, 1), state="generated")
    port.score(trajectory)
    assert asked == [("p3/0", task.problem(3), b"\x07\0\0\0", True)]
    trajectory.state = "aborted"  # while the request waited for the journal
    port.score(trajectory)
    assert len(asked) == 1


def test_workers_make_text_of_tokens() -> None:
    async def main(decoder: str, tokens: list[int]) -> None:
        answers = Desk(Reward("tests.reward.functions:spelled", workers=2), decoder)
        async with answers as pool:
            pool.pool.submit("a", Problem("", {"answer": "#2 5 6 ="}), Chunk.of(0, tokens).tokens)
            assert await pool.all(1) == {"a": 1.0}

    run(main("adder", [VOCABULARY.index(each) for each in ("#2", "5", "6", "=")]))


def test_a_tokenizer_that_cannot_be_read_is_known_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(RewardError, match=r"tokenizer.json cannot be read .*: save a fast tokenizer"):
            await Desk(Reward(), str(tmp_path / "tokenizer.json")).pool.start()

    run(main())


def test_answers_before_a_crash_or_a_hang_in_the_same_batch_are_kept() -> None:
    async def main() -> None:
        for end, why in (("crash", "exit code 3"), ("hang", "took more than")):
            async with desk(timeout_s=0.5) as pool:
                for at in range(20):
                    pool.pool.submit(f"{at}", PROBLEM, text="pid" if at != 10 else end)
                answers = await pool.all(20)
            assert why in str(answers.pop("10"))
            before, after = {answers[f"{at}"] for at in range(10)}, {answers[f"{at}"] for at in range(11, 20)}
            assert len(before) == len(after) == 1, "one worker scored those before, its replacement those after"
            assert before != after

    run(main())


def test_a_batch_larger_than_the_socket_takes_at_once_arrives_whole() -> None:
    async def main() -> None:
        async with desk(function="later") as pool:
            tokens = Chunk.of(0, np.ones(200_000)).tokens
            for at in range(8):
                pool.pool.submit(f"{at}", PROBLEM, tokens)
            assert set((await pool.all(8)).values()) == {200_004.0}

    run(main())


def test_large_rows_are_sent_in_several_goes_and_what_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are over the limit of a message, each by itself is not (D10)."""
    monkeypatch.setattr("staleflow.reward.wire.MOST_BYTES", 3_000_000)
    monkeypatch.setattr("staleflow.reward.pool.MOST_BYTES_AHEAD", 4_000_000)

    async def main() -> None:
        async with desk() as at:
            large = Problem("large", {"image": "x" * 2_000_000})
            for number in range(8):
                at.pool.submit(f"r{number}", large, text="1.0")
            at.pool.submit("too large", Problem("much too large", {"image": "x" * 4_000_000}), text="1.0")
            at.pool.submit("small", PROBLEM, text="1.0")
            answers = await at.all(10)
            assert "the row of prompt 'much too large' cannot be sent" in str(answers.pop("too large"))
            assert set(answers.values()) == {0.5}

    run(main())


@pytest.mark.parametrize("value", ["\ud800", 10**30, object()], ids=["surrogate", "digits", "object"])
def test_a_row_that_cannot_be_sent_is_answered_and_costs_no_other_response_anything(value: Any) -> None:
    async def main() -> None:
        async with desk() as at:
            at.pool.submit("bad", Problem("odd", {"a": value}), text="1.0")
            at.pool.submit("good", PROBLEM, text="1.0")
            answers = await at.all(2)
            assert "the row of prompt 'odd' cannot be sent to a reward worker" in str(answers["bad"])
            assert answers["good"] == 0.5

    run(main())


def test_workers_see_no_secrets_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_KEY", "HF_TOKEN", "OPENAI_API_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "value")

    async def main() -> None:
        async with Desk(Reward("tests.reward.functions:environment", environment=("MY_KEY",))) as at:
            for name in ("MY_KEY", "HF_TOKEN", "OPENAI_API_KEY", "HF_HOME", "PATH"):
                at.pool.submit(name, PROBLEM, text=name)
            seen = {name for name, answer in (await at.all(5)).items() if answer == 1.0}
            assert seen == {"MY_KEY", "HF_HOME", "PATH"}

    run(main())


def test_a_named_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(RewardError, match=r"reward\.environment names NOT_SET, which is not set: export it"):
        environment(("NOT_SET",), {})


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    async def main() -> None:
        async with desk() as pool:
            pool.pool.submit("pid", PROBLEM, text="pid")
            os.kill(int(float((await pool.all(1))["pid"])), signal.SIGKILL)
            pool.pool.submit("first", PROBLEM)
            pool.pool.submit("second", PROBLEM)
            answers = await pool.all(3)
            assert answers["second"] == 0.5
            assert answers["first"] in (0.5, "the reward worker ended: killed (SIGKILL; out of memory?)")

    run(main())


def test_a_worker_that_was_seen_to_die_while_idle_gets_nothing_more() -> None:
    """What it was given then was never answered, and the run stood still until the reward had timed out three times."""

    async def main() -> None:
        async with desk() as pool:
            pool.pool.submit("pid", PROBLEM, text="pid")
            os.kill(int(float((await pool.all(1))["pid"])), signal.SIGKILL)
            async with asyncio.timeout(30):
                while pool.pool._workers:
                    await asyncio.sleep(0.01)
            pool.pool.submit("after", PROBLEM)
            assert (await pool.all(2))["after"] == 0.5

    run(main())


def test_a_machine_that_can_start_no_process_fails_responses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    async def main() -> None:
        async with desk() as pool:
            pool.pool.submit("a", PROBLEM, text="crash")
            monkeypatch.setattr("staleflow.reward.process.subprocess.Popen", refuse)
            pool.pool.submit("b", PROBLEM)
            answers = await pool.all(2)
            assert "exit code 3" in str(answers["a"])
            assert answers["b"] == "no reward worker could be started (Resource temporarily unavailable)"

    run(main())


def test_a_listener_that_fails_stops_nobody() -> None:
    async def main() -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        async with desk() as pool:
            hear = pool.pool._on_reward

            def fail(name: str, reward: float, parts: tuple[float, ...]) -> None:
                hear(name, reward, parts)
                raise RuntimeError("a mistake of the listener")

            pool.pool._on_reward = fail
            pool.pool.submit("a", PROBLEM)
            pool.pool.submit("b", PROBLEM)
            assert await pool.all(2) == {"a": 0.5, "b": 0.5}
        assert complaints == [f"the callback for the reward of {name} failed" for name in "ab"]

    run(main())


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"1 or more|above 0|not finite"):
        Reward(**options)
