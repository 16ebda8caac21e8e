"""What a finished run measured, for planning and predicting: how long responses were, and what everything cost.

A run directory holds ``metrics.jsonl``, one object for each training step with ``lengths`` (output tokens of the
step's trajectories, group after group), ``prompt_tokens``, ``tokens`` and ``train_s``, and perhaps which ``prompts``
these were and which of them gave a ``signal``; ``summary.json``; and perhaps ``profile.json`` as ``staleflow profile``
and ``staleflow train`` write it, and the run's ``config.yaml``. What is missing is left as it is; what cannot be true
is refused in one line.

    run = read_run("runs/7")
    run.setting(["staleness=1"])    # to be simulated: as the run was configured and measured, with changes
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from staleflow.config import Config, load
from staleflow.config.cluster import COEFFICIENTS, takes_time
from staleflow.config.costs import read_profile
from staleflow.config.presets import PAPER
from staleflow.config.text import render_flow
from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.observe.metrics import read_metrics
from staleflow.simulate.setting import Setting, setting_of
from staleflow.simulate.trace import Trace

SIZES = {
    **{name: name for name in ("groups", "group_size", "staleness", "redundancy", "extra_members")},
    **{name: f"rollout.{name}" for name in ("instances", "kv_tokens", "max_running")},
    "training_gpus": "cluster.training_gpus",
    "chunk": "rollout.prefill_tokens",
}
"""What ``summary.json`` may say about the run's size, and which setting that is."""
TIMES = ("cycle_s", "pull_s", "report_s", "reward_s", "finish_s")
"""What it may say about how long things took, in seconds."""
LEAST_STEPS = 8
"""With fewer, the cost of a step cannot be separated from the cost of a token."""


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Seconds of training, on all training GPUs together."""

    per_token_s: float
    """Seconds for each prompt or output token, whether it teaches or not."""
    fixed_s: float = 0.0
    """Seconds for each step."""
    per_taught_token_s: float = 0.0
    """Seconds for each token of the groups that teach, if only those cost anything."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    folder: Path
    lengths: tuple[int, ...]
    """Output tokens of every trained trajectory, in the order of training."""
    prompt_tokens: int
    """Prompt tokens of a trajectory, on average."""
    training: TrainingCosts
    summary: Mapping[str, Any]
    cost: CostModel | None
    """Cost of engine steps; None if the run has no profile."""
    believed: CostModel | None = None
    """What its coordinator believed engine steps to cost; None if the run does not say."""
    times: Mapping[str, float] = field(default_factory=dict[str, float])
    prompts: tuple[int, ...] = ()
    """Which prompt each group was made from, if that is known."""
    signal: tuple[bool, ...] = ()
    """Whether each group taught anything."""
    order: tuple[int, ...] = ()
    """Indices of the groups, sorted by prompt."""

    def setting(self, words: Sequence[str] = (), source: str | None = None) -> Setting:
        """The run to be simulated: ``source`` or its own configuration, what it measured, and ``key=value`` changes."""
        config = self.config(words, source)
        setting = setting_of(config, "measured run", self.trace(config.group_size))
        return replace(setting, believed=self.believed)

    def config(self, words: Sequence[str] = (), source: str | None = None) -> Config:
        own = self.folder / "config.yaml"
        if source is None and own.exists():
            source = str(own)
        known = [_word(SIZES[key], self.summary[key]) for key in SIZES if _is_size(self.summary.get(key))]
        known += [_word(f"strategies.{name}", value) for name, value in self._strategies().items()]
        if source is None:  # as long as the longest of the run
            known += [f"rollout.max_tokens={max(self.lengths)}", f"data.max_prompt_tokens={self.prompt_tokens}"]
        base = load(source, known, default=PAPER)
        return load(source, [*known, *self._costs(base), *words], default=PAPER)

    def _costs(self, base: Config) -> list[str]:
        """What was measured, as settings of the section ``cluster``."""
        times, trainers = self.times, base.cluster.training_gpus
        found: dict[str, Any] = {
            "trainer_per_token_gpu_s": self.training.per_token_s * trainers,
            "trainer_fixed_s": self.training.fixed_s,
            "push_s": times.get("finish_s"),
            "cycle_s": times.get("cycle_s") or None,
            "weight_bytes": times["pull_s"] * base.cluster.link_bandwidth if times.get("pull_s") else None,
            "costs": asdict(self.cost) if self.cost else None,
        }
        if "reward_s" in times or "report_s" in times:
            found["reward_s"] = times.get("report_s", 0.0) + times.get("reward_s", base.cluster.reward_s)
        return [_word(f"cluster.{name}", value) for name, value in found.items() if value is not None]

    def _strategies(self) -> dict[str, Any]:
        found = self.summary.get("strategies", {})
        if not isinstance(found, dict):
            where = self.folder / "summary.json"
            raise ConfigError(f"{where}: strategies is {found!r}: give the file as the run wrote it")
        return {each.name: found[each.name] for each in fields(Strategies) if each.name in found}

    def trace(self, group_size: int) -> Trace:
        """Lengths by group, in the order of their prompts: short ones are trained first, but not started first."""
        groups = [self.lengths[start : start + group_size] for start in range(0, len(self.lengths), group_size)]
        if len(self.order) == len(groups):
            groups = [groups[at] for at in self.order]
        return Trace((self.prompt_tokens,) * len(groups), tuple(groups))


def _word(name: str, value: Any) -> str:
    return f"{name}={render_flow(value)}"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_run(name: str) -> MeasuredRun:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"{name} is not a run directory: give the one that staleflow train wrote")
    path = folder / "metrics.jsonl"
    steps = [row for row in read_metrics(path) if "lengths" in row]
    if not steps:
        raise ConfigError(f"{path} holds no training step with lengths: give a run that has trained")
    lengths: list[int] = []
    prompts: list[int] = []
    signal: list[bool] = []
    for number, step in enumerate(steps, 1):
        where = f"{path}, step {number}"
        lengths += _lengths(step, where)
        prompts += _listed(step, "prompts", int, where)
        signal += _listed(step, "signal", bool, where)
        for key in ("prompt_tokens", "tokens", "train_s"):
            _number(step, key, where)
    if not sum(step["train_s"] for step in steps) or not sum(step["tokens"] for step in steps):
        raise ConfigError(f"{path}: no step took any time to train: give a run that has trained")
    training = training_costs(steps)
    if not len(prompts) == len(signal) > 0:  # which groups they are is not known
        training = replace(training, per_taught_token_s=0.0)
    summary = _summary(folder / "summary.json")
    profile = folder / "profile.json"
    return MeasuredRun(
        folder=folder,
        lengths=tuple(lengths),
        prompt_tokens=max(1, round(sum(step["prompt_tokens"] for step in steps) / len(lengths))),
        training=training,
        summary=summary,
        cost=read_profile(str(profile)) if profile.exists() else None,
        believed=_believed(summary, folder / "summary.json"),
        times={key: _number(summary, key, str(folder / "summary.json")) for key in TIMES if key in summary},
        prompts=tuple(prompts),
        signal=tuple(signal),
        order=tuple(sorted(range(len(prompts)), key=prompts.__getitem__)),
    )


def training_costs(steps: Sequence[Mapping[str, Any]]) -> TrainingCosts:
    """Cost of a step and of a token. The first step, which is slower, is left out if there are enough."""
    steps = steps[1:] if len(steps) > LEAST_STEPS else steps
    everything = [step["tokens"] + step["prompt_tokens"] for step in steps]
    seconds = [step["train_s"] for step in steps]
    if len(steps) < LEAST_STEPS:
        return TrainingCosts(sum(seconds) / sum(everything))
    fixed_s, _, miss = line(everything, seconds)
    taught = [_taught(step) for step in steps]
    per_taught = 0.0
    if any(taught) and taught != everything:
        fewer_fixed_s, fewer_slope, fewer_miss = line(taught, seconds)
        if fewer_miss < miss:
            fixed_s, per_taught = fewer_fixed_s, fewer_slope
    return TrainingCosts((sum(seconds) - len(steps) * fixed_s) / sum(everything), fixed_s, per_taught)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """A fitted line: seconds at size 0, seconds per unit, squared error. If larger is not slower, it goes through 0."""
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


def _believed(summary: Mapping[str, Any], where: Path) -> CostModel | None:
    found = summary.get("believed")
    if found is None:
        return None
    try:
        values = {each: float(found[each]) for each in COEFFICIENTS}
    except (ValueError, TypeError, KeyError):
        values = {}
    if not values or not takes_time(values):
        raise ConfigError(f"{where}: believed is {found!r}: give the file as the run wrote it")
    return CostModel(**values)


def _listed(step: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    found = step.get(key, [])
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise ConfigError(f"{where}: {key} is {found!r}; it must be a list, as the run wrote it")
    return found


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the directory of a run that has ended") from error
    if not isinstance(summary, dict):
        raise ConfigError(f"{path} is not an object: give the file as the run wrote it")
    return summary
