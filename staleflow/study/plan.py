"""Which bound, batch, length cap and split to train with, found in the simulator.

The knobs are turned one after the other, the cheapest for learning first, and each only as long as a turn is worth it:

1. *split* of the GPUs between rollout and training: costs learning nothing, so every trial has its best one;
2. *bound*: one step more of staleness for each turn;
3. *batch*: twice the groups for each step, so half the updates for the same data;
4. *cap* on output tokens: half as long, as long as it cuts off few responses.

What no split and no knob could bring is not simulated. Where to look for the best split says the even ceiling
(``staleflow.study.law``); three around it are simulated, and more as long as they get better. Beside each trial stand
the three terms of the law, and which of them binds. The plan does not depend on the number of jobs. Use::

    plan = make_plan(preset("paper-14b"), Search(), jobs=4)
    plan.best.setting, plan.best.tokens_per_s, [turn.gain for turn in plan.turns]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Literal

from staleflow.simulate.setting import Setting
from staleflow.study.compare import TUNING_SEED, first_counted, run_of, size_of
from staleflow.study.law import BatchWork, Law, ceiling, even_ceilings, law, limit, splits, work_of
from staleflow.study.parallel import Row, Run, Runner, Unit
from staleflow.study.peers import STALEFLOW
from staleflow.study.result import speed

Knob = Literal["split", "bound", "batch", "cap"]

FACTOR = 1.2
"""Instances of a split over those of the next that is tried."""
NEAR = 0.96
"""Another split seldom brings more than the rest."""
COUNTED = 768
"""Groups that a trial measures, about; so larger batches take fewer steps."""
MOST_COUNTED = 8
"""Steps that a trial measures at most, about."""


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
    steps: int | None = None
    """Of every trial; None: as many as measure it."""
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
    simulated: bool = True
    """If not, ``after`` has what it could bring at most, which is too little."""

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


def make_plan(
    setting: Setting,
    search: Search,
    on_run: Callable[[str], None] = lambda _: None,
    jobs: int = 1,
    on_share: Callable[[float], None] = lambda _: None,
) -> Plan:
    """Turn the knobs. Batch and cap start as they are given, the bound at 0, the split at the best one."""
    with Runner({}, jobs, on_run, on_share) as runner:
        return _Planning(setting, search, runner).plan()


@dataclass(slots=True)
class _Planning:
    given: Setting
    search: Search
    runner: Runner
    _works: dict[tuple[int, int], BatchWork] = field(default_factory=dict[tuple[int, int], BatchWork])

    def plan(self) -> Plan:
        given, search = self.given, self.search
        bounds = range(search.most_staleness + 1)
        tried = sorted({*bounds, given.staleness})
        once = [
            _with(given, knob, value) for knob in ("batch", "cap") if (value := self._next(knob, given)) is not None
        ]
        self._foresee(*(replace(given, staleness=bound) for bound in tried), *once)
        start, *trials = self.runner.finish(
            [
                self._as_given(),
                *(self._attempt(replace(given, staleness=bound)) for bound in tried),
            ]
        )
        by_bound = dict(zip(tried, trials, strict=True))
        if start.tokens_per_s >= by_bound[given.staleness].tokens_per_s:
            by_bound[given.staleness] = start
        best = by_bound[given.staleness]
        plan = Plan(start, best, [Turn("split", best.setting.training_gpus, start, best, taken=best is not start)])
        plan.bounds = [by_bound[bound] for bound in bounds]
        best = plan.bounds[0]
        for trial in plan.bounds[1:]:
            best = self._turn(plan, "bound", trial.setting.staleness, best, trial)
            if best is not trial:
                break
        plan.best = self._turned(plan, "cap", self._turned(plan, "batch", best))
        return plan

    def _turned(self, plan: Plan, knob: Literal["batch", "cap"], best: Trial) -> Trial:
        """Turn the knob as long as that is worth it."""
        while (value := self._next(knob, best.setting)) is not None:
            changed = _with(best.setting, knob, value)
            if (hopeless := self._hopeless(changed, best)) is not None:
                plan.turns.append(Turn(knob, value, best, hopeless, taken=False, simulated=False))
                break
            if plan.turns[-1].knob == knob:  # one turn was foreseen
                self._foresee(changed)
            trial = self.runner.finish([self._attempt(changed, best.tokens_per_s * (1 + self.search.worth))])[0]
            best = self._turn(plan, knob, value, best, trial)
            if best is not trial:
                break
        return best

    def _hopeless(self, setting: Setting, best: Trial) -> Trial | None:
        """What the setting could bring at most, if that is not worth it."""
        promises = self._promises(setting)
        most = max(promises, key=lambda each: promises[each])
        if promises[most] >= best.tokens_per_s * (1 + self.search.worth):
            return None
        split = next(each for each in splits(setting) if each.instances == most)
        return replace(self._trial(split, {}), tokens_per_s=promises[most])

    def _next(self, knob: Literal["batch", "cap"], setting: Setting) -> int | None:
        """What to turn it to; None: it cannot be turned further."""
        if knob == "batch":
            return setting.groups * 2 if setting.groups * 2 <= self.search.most_groups else None
        cap = max(tokens for _, tokens in setting.workload.spread()) // 2
        return cap if cap >= self.search.least_tokens else None

    def _foresee(self, *settings: Setting) -> None:
        """Tell the runner of what comes: three splits of each."""
        self.runner.foreseen += sum(3 * size_of(self._measured(each)) for each in settings)

    def _measured(self, setting: Setting) -> Setting:
        """The setting with the steps of a trial: those that fill the window, and whole cycles after them."""
        if self.search.steps is not None:
            return replace(setting, steps=self.search.steps)
        cycle = setting.staleness + 1
        cycles = min(COUNTED / (setting.groups * cycle), MOST_COUNTED / cycle)
        return replace(setting, steps=cycle * (1 + max(1, round(cycles))) + 1)

    def _work(self, setting: Setting) -> BatchWork:
        key = (setting.groups, setting.workload.max_tokens)
        if key not in self._works:
            self._works[key] = work_of(setting)
        return self._works[key]

    def _promises(self, setting: Setting) -> dict[int, float]:
        """By instances, about the tokens per second that a split can bring at most."""
        return even_ceilings(setting, setting.strategies.consume == "stream", self._work(setting))

    def _as_given(self) -> Unit[Trial]:
        setting = self._measured(self.given)
        run = self._run(setting)
        yield [run]
        return self._trial(setting, {setting.instances: self.runner.runs[run.name]})

    def _attempt(self, setting: Setting, wanted: float = 0.0) -> Unit[Trial]:
        """Simulate the setting with the split that promises the most and those around it, and climb from there. If it
        is far from the ``wanted`` tokens per second, other splits are not tried."""
        setting = self._measured(setting)
        ways = {split.instances: split for split in splits(setting)}
        promises = self._promises(setting)
        best = max(promises, key=lambda each: promises[each])
        found: dict[int, Row] = {}

        def look(*instances: int) -> Unit[None]:
            runs = {each: self._run(ways[each]) for each in instances}
            yield list(runs.values())
            found.update({each: self.runner.runs[run.name] for each, run in runs.items()})

        def fast(instances: int) -> float:
            return _speed(setting, found[instances])

        beside = [each for each in _beside(best) if each in ways]
        yield from look(best, *(beside if not wanted else ()))
        if fast(best) < NEAR * wanted:
            return self._trial(ways[best], found)
        yield from look(*(each for each in beside if each not in found))
        for more in (True, False):
            while (other := _beside(best)[more]) in ways and (other in found or promises[other] > fast(best)):
                if other not in found:
                    yield from look(other)
                if fast(other) <= fast(best):
                    break
                best = other
        return self._trial(ways[best], found)

    def _run(self, setting: Setting) -> Run:
        what = f"bound {setting.staleness}, {setting.groups} groups, {setting.instances} instances"
        return run_of(STALEFLOW, setting, self.search.seed, what)

    def _trial(self, setting: Setting, found: dict[int, Row]) -> Trial:
        """``found``: the runs of its splits; its own may be missing."""
        work = self._work(setting)
        streamed = setting.strategies.consume == "stream"
        run = found.get(setting.instances)
        whole = self.given.workload.max_tokens
        return Trial(
            setting=setting,
            tokens_per_s=0.0 if run is None else _speed(setting, run),
            mean_staleness=0.0 if run is None else run["mean_staleness"],
            law=law(setting, streamed, work),
            ceiling=ceiling(setting, streamed, work),
            limit=limit(setting, work),
            cut=_longer(setting, setting.workload.max_tokens) - _longer(setting, whole),
            splits={run["training_gpus"]: _speed(setting, run) for run in found.values()},
        )

    def _turn(self, plan: Plan, knob: Knob, value: int, before: Trial, after: Trial) -> Trial:
        """Record what the turn brings, and return the trial to continue from."""
        turn = Turn(knob, value, before, after, taken=False)
        taken = turn.gain >= self.search.worth and after.cut <= self.search.most_cut
        plan.turns.append(replace(turn, taken=taken))
        return after if taken else before


def _with(setting: Setting, knob: Literal["batch", "cap"], value: int) -> Setting:
    if knob == "batch":
        return replace(setting, groups=value)
    return replace(setting, workload=replace(setting.workload, max_tokens=value))


def _speed(setting: Setting, run: Row) -> float:
    return speed(run["commits"], first_counted(setting.steps, setting.staleness))


def _beside(instances: int) -> tuple[int, int]:
    """The next split with fewer instances that is tried, and the next with more."""
    return min(instances - 1, ceil(instances / FACTOR)), max(instances + 1, floor(instances * FACTOR))


def _longer(setting: Setting, cap: int) -> float:
    """The share of responses that would be longer than the cap if there were none."""
    uncapped = replace(setting.workload, max_tokens=10**9)
    return sum(share for share, tokens in uncapped.spread() if tokens > cap)
