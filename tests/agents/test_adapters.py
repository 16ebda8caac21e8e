"""Every adapter with a real worker, a real endpoint and real HTTP; only what the model says is given by the test."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.agents.word_calculator import NOTHING, calculated
from examples.agents.word_calculator import problems as problems_with_a_calculator
from staleflow.agents.options import Environment
from staleflow.agents.outcome import Outcome
from staleflow.agents.pool import EnvironmentPool
from staleflow.agents.program import said
from staleflow.agents.render import Renderer
from staleflow.agents.verifiers import PLACE, problems
from staleflow.tasks.task import Problem
from tests.agents.serving import END, USER, Scripted, serving
from tests.tiny_models import save_chat

pytestmark = pytest.mark.processes

AGENT = [sys.executable, "examples/agents/agent.py"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    made = Renderer.of(save_chat(tmp_path_factory.mktemp("chat")), stops=[END])
    made.prove()
    return made


def played(renderer: Renderer, options: Environment, texts: list[str], prompt: Any = USER, **facts: Any) -> Any:
    """The outcome of one episode, and the episodes."""

    async def main() -> tuple[Outcome, Scripted]:
        episodes = Scripted(renderer, texts)
        episodes.begin("p0/0", renderer.first(prompt if isinstance(prompt, list) else USER))
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        async with serving(episodes, renderer, max_turns=options.max_turns) as endpoint:
            pool = EnvironmentPool(
                options,
                endpoint,
                lambda _episode, _attempt, found: outcome.set_result(found),
                lambda *_: None,
            )
            await pool.start()
            try:
                pool.play("p0/0", 1, Problem(prompt, facts))
                async with asyncio.timeout(60):
                    return await outcome, episodes
            finally:
                await pool.close()

    return asyncio.run(main())


def test_a_program_that_knows_only_openai_is_played(renderer: Renderer) -> None:
    options = Environment("program", {"command": AGENT})
    outcome, episodes = played(renderer, options, ["5", "4"], answer="4")
    assert outcome == Outcome("scored", 1.0, {"length": 3.0})
    assert [branch for branch, *_ in episodes.turns] == ["p0/0"] * 2, "the second call continues the first"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
        ([sys.executable, "-c", "print('done')"], "'done', which is not a reward"),
        (["no-such-program"], "no-such-program"),
        ([*AGENT[:1], "-c", "import json, sys; json.load(sys.stdin)['missing']"], "KeyError: 'missing'"),
    ],
)
def test_a_program_that_fails_is_a_failure_with_its_last_words(
    renderer: Renderer, command: list[str], why: str
) -> None:
    outcome, _ = played(renderer, Environment("program", {"command": command}), [])
    assert outcome.kind == "failed"
    assert why in outcome.why


def test_a_program_may_be_scored_by_a_function(renderer: Renderer) -> None:
    arguments = {"command": [sys.executable, "-c", "print(21)"], "score": "tests.agents.environments:twice"}
    outcome, _ = played(renderer, Environment("program", arguments), [], answer="4")
    assert outcome == Outcome("scored", 42.0)


def test_the_last_line_of_a_program_is_its_reward() -> None:
    assert said("noise\n 1 \n") == Outcome("scored", 1.0)
    assert said('{"reward": 0.5, "truncated": "too long"}') == Outcome("truncated", 0.5, {}, "too long")
    assert said("").kind == said("nothing").kind == said('{"parts": {}}').kind == "failed"


def test_a_gym_is_played_by_its_texts(renderer: Renderer) -> None:
    options = Environment("gym", {"make": "examples.agents.guess:Guess", "arguments": {"tries": 4}})
    outcome, episodes = played(renderer, options, ["50", "25", "I say 30"], number=30)
    assert outcome == Outcome("scored", 0.5 + 0.5 * 1 / 4)
    assert len(episodes.turns) == 3
    outcome, _ = played(renderer, options, ["1", "2", "3", "4"], number=30)
    assert outcome == Outcome("scored", 0.0)


def test_a_gym_that_runs_out_of_turns_keeps_what_it_has(renderer: Renderer) -> None:
    options = Environment("gym", {"make": "examples.agents.guess:Guess"}, max_turns=2)
    outcome, _ = played(renderer, options, [], number=30)
    assert (outcome.kind, outcome.reward) == ("truncated", 0.0)


def test_a_tool_runs_in_a_process_with_limits(renderer: Renderer) -> None:
    options = Environment("examples.agents.python_tool:play", {"seconds": 20.0})
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(2 + 2)"}}</tool_call>'
    outcome, episodes = played(renderer, options, [call, "4"], answer="4")
    assert outcome == Outcome("scored", 1.0)
    given = renderer.words.decode(episodes.turns[1][2])
    assert "[tool] 4\n<end>" in given


@pytest.mark.parametrize(
    ("texts", "outcome"),
    [
        (["290 - 145 = 9 groups", "so 145"], Outcome("scored", 1.0)),
        (["145"], Outcome("scored", 1.0)),
        (["many"], Outcome("scored", 0.0)),
        (["1 + 1"] * 2, Outcome("truncated", 0.0, why="the episode has had its 2 turns: end it")),
    ],
)
def test_word_problems_are_played_with_a_calculator(
    renderer: Renderer, texts: list[str], outcome: Outcome, tmp_path: Path
) -> None:
    row = {"Body": "290 bananas are in 2 groups.", "Question": "How big is each?", "Answer": 145.0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    ((prompt, answer),) = (each.values() for each in problems_with_a_calculator(str(tmp_path / "rows.jsonl")))
    options = Environment("examples.agents.word_calculator:play", max_turns=2)
    found, episodes = played(renderer, options, texts, prompt, answer=answer)
    assert found == outcome
    assert len(episodes.turns) == len(texts)
    if len(texts) == 2:
        given = renderer.words.decode(episodes.turns[1][2])
        assert f"[user] = {calculated(texts[0])}<end>" in given


def test_a_calculator_divides_by_all_but_zero() -> None:
    assert [calculated(each) for each in ("7 / 2", "so 6*-5 = 2", "1 / 0", "nothing")] == ["3.5", "-30", NOTHING, None]


@pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="needs openenv-core")
def test_openenv_is_played_over_its_own_server(renderer: Renderer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "examples/agents/echo_server.py", str(port)])
    try:
        until = asyncio.run(_listening(port))
        assert until
        arguments = {"base_url": f"http://127.0.0.1:{port}", "observation": "said"}
        outcome, _ = played(renderer, Environment("openenv", arguments), ["a", "bb", "b"])
        assert outcome == Outcome("scored", 2.0)
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs verifiers")
def test_verifiers_is_played_with_its_own_harness_and_scoring(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "examples/agents")
    monkeypatch.syspath_prepend("examples/agents")
    env = {"taskset": {"id": "letters"}, "agent": {"runtime": {"type": "subprocess"}}}
    rows = list(problems(env))
    assert [row["prompt"][0]["content"] for row in rows][:2] == ["Say a", "Say b"]
    options = Environment("verifiers", {"env": env}, environment=("PYTHONPATH",))
    asked = rows[1]["prompt"]
    outcome, episodes = played(renderer, options, ["a b", "c"], prompt=asked, **{PLACE: rows[1][PLACE]})
    assert outcome == Outcome("scored", 0.5, {"said": 0.5})
    assert [at for _, at, _, _ in episodes.turns] == sorted(at for _, at, _, _ in episodes.turns)
    assert len({branch for branch, *_ in episodes.turns}) == 1, "the second call continues the first"


async def _listening(port: int) -> bool:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            except OSError:
                await asyncio.sleep(0.05)


def test_the_prompt_of_the_row_is_the_beginning(renderer: Renderer) -> None:
    outcome, episodes = played(renderer, Environment("program", {"command": AGENT}), ["4"], answer="4")
    assert outcome.reward == 1.0
    assert episodes.turns[0][:3] == ("p0/0", len(renderer.first(USER)), [])
    assert Path(AGENT[1]).exists()
