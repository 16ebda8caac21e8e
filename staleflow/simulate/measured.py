"""What a finished run measured, for the planner: how long replies were, and what training and decoding cost.

A run directory holds ``metrics.jsonl``, one object for each training step with ``lengths`` (output tokens of the
step's trajectories, group after group), ``prompt_tokens``, ``tokens`` and ``train_s``; ``summary.json``; and perhaps
``profile.json`` as ``staleflow profile`` writes it. What is missing or cannot be true is told in one line.

    run = read_run("runs/7")
    run.apply(setting)      # the setting with the run's lengths and costs
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import ConfigError
from staleflow.simulate.options import read_profile
from staleflow.simulate.presets import Setting
from staleflow.simulate.workload import Trace, Workload

SIZES = ("groups", "group_size", "staleness", "instances", "training_gpus")
"""What ``summary.json`` may say about the run's size."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    lengths: tuple[int, ...]
    """Output tokens of every trained trajectory, in the order of training."""
    prompt_tokens: int
    """Of a trajectory, in the mean."""
    per_token_s: float
    """Seconds of training for each prompt or output token, on all training GPUs together."""
    sizes: Mapping[str, int]
    cost: CostModel | None
    """What engine steps cost; None if the run has no profile."""

    def apply(self, base: Setting) -> Setting:
        """The base with everything that the run knows. Without a profile, engine steps cost what they cost there."""
        setting = replace(base, **self.sizes)
        size = setting.group_size
        groups = [self.lengths[start : start + size] for start in range(0, len(self.lengths), size)]
        trace = Trace((self.prompt_tokens,) * len(groups), tuple(groups))
        return replace(
            setting,
            name="measured run",
            workload=Workload(trace, max_tokens=max(self.lengths)),
            trainer_per_token_gpu_s=self.per_token_s * setting.training_gpus,
            rollout=self.cost or setting.rollout,
        )


def read_run(name: str) -> MeasuredRun:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"{name} is not a run directory; give the one that staleflow train wrote")
    lengths: list[int] = []
    prompt_tokens, tokens, seconds = 0.0, 0.0, 0.0
    for number, step in enumerate(_steps(folder / "metrics.jsonl"), 1):
        where = f"{folder / 'metrics.jsonl'}, line {number}"
        lengths += _lengths(step, where)
        prompt_tokens += _number(step, "prompt_tokens", where)
        tokens += _number(step, "tokens", where)
        seconds += _number(step, "train_s", where)
    if not seconds or not tokens:
        raise ConfigError(f"{folder / 'metrics.jsonl'}: no step took any time to train; give a run that has trained")
    profile = folder / "profile.json"
    return MeasuredRun(
        lengths=tuple(lengths),
        prompt_tokens=max(1, round(prompt_tokens / len(lengths))),
        per_token_s=seconds / (tokens + prompt_tokens),
        sizes=_sizes(folder / "summary.json"),
        cost=read_profile(str(profile)) if profile.exists() else None,
    )


def _steps(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a run directory that has one") from error
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
        except ValueError:
            if number == len(lines) and steps:
                break  # the run died while it wrote this one
            raise ConfigError(f"{path}, line {number}: not JSON; give the file as the run wrote it") from None
        if not isinstance(step, dict):
            raise ConfigError(f"{path}, line {number}: not an object; give the file as the run wrote it")
        if "lengths" in step:
            steps.append(step)
    if not steps:
        raise ConfigError(f"{path} holds no training step with lengths; give a run that has trained")
    return steps


def _lengths(step: Mapping[str, Any], where: str) -> list[int]:
    found = step["lengths"]
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{where}: lengths is {found!r}; it must list the output tokens of each trajectory")
    for length in found:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ConfigError(f"{where}: a length is {length!r}; it must be a whole number of tokens from 1 upwards")
    return found


def _number(step: Mapping[str, Any], key: str, where: str) -> float:
    value = step.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        seen = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{where}: {key} {seen}; it must be a number, 0 or more")
    return float(value)


def _sizes(path: Path) -> dict[str, int]:
    """As far as the summary says."""
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give the directory of a run that has ended") from error
    if not isinstance(summary, dict):
        raise ConfigError(f"{path} is not an object; give the file as the run wrote it")
    return {key: summary[key] for key in SIZES if isinstance(summary.get(key), int) and summary[key] >= 0}
