"""Checkpoints are due by steps and by time; one that cannot be made is a warning, asked for again if it helps."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from staleflow.config.schema import Checkpoints
from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.saving import Saving
from staleflow.types import Saved


class Desk:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.directory = RunDirectory(tmp_path)
        self.directory.checkpoints.mkdir()
        self.sent: list[str] = []
        self.warned: list[str] = []
        self.saving = Saving(
            self.directory,
            Checkpoints(**options),
            dict,
            lambda folder, _also: self.sent.append(folder.name),
            lambda why, _line: self.warned.append(why),
        )

    def made(self, version: int) -> None:
        folder = self.directory.checkpoint(version)
        folder.mkdir()
        (folder / "model").write_bytes(b"0" * 1000)
        self.saving.heard(Saved(str(folder), version))


def test_a_run_is_saved_by_time_without_being_asked_to(tmp_path: Path) -> None:
    saving = Desk(tmp_path).saving
    saving.begin(100.0)
    assert not saving.due(7, 100.0 + 599)
    assert saving.due(7, 100.0 + 600)
    saving.periodic(7, 700.0)
    assert not saving.due(8, 1299.0)


@pytest.mark.parametrize("why", ["No space left on device", ""])
def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path: Path, why: str) -> None:
    async def main() -> None:
        desk = Desk(tmp_path, every=2)
        assert desk.saving.due(4, 0.0)
        asked = desk.saving.ask(4)
        desk.saving.heard(Saved(str(desk.directory.checkpoint(4)), 4, why))
        assert await asked.wait() == why
        assert desk.warned == (["not written"] if why else [])

    asyncio.run(main())


def test_no_checkpoint_is_begun_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    desk.made(1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    desk.saving.periodic(2, 0.0)
    assert (desk.sent, desk.warned) == ([], ["no room"])


def test_what_a_dead_trainer_was_asked_for_is_asked_of_the_next_if_it_can_still_make_it(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(tmp_path)
        older, newer = desk.saving.ask(4), desk.saving.ask(5)
        desk.saving.trainer_back(5)
        assert desk.sent == ["step-000004", "step-000005", "step-000005"]
        assert await older.wait()
        desk.made(5)
        assert await newer.wait() == ""

    asyncio.run(main())


def test_only_the_latest_stay(tmp_path: Path) -> None:
    desk = Desk(tmp_path, keep=2)
    for version in range(1, 6):
        desk.made(version)
    assert sorted(each.name for each in desk.directory.checkpoints.iterdir()) == ["step-000004", "step-000005"]
