"""What the rules of ``bench/agents_turns.py`` let happen."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import agents_turns
from bench.agents_turns import GIVEN, LONGEST_S, Together, seconds, young


def test_nobody_begins_a_turn_before_all_have_ended_the_one_before() -> None:
    begun: list[tuple[int, int]] = []

    async def episode(together: Together, me: int, turns: int) -> None:
        for turn in range(1, turns + 1):
            await together.begins(me, turn)
            begun.append((turn, me))
            for _ in range(me + 1):  # a turn takes long enough for all to come
                await asyncio.sleep(0)
        together.leaves(me)

    async def main() -> None:
        together = Together()
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for me, turns in enumerate((4, 2, 3)):
                group.create_task(episode(together, me, turns))

    asyncio.run(main())
    assert [turn for turn, _ in begun] == sorted(turn for turn, _ in begun)
    assert len(begun) == 9


def test_a_tool_takes_the_same_time_for_the_same_call() -> None:
    times = [seconds([at, 5], 1) for at in range(2_000)]
    assert times[7] == seconds([7, 5], 1)
    assert sum(times) / len(times) == pytest.approx(agents_turns.MEAN_S, rel=0.1)
    assert max(times) <= LONGEST_S


def test_groups_with_an_old_token_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_turns, "newest", 0)

    def group(*versions: int) -> Any:
        return SimpleNamespace(members=[SimpleNamespace(spans=[(version, 3), (GIVEN, 2)]) for version in versions])

    assert [young(group(*each)) for each in ((0, 1), (3, 4), (2, 4), (1, 4), (1, 1), (4, 4))] == [
        None, None, None, "too old", "too old", None
    ]  # fmt: skip
