"""The steps of a run, as they are written to ``metrics.jsonl``.

steps = Steps(folder / "run", print, before=None)   # a file that will name the run's directory
steps.look()                                        # calls it with each new line
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.run.directory import RunDirectory


class Steps:
    def __init__(self, run: Path, on_step: Callable[[dict[str, Any]], object] | None, before: Path | None) -> None:
        """``before``: the lines of a run that is resumed, which are left out."""
        self._run = run
        self._on_step = on_step
        self._metrics: Path | None = None
        self._at = before.read_bytes().rfind(b"\n") + 1 if before is not None and before.is_file() else 0

    @property
    def known(self) -> bool:
        """Whether there is a run."""
        return self._run.is_file()

    def look(self) -> None:
        if self._on_step is None or not self._found():
            return
        assert self._metrics is not None
        with self._metrics.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                self._on_step(json.loads(line))

    def _found(self) -> bool:
        if self._metrics is None and self.known:
            self._metrics = RunDirectory(Path(self._run.read_text())).metrics
        return self._metrics is not None and self._metrics.is_file()
