"""The best version so far by its evaluation, as a model in Hugging Face format: ``checkpoints/best``.

    best = Best(run / "checkpoints" / "best", model_folder, figure="reward")
    why = best.offer(evaluated, engine.weights())       # empty, or why it could not be written

It has the weights in the precision of the engines, and nothing to resume from. ``best.json`` says which version it is,
``checksums.json`` whether it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from staleflow.errors import line_of
from staleflow.training.checksums import seal, sync
from staleflow.types import Evaluated

ABOUT = "best.json"
DRAFT, OLD = ".draft-best", ".old-best"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of the base model that go along: configuration, tokenizer, chat template."""


class Best:
    def __init__(self, folder: Path, model: Path, figure: str) -> None:
        self._folder = folder
        self._model = model
        self._figure = figure
        self._value: float | None = None
        old = folder.with_name(OLD)
        if old.is_dir() and not folder.exists():  # an earlier attempt died between the two renames
            os.rename(old, folder)
        shutil.rmtree(folder.with_name(DRAFT), ignore_errors=True)
        if (about := folder / ABOUT).is_file():  # of an earlier attempt of the run
            self._value = json.loads(about.read_text())["value"]

    def offer(self, evaluated: Evaluated, weights: Mapping[str, torch.Tensor]) -> str:
        """Keep this version if it is better than all before it."""
        value = evaluated.figures.get(self._figure)
        if value is None or (self._value is not None and value <= self._value):
            return ""
        try:
            self._write(evaluated.version, value, weights)
        except OSError as error:
            return f"the best checkpoint, version {evaluated.version}, could not be written: {line_of(error)}"
        finally:
            for left in (DRAFT, OLD):
                shutil.rmtree(self._folder.with_name(left), ignore_errors=True)
        self._value = value
        return ""

    def _write(self, version: int, value: float, weights: Mapping[str, torch.Tensor]) -> None:
        draft = self._folder.with_name(DRAFT)
        draft.mkdir()
        for pattern in COPIED:
            for file in self._model.glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):
                    shutil.copy(file, draft / file.name)
        # Views of one large tensor are saved one by one, without what they share.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        save_file(tensors, draft / "model.safetensors", {"format": "pt"})
        config: dict[str, Any] = json.loads((draft / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        (draft / ABOUT).write_text(json.dumps({"version": version, "figure": self._figure, "value": value}))
        seal(draft)
        if self._folder.is_dir():
            os.rename(self._folder, self._folder.with_name(OLD))
        os.rename(draft, self._folder)
        sync(self._folder.parent)
