"""The two moments of a resume at which a run that is not what it was is refused: before anything heavy is loaded, and
before anything is written.

    with directory.owned():
        choice = resumable(directory, config)                                       # reads checkpoints, config.yaml
        checkpoint = prepared(directory, config, choice, task.fingerprint, model)   # reads the base model, then writes
"""

from __future__ import annotations

from pathlib import Path

from staleflow.config import Config
from staleflow.errors import RunError
from staleflow.run.checkpoints import Choice, choose, set_aside
from staleflow.run.directory import RunDirectory
from staleflow.run.origin import refuse_other_origin, refuse_other_settings


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
    """The checkpoint, once data and base model are those that it was made with. The directory is ready then."""
    refuse_other_origin(choice.folder or directory.path, config, data, model)
    set_aside(choice)
    directory.write_config(config)
    return choice.folder
