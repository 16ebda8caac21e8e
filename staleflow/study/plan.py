"""Which bound, batch, length cap and split to train with, found in the simulator.

The knobs are turned one after the other, the cheapest for learning first, and each only as long as a turn is worth it:

1. *split* of the GPUs between rollout and training: costs learning nothing, so every trial has its best one;
2. *bound*: one step more of staleness for each turn;
3. *batch*: twice the groups for each step, so half the updates for the same data;
4. *cap* on output tokens: half as long, as long as it cuts off few responses.

Beside each trial stand the three terms of the law, and which of them binds. With more than one job, splits that may be
needed next are simulated beside the one that is; the plan is the same. Use::

    plan = make_plan(preset("paper-14b"), Search(), jobs=4)
    plan.best.setting, plan.best.tokens_per_s, [turn.gain for turn in plan.turns]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from staleflow.simulate.setting import Setting
from staleflow.study.compare import TUNING_SEED, first_counted, run_of
from staleflow.study.law import Law, balance, ceiling, law, limit, splits, work_of
from staleflow.study.parallel import Row, Run, Runner, Unit
from staleflow.study.peers import STALEFLOW
from staleflow.study.result import speed

Knob = Literal["split", "bound", "batch", "cap"]

FACTORS = (1.25, 0.8)
"""Steps uphill: factors on the instances."""


@dataclass(frozen=True, slots=True)
class Search:
    most_staleness: int = 3
    most_groups: int = 512
    least_tokens: int = 1000
    """No cap below this."""
    worth: float = 0.05
    """The least relative gain in throughput for which a knob is turned."""
    most_cut: float = 0.02
    """No cap that cuts off a larger share of the responses."""
    seed: int = TUNING_SEED


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting, simulated with its best split."""

    setting: Setting
    tokens_per_s: float
    mean_staleness: float
    law: Law
    """The law for its own split."""
    ceiling: Law
    """The law for the split that it allows the most."""
    limit: float
    cut: float
    """The share of responses that its cap cuts off and that of the start does not."""
    splits: dict[int, float]
    """Tokens per second of every split that was tried, by training GPUs."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A knob that was tried, and what it brought over the trial before."""

    knob: Knob
    value: int
    before: Trial
    after: Trial
    taken: bool

    @property
    def gain(self) -> float:
        return self.after.tokens_per_s / self.before.tokens_per_s - 1


@dataclass(slots=True)
class Plan:
    start: Trial
    """The setting as it was given."""
    best: Trial
    turns: list[Turn] = field(default_factory=list[Turn])
    bounds: list[Trial] = field(default_factory=list[Trial])
    """One trial for each bound, with the batch and the cap that were given."""


def make_plan(setting: Setting, search: Search, on_run: Callable[[str], None] = lambda _: None, jobs: int = 1) -> Plan:
    """Turn the knobs. Batch and cap start as they are given, the bound at 0, the split at the given one."""
    with Runner({}, jobs, on_run) as runner:
        return _make_plan(setting, search, runner)


def _make_plan(setting: Setting, search: Search, runner: Runner) -> Plan:
    whole = setting.workload.max_tokens

    def attempt(setting: Setting) -> Trial:
        return runner.finish([_attempt(setting, whole, search, runner)])[0]

    start, best = runner.finish(
        [
            _attempt(setting, whole, search, runner, climb=False),
            _attempt(balance(setting), whole, search, runner),
        ]
    )
    plan = Plan(start, best, [Turn("split", best.setting.training_gpus, start, best, taken=True)])
    for bound in range(search.most_staleness + 1):
        # The split of the bound before is a good one to start from.
        plan.bounds.append(
            plan.best
            if bound == setting.staleness
            else attempt(replace((plan.bounds or [best])[-1].setting, staleness=bound))
        )
    best = plan.bounds[0]
    for trial in plan.bounds[1:]:
        best = _turn(plan, "bound", trial.setting.staleness, best, trial, search)
        if best is not trial:
            break
    while best.setting.groups * 2 <= search.most_groups:
        trial = attempt(replace(best.setting, groups=best.setting.groups * 2))
        best = _turn(plan, "batch", trial.setting.groups, best, trial, search)
        if best is not trial:
            break
    while (cap := max(tokens for _, tokens in best.setting.workload.spread()) // 2) >= search.least_tokens:
        shorter = replace(best.setting, workload=replace(best.setting.workload, max_tokens=cap))
        trial = attempt(shorter)
        best = _turn(plan, "cap", cap, best, trial, search)
        if best is not trial:
            break
    plan.best = best
    return plan


def _turn(plan: Plan, knob: Knob, value: int, before: Trial, after: Trial, search: Search) -> Trial:
    """Record what the turn brings, and return the trial to continue from."""
    turn = Turn(knob, value, before, after, taken=False)
    taken = turn.gain >= search.worth and after.cut <= search.most_cut
    plan.turns.append(replace(turn, taken=taken))
    return after if taken else before


def _attempt(setting: Setting, whole: int, search: Search, runner: Runner, climb: bool = True) -> Unit[Trial]:
    """Simulate the setting with its split, or with the best one that climbing from there reaches."""
    ways = {split.instances: split for split in splits(setting)}
    found: dict[int, Row] = {}
    first = first_counted(setting.steps, setting.staleness)

    def near(instances: int, factor: float) -> int:
        return min(ways, key=lambda each: abs(each - factor * instances))

    def run(instances: int) -> Run:
        what = f"bound {setting.staleness}, {setting.groups} groups, {instances} instances"
        return run_of(STALEFLOW, ways[instances], search.seed, what)

    def look(instances: int, ahead: Iterable[int]) -> Unit[None]:
        """Simulate one, and in parallel those that may come next."""
        yield [run(each) for each in (instances, *(ahead if runner.jobs > 1 else ()))]
        found[instances] = runner.runs[run(instances).name]

    def fast(instances: int) -> float:
        return speed(found[instances]["commits"], first)

    best = setting.instances
    factors = FACTORS if climb else ()
    yield from look(best, [near(best, factor) for factor in factors])
    for factor in factors:
        while (other := near(best, factor)) != best:
            yield from look(other, [near(other, factor)])
            if fast(other) <= fast(best):
                break
            best = other
    work = work_of(setting)
    streamed = setting.strategies.consume == "stream"
    return Trial(
        setting=ways[best],
        tokens_per_s=fast(best),
        mean_staleness=found[best]["mean_staleness"],
        law=law(ways[best], streamed, work),
        ceiling=ceiling(setting, streamed, work),
        limit=limit(setting, work),
        cut=_longer(setting, setting.workload.max_tokens) - _longer(setting, whole),
        splits={run["training_gpus"]: speed(run["commits"], first) for run in found.values()},
    )


def _longer(setting: Setting, cap: int) -> float:
    """The share of responses that would be longer than the cap if there were none."""
    uncapped = replace(setting.workload, max_tokens=10**9)
    return sum(share for share, tokens in uncapped.spread() if tokens > cap)
