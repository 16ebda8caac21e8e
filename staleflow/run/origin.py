"""What a checkpoint belongs to: the settings, the data and the base model that its run was made with.

    also = {ORIGIN: origin_of(config, task.fingerprint, model)}      # goes into the checkpoint
    refuse_other_settings(checkpoint, config)                        # RunError, with the difference
    refuse_other_origin(checkpoint, config, task.fingerprint, model)

Checkpoints of earlier releases have no origin: nothing is compared then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.config.resuming import fixed_settings
from staleflow.errors import RunError
from staleflow.files import write_whole
from staleflow.run.directory import RunDirectory
from staleflow.tasks.options import EMBEDDED, SMOLLM

ORIGIN = "origin.json"
WHOLE = 1 << 24
"""Larger files are known by their size and by samples: other weights differ everywhere."""
SAMPLES, SAMPLE = 64, 1 << 16
SHOWN = 4
"""Differences that a message names."""


def origin_of(config: Config, data: str, model: Path) -> bytes:
    """``data`` is the fingerprint of the prompts, ``model`` the folder of the base model."""
    return json.dumps(
        {"settings": fixed_settings(config), "data": data, "model": _model(config, model)}, indent=1
    ).encode()


def write_origin(directory: RunDirectory, origin: bytes) -> None:
    """For a resume before there is a checkpoint."""
    try:
        write_whole(directory.path / ORIGIN, origin.decode())
    except OSError as error:
        raise RunError(f"{directory.path} cannot be written ({error.strerror}): make room") from None


def refuse_other_settings(checkpoint: Path, config: Config) -> None:
    was: dict[str, Any] = _read(checkpoint).get("settings", {})
    now: dict[str, Any] = json.loads(json.dumps(fixed_settings(config)))
    changed = [f"{name} was {was[name]} and is {now[name]}" for name in was if name in now and was[name] != now[name]]
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise RunError(
            f"{checkpoint} was made with other settings than the run's config.yaml has now "
            f"({'; '.join(changed[:SHOWN])}{more}): put them back, or start a new run"
        )


def refuse_other_origin(checkpoint: Path, config: Config, data: str, model: Path) -> None:
    """Data and base model are what they were."""
    saved = _read(checkpoint)
    if not saved:
        return
    instead = f"put it back, or start a new run with model={checkpoint}"
    if saved["data"] != data:
        raise RunError(
            f"{checkpoint} was trained on other data than data.source={config.data.source} has now: {instead}"
        )
    was, now = saved["model"], _model(config, model)
    if changed := sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name)):
        raise RunError(f"{checkpoint} began with another base model ({', '.join(changed[:SHOWN])} changed): {instead}")


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((checkpoint / ORIGIN).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(f"{checkpoint / ORIGIN} is damaged ({error}): restore it, or start a new run") from None


def _model(config: Config, folder: Path) -> dict[str, str]:
    """By file, what it is. Models that are made here by a recipe have it in their names."""
    if config.model in (*EMBEDDED, SMOLLM):
        return {folder.name: ""}
    files = [*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]
    return {file.name: _fingerprint(file) for file in sorted(files) if file.is_file()}


def _fingerprint(path: Path) -> str:
    import xxhash  # comes with what is needed for training

    found = xxhash.xxh3_128()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            found.update(file.read())
        else:
            for at in range(SAMPLES):
                file.seek(at * (size - SAMPLE) // (SAMPLES - 1))
                found.update(file.read(SAMPLE))
    return f"{size}-{found.hexdigest()}"
