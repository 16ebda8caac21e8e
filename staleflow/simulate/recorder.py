"""What a simulated run did, counted from the tokens' own version stamps and never from what the ledger believes.

Every token is followed from the engine that made it to its end. ``left`` gets how many tokens an engine made for a
trajectory that leaves it; they are *made* until the trajectory is trained or given up. So at any moment::

    generated = trained + wasted (by cause) + made + on engines
"""

from collections import Counter
from dataclasses import dataclass, field

from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.types import GIVEN


@dataclass(slots=True)
class TrainedStep:
    """One trained step."""

    step: int
    time: float
    tokens: int
    prompt_tokens: int
    lengths: list[int]
    groups: list[str]


@dataclass(slots=True)
class Recorder:
    bound: int
    steps: list[TrainedStep] = field(default_factory=list[TrainedStep])
    token_staleness: Counter[int] = field(default_factory=Counter[int])
    group_staleness: Counter[int] = field(default_factory=Counter[int])
    wasted: Counter[str] = field(default_factory=Counter[str])
    trained_prompts: Counter[int] = field(default_factory=Counter[int])
    given_up: set[int] = field(default_factory=set[int])
    """Prompts that will not be drawn again: filtered, or their responses could not be scored."""
    violations: int = 0
    """Trained groups that hold a token older than the bound allows."""
    made: dict[str, int] = field(default_factory=dict[str, int])
    _ended: dict[str, str] = field(default_factory=dict[str, str])
    """Reasons of trajectories that have ended while an engine may still hold them."""

    def left(self, name: str, tokens: int) -> None:
        """The trajectory left an engine that had made ``tokens`` for it."""
        if name in self._ended:
            self.wasted[self._ended.pop(name)] += tokens
        else:
            self.made[name] = self.made.get(name, 0) + tokens

    def committed(self, time: float, step: int, groups: list[Group]) -> None:
        tokens, prompt_tokens, lengths = 0, 0, list[int]()
        for group in groups:
            self.trained_prompts[group.prompt] += 1
            oldest = step
            for member in group.members:
                if member.state != "consumed":
                    continue
                made = 0
                for version, count in member.spans:
                    if version != GIVEN:
                        self.token_staleness[step - version] += count
                        oldest = min(oldest, version)
                        made += count
                lengths.append(made)
                tokens += made
                prompt_tokens += group.prompt_tokens
                again = self.made.pop(member.name) - made
                if again:
                    self.wasted["made again"] += again  # after a crash, or by an instance taken for dead
                self._ended[member.name] = "too late"
            self.group_staleness[step - oldest] += 1
            self.violations += step - oldest > self.bound
        self.steps.append(TrainedStep(step, time, tokens, prompt_tokens, lengths, [each.name for each in groups]))

    def aborted(self, trajectory: Trajectory, reason: str) -> None:
        self.wasted[reason] += self.made.pop(trajectory.name, 0)
        self._ended[trajectory.name] = reason

    @property
    def trained_tokens(self) -> int:
        return sum(step.tokens for step in self.steps)
