"""The status of a run at one moment, as plain values.

Whoever runs the control plane fills it in; whoever shows it needs nothing else. What is not known yet is None or empty,
so the first status of a run is short::

    status = Status(step=0, steps=200, seconds=0.0, bound=2)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
    version: int | None = None
    """Version of its weights; None before the first pull."""
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    """Tokens."""
    kv_total: int = 0
    alive: bool = True
    pulling: bool = False
    leaving: bool = False
    tokens_per_s: float = 0.0
    tokens: int = 0
    """Made so far."""


@dataclass(frozen=True, slots=True)
class Status:
    step: int
    """Steps committed so far: a count, and so the newest version. The step of this number is the open one."""
    steps: int
    """Steps of the whole run."""
    seconds: float
    bound: int
    reward: float | None = None
    accuracy: Sequence[tuple[int, float]] = ()
    """Mean reward on held-out problems, with the version that it was measured of."""
    binary: bool = True
    """Whether all rewards are 0 or 1, so that their mean is the accuracy."""
    rewards: Sequence[float] = ()
    """Mean rewards of the last steps, oldest first."""
    max_staleness: int | None = None
    mean_staleness: float | None = None
    staleness_histogram: Mapping[int, int] = field(default_factory=dict)
    """Tokens trained, by age in steps."""
    tokens_trained: int = 0
    tokens_wasted: int = 0
    trained_tokens_per_s: float = 0.0
    trainer_idle: float | None = None
    """The share of its time, 0..1."""
    trainer_doing: str = ""
    doing: str = ""
    """What the run does before and after training; empty while it trains."""
    control_overhead: float | None = None
    """The share of wall time, 0..1."""
    groups_ready: int = 0
    groups_in_flight: int = 0
    instances: tuple[InstanceStatus, ...] = ()
    waiting_for: str = ""
    loss: float | None = None
    cut: float | None = None
    """The share of responses of the latest step that a length limit ended."""
    without_signal: float | None = None
    """The share of groups of the latest step whose rewards are all equal."""
    left_out: float = 0.0
    """The share of prompts of the data that are too long, or empty."""
    notes: tuple[str, ...] = ()
    first_step: int = 0
    """Where this process began: a resumed run's seconds cover only the steps from there."""

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before the first step."""
        done = self.step - self.first_step
        return self.seconds / done * max(0, self.steps - self.step) if done > 0 else None

    @property
    def wasted(self) -> float | None:
        """The share of all generated tokens that trained nothing."""
        made = self.tokens_trained + self.tokens_wasted
        return self.tokens_wasted / made if made else None
