"""Episodes through the control plane with real engines and a real trainer: what is trained is what was made."""

import asyncio
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

from staleflow.agents.outcome import Outcome, failed, scored, truncated
from staleflow.runtime.episodes import Episodes
from staleflow.tasks.task import Problem
from staleflow.types import GIVEN, Row, made_count
from tests.runtime.fakes import virtual
from tests.runtime.played import END, World, prompt_of, save_model

TURNS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def answer(tokens: list[int]) -> list[int]:
    """What the tool gives back for a turn."""
    return [2 + sum(tokens) % 40, 2 + len(tokens), 3]


def reward_of(made: list[int]) -> float:
    return sum(token % 2 == 0 for token in made) / len(made)


async def three_turns(episodes: Episodes, name: str, _: Problem) -> Outcome:
    """Each turn has at most 6 tokens; the tool takes its time."""
    given, made = [2, 3], list[int]()
    for at in range(TURNS):
        await asyncio.sleep(0.03 * (crc32(name.encode()) % 11 + at))
        turn = await episodes.turn(name, len(episodes.held(name)), given, limit=6)
        made += turn.tokens
        given = answer(turn.tokens)
    return scored(reward_of(made))


def turns_of(row: Row) -> list[tuple[list[int], list[int]]]:
    """Given and made tokens of each turn."""
    found: list[tuple[list[int], list[int]]] = []
    tokens, at = row.tokens.tolist(), 0
    for version, count in row.spans:
        if version == GIVEN:
            found.append((tokens[at : at + count], []))
        else:
            found[-1][1].extend(tokens[at : at + count])
        at += count
    return found


@virtual
async def test_what_is_trained_is_what_engines_made_token_for_token(folder: Path) -> None:
    world = World(folder, three_turns, staleness=2)
    await world.run(steps=8)
    made = {key: value for each in world.instances for key, value in each.made.items()}
    last = {name: max(epoch for held, epoch in made if held == name) for name, _ in made}
    rows = [row for step in world.rows for group in step for row in group]
    assert len(rows) == 8 * 2 * 3
    for row in rows:
        tokens, logprobs, spans = made[row.name, last[row.name]]
        assert row.tokens.tolist() == tokens
        assert row.logprobs.tolist() == pytest.approx(logprobs, abs=1e-6)
        assert row.spans == spans
        turns = turns_of(row)
        assert [given for given, _ in turns] == [[2, 3], *(answer(done) for _, done in turns[:-1])]
        assert all(len(done) == 6 or done[-1] == END for _, done in turns)
        assert row.reward == reward_of([token for _, done in turns for token in done])
    mixed = [row.name for row in rows if len({version for version, _ in row.spans} - {GIVEN}) > 1]
    assert mixed, "weights changed between turns"
    assert max(report.max_staleness for report in world.reports) == 2


@virtual
async def test_the_trainer_computes_the_log_probabilities_that_the_engine_drew_with(folder: Path) -> None:
    """At bound 0 they are of the same weights: a mask that is off by one would show."""
    world = World(folder, three_turns, staleness=0, instances=1)
    await world.run(steps=2)
    assert max(report.metrics["logprob_difference_max"] for report in world.reports) < 1e-4


@virtual
async def test_an_episode_that_fails_is_played_again_and_never_a_zero(folder: Path) -> None:
    tries = Counter[str]()

    async def play(episodes: Episodes, name: str, problem: Problem) -> Outcome:
        tries[name] += 1
        if name == "p0/1" and tries[name] < 3:
            await episodes.turn(name, len(episodes.held(name)), [5], limit=4)
            return failed("the tool crashed")
        return await three_turns(episodes, name, problem)

    world = World(folder, play)
    await world.run(steps=2)
    assert tries["p0/1"] == 3
    again = [event for event in world.journal.events if event[0] == "again"]
    assert again == [("again", "p0/1", "the tool crashed")] * 2
    rows = {row.name: row for step in world.rows for group in step for row in group}
    assert turns_of(rows["p0/1"])[0][0] == [2, 3], "nothing of the tries before is left"


@virtual
async def test_a_group_whose_episode_keeps_failing_is_released_and_its_prompt_owed_once(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, problem: Problem) -> Outcome:
        if name.startswith("p1"):
            raise RuntimeError("no sandbox")
        return await three_turns(episodes, name, problem)

    world = World(folder, play)
    await world.run(steps=2)
    released = [event[1:] for event in world.journal.events if event[0] == "release"]
    assert released == [("p1", "no sandbox", True), ("p1.1", "no sandbox", False)]
    assert not any(row.name.startswith("p1/") for step in world.rows for group in step for row in group)


@virtual
async def test_tokens_of_a_truncated_episode_are_not_trained_and_its_reward_counts(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, problem: Problem) -> Outcome:
        outcome = await three_turns(episodes, name, problem)
        return truncated(0.0, "no turns left") if name.endswith("/0") else outcome

    world = World(folder, play, staleness=0)
    await world.run(steps=1)
    rows = [row for group in world.rows[0] for row in group]
    assert [row.masked for row in rows] == [row.name.endswith("/0") for row in rows]
    assert world.reports[0].reward == pytest.approx(sum(row.reward for row in rows) / len(rows))


@virtual
async def test_a_branch_is_trained_as_a_part_of_its_episode(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, problem: Problem) -> Outcome:
        turn = await episodes.turn(name, len(episodes.held(name)), [2, 3], limit=6)
        held = episodes.held(name)
        at = len(prompt_of(int(str(problem.prompt)))) + 1
        edited = episodes.branch(name, shared=at)
        other = await episodes.turn(edited, at, [9, 9, *answer(turn.tokens)], limit=6)
        last = await episodes.turn(name, len(held), answer(other.tokens), limit=6)
        return scored(reward_of(turn.tokens + other.tokens + last.tokens))

    world = World(folder, play)
    await world.run(steps=3)
    for step in world.rows:
        for group in step:
            assert [row.name.partition("/")[2] for row in group] == ["0", "0~1", "1", "1~1", "2", "2~1"]
            for main, branch in zip(group[::2], group[1::2], strict=True):
                assert main.episode == branch.episode == main.name
                assert main.reward == branch.reward
                assert branch.spans[0] == (GIVEN, 1 + 2 + 3)
                assert branch.tokens[0] == main.tokens[0] == 2
                assert made_count(branch.spans) <= 6


@virtual
async def test_an_episode_whose_first_branch_has_no_turn_ends_no_run(folder: Path) -> None:
    """It divided by the length of that branch, which is 0, when the version was over."""

    async def play(episodes: Episodes, name: str, _: Problem) -> Outcome:
        other = episodes.branch(name, shared=1)
        turn = await episodes.turn(other, 1, [4, 5], limit=6)
        return scored(reward_of(turn.tokens))

    world = World(folder, play, staleness=0)
    await world.run(steps=2)
    assert {row.name.partition("/")[2] for step in world.rows for group in step for row in group} == {
        "0~1",
        "1~1",
        "2~1",
    }


@virtual
async def test_a_call_that_is_repeated_joins_the_turn_and_samples_nothing(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, _: Problem) -> Outcome:
        at = len(episodes.held(name))
        first, second = await asyncio.gather(
            episodes.turn(name, at, [2, 3], limit=6), episodes.turn(name, at, [2, 3], limit=6)
        )
        assert first == second == await episodes.turn(name, at, [2, 3], limit=6)
        return scored(reward_of(first.tokens))

    world = World(folder, play)
    await world.run(steps=1)
    turns = Counter(event[1] for event in world.journal.events if event[0] == "turn")
    assert set(turns.values()) == {1}


@virtual
async def test_a_turn_without_room_says_so(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, _: Problem) -> Outcome:
        turn = await episodes.turn(name, len(episodes.held(name)), [2] * 10, limit=2)
        full = await episodes.turn(name, len(episodes.held(name)), [2] * 7, limit=2)
        assert (full.tokens, full.reason) == ([], "capacity")
        return scored(reward_of(turn.tokens) + len(name) % 2)

    world = World(folder, play, max_given=16)
    await world.run(steps=1)


@virtual
async def test_what_a_step_waits_for_names_the_episode_and_how_long_its_environment_has_had_it(folder: Path) -> None:
    async def play(episodes: Episodes, name: str, problem: Problem) -> Outcome:
        if name == "p0/1":
            turn = await episodes.turn(name, len(episodes.held(name)), [2, 3], limit=6)
            await asyncio.sleep(50)
            return scored(reward_of(turn.tokens))
        return await three_turns(episodes, name, problem)

    async def look(world: World) -> None:
        await asyncio.sleep(20)
        assert world.control.watch.waits_for().startswith("1 of 2 groups: p0 (episode p0/1: environment, 20 s)")
        world.episodes.doing = lambda episode: f"tool search of {episode}"
        assert "p0 (episode p0/1: tool search of p0/1, 20 s)" in world.control.watch.waits_for()

    world = World(folder, play, staleness=0)
    await world.run(1, look)
