"""What a resume will do, said before anything is loaded; and the two moments at which a run that is not what it was is
refused: before anything heavy is loaded, and before anything is written.

    outlook(directory, config).text()       # how far the run is; reads names, metrics.jsonl and summary.json
    with directory.owned():
        choice = resumable(directory, config)                                       # reads checkpoints, config.yaml
        checkpoint = prepared(directory, config, choice, task.fingerprint, model)   # reads the base model, then writes
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from staleflow.config import Config
from staleflow.errors import RunError, StaleFlowError
from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import Choice, choose, newest, set_aside, wrong_with
from staleflow.run.continuing import continuing
from staleflow.run.directory import RunDirectory
from staleflow.run.origin import refuse_other_origin, refuse_other_settings


@dataclass(frozen=True, slots=True)
class Outlook:
    directory: RunDirectory
    made: int
    """Steps, about: the journal may end somewhat earlier or later."""
    steps: int
    checkpoint: Path | None
    finished: bool
    """Whether there is nothing left to do: no step, no checkpoint, no evaluation, no summary."""
    more: str
    """How to train on."""

    def text(self) -> str:
        run = self.directory.path
        if self.finished:
            made = f"all its {self.made} steps" if self.made == self.steps else f"{self.made} steps already"
            return f"{run} has made {made}: nothing is left to do, and nothing was changed. To train on: {self.more}"
        sources = [f"checkpoint {self.checkpoint.name}"] if self.checkpoint is not None else []
        sources += ["the journal"] if self.directory.journals else []
        left = max(0, self.steps - self.made)
        what = (
            f"{left} {'is' if left == 1 else 'are'} left"
            if left
            else "its end is left: checkpoint, evaluation and summary"
        )
        return f"resumes {run}: {self.made} of {self.steps} steps are made, {what}; from {' and '.join(sources)}"


def outlook(directory: RunDirectory, config: Config) -> Outlook:
    """How far the run is. Nothing is written."""
    checkpoint = newest(directory.checkpoints)
    saved = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
    try:
        logged = max((row["step"] + 1 for row in read_metrics(directory.metrics)), default=0)
    except (OSError, StaleFlowError, KeyError, TypeError):
        logged = 0  # the journal will tell
    finished = (
        checkpoint is not None
        and saved >= config.steps
        and _ended_at(directory) == saved
        and not directory.running
        and not wrong_with(checkpoint)
    )
    more = continuing(directory.path, config.reward, f"steps={2 * max(1, saved)}")
    if config.training.schedule != "constant":  # of which the number of steps is a part
        more = f"a new run, with model={checkpoint}"
    return Outlook(directory, saved if finished else max(saved, logged), config.steps, checkpoint, finished, more)


def _ended_at(directory: RunDirectory) -> int | None:
    """The step of the summary, if the run was not interrupted."""
    try:
        summary = json.loads(directory.summary.read_text())
        return None if summary["interrupted"] else summary["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resumable(directory: RunDirectory, config: Config) -> Choice:
    """The checkpoint to continue from, if there is one yet. ``RunError`` if neither that nor a journal can serve, or if
    the run was made with other settings."""
    choice = choose(directory.checkpoints)
    if choice.folder is None and not directory.journals:
        damaged = "".join(f"; {each.folder.name}: {each.why}" for each in choice.skipped)
        raise RunError(f"{directory.path} has no whole checkpoint to resume from{damaged}: start a new run")
    refuse_other_settings(choice.folder or directory.path, config)
    return choice


def prepared(directory: RunDirectory, config: Config, choice: Choice, data: str, model: Path) -> Path | None:
    """The checkpoint, once data and base model are those that it was made with. What is damaged is out of the way."""
    refuse_other_origin(choice.folder or directory.path, config, data, model)
    set_aside(choice)
    directory.make_folders()
    return choice.folder
