"""A run that grows under the eyes of a page: a recorded one, written again bit by bit into another directory.

growing = Growing(recorded, tmp_path / "live")
growing.grow(200)           # the next 200 events, and what else was recorded up to their time
growing.over                # nothing is left
"""

from __future__ import annotations

import json
from pathlib import Path

from staleflow.dash.replica import SETTINGS
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events
from staleflow.servers.durable import DurableJournal


class Growing:
    def __init__(self, source: RunDirectory, path: Path, settings: tuple[int, ...]) -> None:
        path.mkdir()
        self.directory = RunDirectory(path)
        self.directory.config_file.write_text(source.config_file.read_text())
        self._events = list(read_events(source))
        self._lines = {
            target: source_file.read_text().splitlines(keepends=True)
            for source_file, target in ((source.metrics, self.directory.metrics), (source.fleet, self.directory.fleet))
        }
        self._journal = DurableJournal(self.directory.journal(), threaded=False)
        self._journal.belongs_to(dict(zip(SETTINGS, settings, strict=True)))

    @property
    def over(self) -> bool:
        return not self._events

    def grow(self, count: int) -> None:
        now, self._events = self._events[:count], self._events[count:]
        stamped = -1.0
        for time, event in now:
            if time > stamped:
                self._journal.stamp(time)
                stamped = time
            self._journal.append(event)
        self._journal.commit()
        for path, lines in self._lines.items():
            with path.open("a") as file:
                while lines and (json.loads(lines[0])["time"] <= stamped or not self._events):
                    file.write(lines.pop(0))

    def close(self) -> None:
        self._journal.close()
