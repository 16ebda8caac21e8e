"""What a run has done so far: counted from what its parts report, saved with every checkpoint, summed up at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from staleflow.config import Config
from staleflow.types import LedgerCounts

GOAL = 0.9
"""The accuracy whose time is reported as ``seconds_to_90``."""


@dataclass
class Record:
    bound: int
    version: int = 0
    """Steps that are committed."""
    seconds: float = 0.0
    """Of training: setting up, the first and the last evaluation and checkpoints after the end do not count."""
    tokens_trained: int = 0
    trajectories_trained: int = 0
    tokens_wasted: int = 0
    tokens_lost: int = 0
    """Made by instances that died before they had sent them, about."""
    token_staleness: dict[int, int] = field(default_factory=dict[int, int])
    trajectory_staleness: dict[int, int] = field(default_factory=dict[int, int])
    trainer_busy_s: float = 0.0
    trainer_idle_s: float = 0.0
    control_s: float = 0.0
    """CPU seconds of the control plane."""
    instance_busy_s: float = 0.0
    instance_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    """By process: CPU seconds while training. That of one that was replaced counts from its last start."""
    violations: int = 0
    accuracy: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    """(version, seconds when it was made, held-out accuracy)"""
    made_at: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    """By version: seconds."""
    figures: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """By version: all that its evaluation found, by name."""
    binary: bool = True
    """Whether every held-out reward so far was 0 or 1, so that their mean is the accuracy."""
    rewards: list[float] = field(default_factory=list[float])
    """Mean reward of each step."""
    lives: int = 1
    restarts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """By role and reason: processes that died or stood still and were replaced."""
    scaled: list[dict[str, int | float]] = field(default_factory=list[dict[str, int | float]])
    """``step``, ``seconds``, ``from``, ``to``: when the number of instances was changed."""
    failures: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """By what failed and why, in a few words: rewards, evaluations, checkpoints, writes."""

    def committed(self, version: int, seconds: float) -> None:
        self.version, self.seconds = version, seconds
        self.made_at[version] = seconds

    def trained(
        self,
        facts: dict[str, float],
        tokens: dict[int, int],
        trajectories: dict[int, int],
        busy_s: float,
        idle_s: float,
    ) -> None:
        self.rewards.append(facts["reward"])
        self.tokens_trained += sum(tokens.values())
        self.trajectories_trained += sum(trajectories.values())
        self.token_staleness = dict(Counter(self.token_staleness) + Counter(tokens))
        self.trajectory_staleness = dict(Counter(self.trajectory_staleness) + Counter(trajectories))
        self.violations += sum(count for age, count in trajectories.items() if age > self.bound)
        self.trainer_busy_s += busy_s
        self.trainer_idle_s += idle_s

    def evaluated(
        self, version: int, accuracy: float, figures: dict[str, float] | None = None, binary: bool = True
    ) -> None:
        self.figures[version] = figures or {"reward": accuracy}
        self.binary &= binary
        self.accuracy = sorted({*self.accuracy, (version, self.made_at.get(version, self.seconds), accuracy)})

    def best(self, figure: str) -> tuple[int, float] | None:
        """The first version with the best value of this figure, and that value."""
        values = [(version, found[figure]) for version, found in sorted(self.figures.items()) if figure in found]
        return max(values, key=lambda each: each[1]) if values else None

    def without_better(self, figure: str) -> int:
        """Evaluations since the best one."""
        best = self.best(figure)
        return 0 if best is None else sum(version > best[0] for version in self.figures)

    @property
    def seconds_to_goal(self) -> float | None:
        if not self.binary:
            return None
        return next((seconds for _, seconds, accuracy in self.accuracy if accuracy >= GOAL), None)

    def summary(self, counts: LedgerCounts) -> dict[str, Any]:
        """The names are a promise: other programs read them."""
        wall = self.seconds
        ages = self.token_staleness
        return {
            "accuracy_initial": self.accuracy[0][2] if self.accuracy else None,
            "accuracy_final": self.accuracy[-1][2] if self.accuracy else None,
            "steps": self.version,
            "wall_s": wall,
            "seconds_to_90": self.seconds_to_goal,
            "tokens_trained": self.tokens_trained,
            "tokens_wasted": self.tokens_wasted,
            "tokens_lost": self.tokens_lost,
            "trained_tokens_per_s": self.tokens_trained / wall if wall else 0.0,
            "bound": self.bound,
            "max_staleness": max(ages, default=0),
            "staleness_histogram": {str(age): ages[age] for age in sorted(ages)},
            "violations": self.violations,
            "groups_admitted": counts["admitted"],
            "groups_committed": counts["committed"],
            "groups_released": dict(counts["released"]),
            "trainer_idle": self.trainer_idle_s / wall if wall else 0.0,
            "control_overhead": self.control_s / wall if wall else 0.0,
            "trajectory_staleness_histogram": {
                str(age): self.trajectory_staleness[age] for age in sorted(self.trajectory_staleness)
            },
            "mean_staleness": sum(age * count for age, count in ages.items()) / max(1, self.tokens_trained),
            "trajectories_trained": self.trajectories_trained,
            "instance_idle": 1 - self.instance_busy_s / self.instance_s if self.instance_s else 0.0,
            "cpu_s": self.cpu_s,
            "trainer_busy_s": self.trainer_busy_s,
            "instance_busy_s": self.instance_busy_s,
            "accuracy": [
                {"step": version, "seconds": seconds, "accuracy": accuracy, **_more(self.figures.get(version, {}))}
                for version, seconds, accuracy in self.accuracy
            ],
            "rewards": self.rewards,
            "lives": self.lives,
            "restarts": self.restarts,
            "failures": self.failures,
            "binary": self.binary,
            "scaled": self.scaled,
        }

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, body: bytes) -> Record:
        return msgspec.json.decode(body, type=cls)


def sizes(config: Config) -> dict[str, Any]:
    """The run by the names of the simulator's settings. One trainer counts as one GPU."""
    rollout = config.rollout
    return {
        "groups": config.groups,
        "group_size": config.group_size,
        "staleness": config.staleness,
        "redundancy": config.redundancy,
        "extra_members": config.extra_members,
        "instances": rollout.instances,
        "training_gpus": 1,
        "kv_tokens": rollout.kv_tokens,
        "max_running": rollout.max_running,
        "chunk": rollout.prefill_tokens,
        "strategies": asdict(config.strategies),
    }


def _more(figures: dict[str, float]) -> dict[str, float]:
    """Those beside the mean reward."""
    return {name: value for name, value in figures.items() if name != "reward"}
