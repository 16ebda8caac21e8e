"""What a finished run measured, for planning and predicting: how long replies were, and what everything cost.

A run directory holds ``metrics.jsonl``, one object for each training step with ``lengths`` (output tokens of the
step's trajectories, group after group), ``prompt_tokens``, ``tokens`` and ``train_s``, and perhaps which ``prompts``
these were and which of them gave a ``signal``; ``summary.json``; and perhaps ``profile.json`` as ``staleflow profile``
and ``staleflow train`` write it. What is missing is left as it is; what cannot be true is told in one line.

    run = read_run("runs/7")
    run.apply(setting)      # the setting with the run's lengths and costs, for processes that share cores as these did
    run.alone(setting)      # the same for processes with a core each
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from staleflow.commands.options import read_profile
from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.simulate.presets import Setting
from staleflow.simulate.workload import Trace, Workload
from staleflow.study.shared_cores import Shares

SIZES = (
    *("groups", "group_size", "staleness", "redundancy", "extra_members", "instances", "training_gpus"),
    *("kv_tokens", "max_running", "chunk"),
)
"""What ``summary.json`` may say about the run's size."""
TIMES = ("cycle_s", "pull_s", "report_s", "reward_s", "finish_s")
"""And about how long things took."""
LEAST_STEPS = 8
"""With fewer, what training costs by the step cannot be told from what it costs by the token."""


@dataclass(frozen=True, slots=True)
class Training:
    """Seconds of training, on all training GPUs together."""

    per_token_s: float
    """For each prompt or output token, whether it teaches or not."""
    fixed_s: float = 0.0
    """For each step."""
    per_taught_token_s: float = 0.0
    """For each token of the groups that teach, if only those cost anything."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    lengths: tuple[int, ...]
    """Output tokens of every trained trajectory, in the order of training."""
    prompt_tokens: int
    """Of a trajectory, in the mean."""
    training: Training
    sizes: Mapping[str, int]
    cost: CostModel | None
    """What engine steps cost; None if the run has no profile."""
    times: Mapping[str, float] = field(default_factory=dict[str, float])
    strategies: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompts: tuple[int, ...] = ()
    """Which prompt each group was made from, if that is known."""
    signal: tuple[bool, ...] = ()
    """Whether each group taught anything."""
    order: tuple[int, ...] = ()
    """The places of the groups, by their prompts."""
    shares: Shares | None = None
    """How much of the cores its processes had."""

    def apply(self, base: Setting) -> Setting:
        """The base with everything that the run knows. Without a profile, engine steps cost what they cost there."""
        setting, times = replace(base, **self.sizes), self.times
        groups = self.groups(setting.group_size)
        trace = Trace((self.prompt_tokens,) * len(groups), tuple(groups))
        if times.get("pull_s"):
            setting = replace(setting, link_bandwidth=setting.weight_bytes / times["pull_s"])
        return replace(
            setting,
            name="measured run",
            workload=Workload(trace, max_tokens=max(self.lengths)),
            trainer_per_token_gpu_s=self.training.per_token_s * setting.training_gpus,
            trainer_fixed_s=self.training.fixed_s,
            push_s=times.get("finish_s", setting.push_s),
            reward_s=times.get("report_s", 0.0) + times.get("reward_s", setting.reward_s),
            cycle_s=times.get("cycle_s") or setting.cycle_s,
            rollout=self.cost or setting.rollout,
            strategies=replace(setting.strategies, **self.strategies),
        )

    def alone(self, base: Setting) -> Setting:
        """As ``apply``, but what is computed costs what it would on a core of its own: its CPU seconds."""
        setting, shares = self.apply(base), self.shares
        if shares is None:
            raise ConfigError("the run does not say what CPU time its processes had; give one made by staleflow train")
        per_token_s = self.training.per_taught_token_s or self.training.per_token_s
        return replace(
            setting,
            trainer_per_token_gpu_s=per_token_s * shares.trainer_cpu * setting.training_gpus,
            trainer_fixed_s=setting.trainer_fixed_s * shares.trainer_cpu,
            rollout=setting.rollout.scaled(shares.instance_cpu),
        )

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """Lengths by group, in the order of their prompts: short ones are trained first, but not asked first."""
        found = [self.lengths[start : start + size] for start in range(0, len(self.lengths), size)]
        return [found[at] for at in self.order] if len(self.order) == len(found) else found

    def teaches(self, prompt: int) -> bool:
        """Whether the group in this place of ``groups``, which come round again and again, costs training."""
        if not self.training.per_taught_token_s:
            return True
        return self.signal[self.order[prompt % len(self.order)]]


def read_run(name: str) -> MeasuredRun:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"{name} is not a run directory; give the one that staleflow train wrote")
    steps = _steps(folder / "metrics.jsonl")
    lengths: list[int] = []
    prompts: list[int] = []
    signal: list[bool] = []
    for number, step in enumerate(steps, 1):
        where = f"{folder / 'metrics.jsonl'}, line {number}"
        lengths += _lengths(step, where)
        prompts += _listed(step, "prompts", int, where)
        signal += _listed(step, "signal", bool, where)
        for key in ("prompt_tokens", "tokens", "train_s"):
            _number(step, key, where)
    if not sum(step["train_s"] for step in steps) or not sum(step["tokens"] for step in steps):
        raise ConfigError(f"{folder / 'metrics.jsonl'}: no step took any time to train; give a run that has trained")
    training = training_costs(steps)
    if not len(prompts) == len(signal) > 0:  # nobody knows which groups they are
        training = replace(training, per_taught_token_s=0.0)
    summary = _summary(folder / "summary.json")
    profile = folder / "profile.json"
    return MeasuredRun(
        lengths=tuple(lengths),
        prompt_tokens=max(1, round(sum(step["prompt_tokens"] for step in steps) / len(lengths))),
        training=training,
        sizes=_sizes(summary),
        cost=read_profile(str(profile)) if profile.exists() else None,
        times={key: _number(summary, key, str(folder / "summary.json")) for key in TIMES if key in summary},
        strategies=_strategies(summary, folder / "summary.json"),
        prompts=tuple(prompts),
        signal=tuple(signal),
        order=tuple(sorted(range(len(prompts)), key=prompts.__getitem__)),
        shares=_shares(summary),
    )


def training_costs(steps: Sequence[Mapping[str, Any]]) -> Training:
    """What a step and what a token costs. The first step is left out if there are enough: it is slower."""
    steps = steps[1:] if len(steps) > LEAST_STEPS else steps
    everything = [step["tokens"] + step["prompt_tokens"] for step in steps]
    seconds = [step["train_s"] for step in steps]
    if len(steps) < LEAST_STEPS:
        return Training(sum(seconds) / sum(everything))
    fixed_s, _, miss = line(everything, seconds)
    taught = [_taught(step) for step in steps]
    per_taught = 0.0
    if any(taught) and taught != everything:
        fewer_fixed_s, fewer_slope, fewer_miss = line(taught, seconds)
        if fewer_miss < miss:
            fixed_s, per_taught = fewer_fixed_s, fewer_slope
    return Training((sum(seconds) - len(steps) * fixed_s) / sum(everything), fixed_s, per_taught)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Seconds at size 0, seconds for each unit, and the squared rest. If larger is not slower, all is by unit."""
    mean, mean_s = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    spread = sum((size - mean) ** 2 for size in sizes)
    slope = sum((size - mean) * each for size, each in zip(sizes, seconds, strict=True)) / spread if spread else 0.0
    if not 0 < slope < mean_s / mean:
        slope = mean_s / mean
    fixed = max(0.0, mean_s - slope * mean)
    return fixed, slope, sum((fixed + slope * size - each) ** 2 for size, each in zip(sizes, seconds, strict=True))


def _taught(step: Mapping[str, Any]) -> float:
    """Tokens of the groups that teach, their prompts included."""
    groups = len(step.get("signal", ())) or step.get("groups", 0)
    idle = step.get("groups_without_signal", 0)
    share = 1 - idle / groups if groups else 1.0
    return step["tokens"] - step.get("tokens_without_signal", 0) + step["prompt_tokens"] * share


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


def _listed(step: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    found = step.get(key, [])
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise ConfigError(f"{where}: {key} is {found!r}; it must be a list, as the run wrote it")
    return found


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give the directory of a run that has ended") from error
    if not isinstance(summary, dict):
        raise ConfigError(f"{path} is not an object; give the file as the run wrote it")
    return summary


def _sizes(summary: Mapping[str, Any]) -> dict[str, int]:
    """As far as the summary says."""
    return {key: summary[key] for key in SIZES if isinstance(summary.get(key), int) and summary[key] >= 0}


def _strategies(summary: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = summary.get("strategies", {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: strategies is {found!r}; give the file as the run wrote it")
    return {each.name: found[each.name] for each in fields(Strategies) if each.name in found}


def _shares(summary: Mapping[str, Any]) -> Shares | None:
    """None where the summary does not have it all, or nobody worked."""
    cpu_s = summary.get("cpu_s", {})
    try:
        return Shares(
            trainer_cpu=min(1.0, cpu_s["trainer"] / summary["trainer_busy_s"]),
            instance_cpu=min(1.0, float(summary["instance_cpu_share"])),
            trainer_busy=summary["trainer_busy_s"] / summary["wall_s"],
            instance_busy=1 - summary["instance_idle"],
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
