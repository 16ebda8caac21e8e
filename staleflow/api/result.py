"""What came of a run, read from its directory.

result = Result(Path("runs/latest"))
result.reward, result.checkpoint, result.metrics[-1]["loss"]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import newest
from staleflow.run.directory import RunDirectory
from staleflow.run.samples import Sample, read_samples


@dataclass(frozen=True)
class Result:
    run: Path
    """The run's directory."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``."""
        return json.loads(RunDirectory(self.run).summary.read_text(encoding="utf-8"))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """``metrics.jsonl``: one row for each step."""
        return read_metrics(RunDirectory(self.run).metrics)

    @property
    def samples(self) -> list[Sample]:
        """Some responses of every step, with prompts and rewards; of a long run, the latest 64 MiB."""
        return list(read_samples(RunDirectory(self.run).samples))

    @property
    def reward(self) -> float | None:
        """The mean reward on held-out problems at the end; None if they could not be evaluated."""
        return self.summary["accuracy_final"]

    @property
    def accuracy(self) -> float | None:
        """The same, if all rewards on held-out problems were 0 or 1; otherwise None."""
        return self.reward if self.summary["binary"] else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint: a folder in Hugging Face format."""
        return newest(RunDirectory(self.run).checkpoints)

    @property
    def best(self) -> Path | None:
        """The version with the best evaluation, as a model without the trainer's state."""
        folder = RunDirectory(self.run).checkpoints / "best"
        return folder if folder.is_dir() else None

    @property
    def interrupted(self) -> bool:
        return bool(self.summary["interrupted"])


class Interrupted(KeyboardInterrupt):  # an event, not a mistake
    """Ctrl-C: the run has ended in good order, with a checkpoint to resume from."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"continue with staleflow.train(..., resume={str(result.run)!r})")
        self.result = result
