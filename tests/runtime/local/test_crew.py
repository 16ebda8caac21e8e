"""When an engine of the user's own that fails before its first token ends the run."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import structs

from staleflow.errors import RunError
from staleflow.runtime.local.crew import Crew
from staleflow.runtime.local.hearing import Hearing
from staleflow.runtime.watchdog import Watchdog
from staleflow.types import Broken, Cell, Costs, Evaluated, Report

NAMES = ("i0", "i1", "evaluator")


def crew_of(standby: bool = False) -> tuple[Crew, Callable[[str], bool]]:
    """The second says that the engine of a process has failed so; whether it is started again."""
    site: Any = SimpleNamespace(directory=None)
    crew = Crew(site, None, {}, Watchdog(), lambda *_: None, standby=standby)  # type: ignore[arg-type]
    crew.optional.add("evaluator")

    def fails(name: str) -> bool:
        child: Any = SimpleNamespace(name=name, broken=False)
        crew.children[name] = child
        crew._hear(child, lambda *_: None, Broken("my:engine failed", first=True))
        assert child.broken == crew.failure.done()
        return not child.broken

    return crew, fails


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_never_worked_is_not_started_six_times(name: str) -> None:
    async def main() -> None:
        crew, fails = crew_of()
        assert not fails(name)
        with pytest.raises(RunError, match=f"^{name}: my:engine failed$"):
            crew.failure.result()

    asyncio.run(main())


@pytest.mark.parametrize("standby", [True, False])
def test_engines_that_have_worked_are_given_up_only_if_the_next_one_fails_as_well(standby: bool) -> None:
    async def main() -> None:
        crew, fails = crew_of(standby)
        if not standby:  # otherwise they worked before this control plane
            crew.engine_works("evaluator")
        assert fails("i0")
        assert fails("i1"), "another instance"
        crew.engine_works("i0")
        assert fails("i0"), "one that made tokens is between the two"
        assert not fails("i0")

    asyncio.run(main())


def test_tokens_and_an_evaluation_are_heard_as_engines_that_work() -> None:
    """An engine that failed an hour later would have ended the run as one that never worked."""
    run, child = MagicMock(training=False), MagicMock()
    child.name = "i0"
    run.instances = {"i0": MagicMock(child=child)}
    report = Report("i0", 1, MagicMock(), MagicMock())
    Hearing(run).instance(child, report)
    assert not run.crew.engine_works.called, "it has made no token"
    Hearing(run).instance(child, structs.replace(report, costs=Costs([Cell(False, 2, 2, 20, 0, 0.1, 0.1)])))
    run.crew.engine_works.assert_called_once_with("i0")
    Hearing(run).evaluator(child, Evaluated(0, 0.5, 1.0, 0, ""))
    run.crew.engine_works.assert_called_with("evaluator")


def test_an_evaluator_does_not_end_a_run_whose_engines_work() -> None:
    async def main() -> None:
        crew, fails = crew_of()
        crew.engine_works("i0")
        assert all(fails("evaluator") for _ in range(9))

    asyncio.run(main())
