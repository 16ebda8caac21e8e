"""Bound 0 with three turns equals a plain synchronous loop, also where something dies in the middle of a turn."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.fakes import virtual
from tests.runtime.plain_episodes import Plain, train
from tests.runtime.played import END, STEP_S, Instance, World, prompt_of, save_model
from tests.runtime.test_episodes import TURNS, answer, reward_of, three_turns

STEPS, RATE = 4, 1e-2
Expected = tuple[list[float], list[dict[str, list[int]]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return train(Plain(folder, prompt_of, [2, 3], answer, reward_of, TURNS, 2, 3, 6, END, RATE, 5), STEPS)


async def compare(folder: Path, expected: Expected, between: Callable[[World], Awaitable[None]] | None = None) -> World:
    losses, batches, model = expected
    world = World(folder, three_turns, staleness=0, trainer={"learning_rate": RATE})
    await world.run(STEPS, between)
    trained = [{row.name: row.tokens.tolist() for group in step for row in group} for step in world.rows]
    assert trained == batches
    assert [report.loss for report in world.reports] == pytest.approx(losses, abs=1e-6)
    for mine, other in zip(world.trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)
    return world


def turns(world: World) -> Counter[str]:
    """How often each trajectory was sampled from, by the events."""
    return Counter(event[1] for event in world.journal.events if event[0] == "turn")


@virtual
async def test_bound_0_with_three_turns_equals_the_plain_synchronous_loop(folder: Path, expected: Expected) -> None:
    world = await compare(folder, expected)
    assert set(turns(world).values()) == {TURNS}


async def until(condition: Callable[[], bool]) -> None:
    """In the middle of something, at most a virtual minute from now."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError("it never came to that")


def in_turn(world: World, number: int, step: int = 1) -> Callable[[], bool]:
    """Whether some trajectory of the step has tokens of its turn of this number, and is not done with it."""

    def some() -> bool:
        return world.server.ledger.version == step and any(
            each.state == "running"
            and each.branch is not None
            and len(each.branch.turns) == number
            and bool(each.spans)
            and each.spans[-1][0] >= 0
            for each in world.server
        )

    return some


@pytest.mark.parametrize("number", range(TURNS))
def test_an_instance_that_dies_in_mid_turn_loses_and_repeats_nothing(
    folder: Path, expected: Expected, number: int
) -> None:
    @virtual
    async def killed() -> None:
        async def kill(world: World) -> None:
            await until(in_turn(world, number))
            dead = next(each for each in world.instances if each.worker.held())
            dead.alive = False
            new = Instance(dead.name, folder, world.store, incarnation=1)
            world.instances.append(new)
            world.control.join(new)
            world.tasks.append(asyncio.create_task(new.serve(world)))

        world = await compare(folder, expected, kill)
        assert set(turns(world).values()) == {TURNS}

    killed()


@pytest.mark.parametrize("number", range(TURNS))
def test_a_control_plane_that_dies_in_mid_turn_loses_and_repeats_nothing(
    folder: Path, expected: Expected, number: int
) -> None:
    """Environments die with it and are replayed: what was sampled is in the journal."""

    @virtual
    async def killed() -> None:
        async def kill(world: World) -> None:
            await until(in_turn(world, number))
            world.restart(STEPS)

        world = await compare(folder, expected, kill)
        assert set(turns(world).values()) == {TURNS}
        assert not [event for event in world.journal.events if event[0] == "again"]

    killed()


@pytest.mark.parametrize("number", range(TURNS))
def test_an_environment_that_dies_in_mid_turn_is_replayed(folder: Path, expected: Expected, number: int) -> None:
    @virtual
    async def killed() -> None:
        async def kill(world: World) -> None:
            await until(in_turn(world, number))
            for name in list(world.pool.tasks):
                world.pool.cancel(name)
                attempt = max(each for played, each in world.pool.played if played == name)
                world.episodes.lost(name, attempt)

        world = await compare(folder, expected, kill)
        assert set(turns(world).values()) == {TURNS}
        assert not [event for event in world.journal.events if event[0] == "again"]

    killed()


@virtual
async def test_a_trainer_that_dies_while_environments_play_gets_the_same_groups(
    folder: Path, expected: Expected
) -> None:
    async def kill(world: World) -> None:
        await until(lambda: world.server.ledger.version == 1 and bool(world.server.ledger.taken))
        world.trainer.reset()
        world.control.on_trainer_lost()
        await asyncio.sleep(0.3)
        world.control.on_trainer_back()

    await compare(folder, expected, kill)


@virtual
async def test_an_environment_that_says_something_else_when_it_is_replayed_begins_anew(folder: Path) -> None:
    said = Counter[str]()

    async def forgetful(episodes: Any, name: str, problem: Any) -> Any:
        said[name] += 1
        await episodes.turn(name, len(episodes.held(name)), [2 + said[name]], limit=4)
        return await three_turns(episodes, name, problem)

    async def kill(world: World) -> None:
        await until(in_turn(world, 1, step=0))
        world.restart(2)

    world = World(folder, forgetful, staleness=0)
    await world.run(2, kill)
    again = {event[1:] for event in world.journal.events if event[0] == "again"}
    assert again
    assert {why for _, why in again} == {"its replay differs"}
    for row in (row for step in world.rows for group in step for row in group):
        assert row.tokens[0] == 2 + said[row.name], "what was trained is what its last play said"
