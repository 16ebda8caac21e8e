"""Makes the configured engine; the user's own is held to being one. ::

    engine = make_engine(config.rollout.engine, model_folder, config.engine_options(), config.rollout.engine_arguments)

What an engine of the user's own raises when it is made is a ``ConfigError`` in one line that names its setting: the
next one would fail at the same place. In the place of one that worked (``again``) it is raised as it is: what is the
matter now may pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from staleflow.rollout.engine import Engine
from staleflow.rollout.options import ENGINES, EngineOptions

METHODS = tuple(name for name in vars(Engine) if not name.startswith("_"))


def make_engine(
    name: str, model: str | Path, options: EngineOptions, arguments: Mapping[str, Any], again: bool = False
) -> Engine:
    make = partial(ENGINES.load(name), **arguments)
    if again:
        return make(model, options)
    import torch

    return ENGINES.held(name, make, _check, spared=(MemoryError, torch.OutOfMemoryError))(model, options)


def _check(found: Any, model: str | Path, options: EngineOptions) -> None:
    del model, options
    if missing := [each for each in METHODS if not hasattr(found, each)]:
        raise ValueError(
            f"an object of the type {type(found).__name__} without {', '.join(missing)}: write what Engine in "
            "staleflow/rollout/engine.py has"
        )
