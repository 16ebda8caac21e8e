"""Processes that share too few cores: how fast each works depends on which others do.

On a laptop two instances and a trainer have two cores. Costs are seconds on a core of one's own; a process with a
share of a core takes longer in proportion. ``Sharing`` holds the shares, ``SharedCluster`` simulates with them:
whenever a process starts or stops working, all speeds change. ::

    run = read_run("runs/7")
    setting, trains = alone(run), teaches(run)
    sharing = calibrated(Shares.of(run), setting, cores=2, trains=trains)
    cluster = SharedCluster(setting, seed=1, sharing=sharing, trains=trains)
    cluster.run()
    cluster.marks           # totals after each step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from staleflow.errors import ConfigError
from staleflow.servers.lifecycle import Group
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.rollout import SimRollout
from staleflow.simulate.setting import Setting
from staleflow.simulate.trainer import Fed, SimTrainer
from staleflow.study.measured import MeasuredRun


class Shares(NamedTuple):
    """What a run measured of its processes."""

    trainer_cpu: float
    """CPU seconds of a second in which the trainer worked."""
    instance_cpu: float
    trainer_busy: float
    """Share of the time in which it worked, fast or slowly."""
    instance_busy: float

    @classmethod
    def of(cls, run: MeasuredRun) -> Shares:
        summary = run.summary
        try:
            return cls(
                trainer_cpu=min(1.0, summary["cpu_s"]["trainer"] / summary["trainer_busy_s"]),
                instance_cpu=min(1.0, float(summary["instance_cpu_share"])),
                trainer_busy=summary["trainer_busy_s"] / summary["wall_s"],
                instance_busy=1 - summary["instance_idle"],
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise ConfigError(
                f"{run.folder} does not say what CPU time its processes had: give a run of staleflow train"
            ) from None


def alone(run: MeasuredRun, words: Sequence[str] = ()) -> Setting:
    """The run to be simulated, with costs as on a core of its own: CPU seconds."""
    setting, shares = run.setting(words), Shares.of(run)
    per_token_s = run.training.per_taught_token_s or run.training.per_token_s
    return replace(
        setting,
        trainer_per_token_gpu_s=per_token_s * shares.trainer_cpu * setting.training_gpus,
        trainer_fixed_s=setting.trainer_fixed_s * shares.trainer_cpu,
        rollout=setting.rollout.scaled(shares.instance_cpu),
    )


def teaches(run: MeasuredRun) -> Callable[[int], bool]:
    """Whether training on the group of a prompt costs anything; prompts repeat."""
    if not run.training.per_taught_token_s:
        return lambda _: True
    return lambda prompt: run.signal[run.order[prompt % len(run.order)]]


class Overlap(NamedTuple):
    """How often processes want the same cores."""

    trainer: float
    """Share of the trainer's time in which instances run on all cores."""
    instance: float
    """Share of an instance's time in which the trainer works and instances run on all cores."""

    @classmethod
    def guessed(cls, shares: Shares, cores: int, instances: int) -> Overlap:
        """The overlap if the processes worked independently of each other."""
        if instances < cores:
            return cls(0.0, 0.0)
        others = shares.instance_busy ** (cores - 1)
        return cls(shares.instance_busy * others, shares.trainer_busy * others)


ROUNDS = 3
LEAST = 0.05
"""The least share of a core of any process, whatever a noisy run measured."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Cores are given to instances first; the trainer has one of its own as long as one is left."""

    cores: int
    alone: float
    """Share of a core for a process that has it to itself; the rest of the machine takes what is left."""
    trainer: float
    """Share of a core for the trainer while instances run on all of them; these share the rest evenly."""

    @classmethod
    def measured(cls, shares: Shares, cores: int, overlap: Overlap) -> Sharing:
        """What one run measured, solved for the two shares, with ``o`` its overlap::

        trainer_cpu  = alone - o.trainer * (alone - trainer)
        instance_cpu = alone - o.instance * trainer / cores
        """
        met, loss = overlap.trainer, overlap.instance / cores
        if not met or not loss:  # there was a core for everyone
            return cls(cores, min(1.0, shares.instance_cpu), min(1.0, shares.trainer_cpu))
        alone = (shares.trainer_cpu + shares.instance_cpu * met / loss) / (1 - met + met / loss)
        alone = min(1.0, alone)
        trainer = alone - (alone - shares.trainer_cpu) / met
        most = alone * min(1.0, cores - LEAST)  # instances must be left something
        return cls(cores, alone, min(most, max(LEAST, trainer)))

    def speeds(self, running: int, training: bool) -> tuple[float, float]:
        """Speed of each running instance, and of the trainer."""
        if running < self.cores or not training:
            return self.alone * min(1.0, self.cores / max(1, running)), self.alone
        return (self.cores * self.alone - self.trainer) / running, self.trainer


class SharedTrainer(SimTrainer):
    """Works off what it is fed at a speed that may change at any time."""

    def __init__(self, *parts: Any, trains: Callable[[int], bool]) -> None:
        super().__init__(*parts)
        self.changed: Callable[[], None] = lambda: None
        self._trains = trains
        self._speed = 1.0
        self._work: deque[tuple[float, int | None]] = deque()
        """Seconds at full speed, and the step that is whole after them."""
        self._since = 0.0
        self._timer = 0

    @property
    def busy(self) -> bool:
        return bool(self._work)

    def feed(self, step: int, groups: Sequence[Fed]) -> None:  # noqa: ARG002
        tokens = sum(group.tokens for group in groups if self._trains(group.prompt))
        if self.alive:
            self._add(self.cost.train_s(tokens), None)

    def finish(self, step: int) -> None:
        if self.alive:
            self._add(self.cost.fixed_s, step)

    def reset(self) -> None:
        super().reset()
        self._work.clear()
        self._timer += 1
        self.changed()

    def set_speed(self, speed: float) -> None:
        self._settle()
        self._speed = speed
        self._arm()

    def _add(self, seconds: float, step: int | None) -> None:
        if self._dry is not None:
            since, why = self._dry
            self.idle[why] = self.idle.get(why, 0.0) + self._loop.now - since
            self._dry = None
        self._settle()
        self._work.append((seconds, step))
        self._arm()
        self.changed()

    def _settle(self) -> None:
        """Account for the work done since the last change."""
        now = self._loop.now
        if self._work:
            left, step = self._work[0]
            self._work[0] = max(0.0, left - (now - self._since) * self._speed), step
        self._since = now

    def _arm(self) -> None:
        self._timer += 1
        if self._work:
            self._loop.at(self._loop.now + self._work[0][0] / self._speed, self._done, self._timer)

    def _done(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._since = self._loop.now
        _, step = self._work.popleft()
        self._arm()
        if step is not None:
            self._push(self._lives, step)
        elif not self._work:
            self._dry = (self._loop.now, self._reason())
        self.changed()


class SharedRollout(SimRollout):
    """Calls ``changed`` whenever it starts or stops running."""

    changed: Callable[[], None] = staticmethod(lambda: None)
    running = False
    running_s = 0.0
    _running_since = 0.0

    def ran_until(self, now: float) -> float:
        return self.running_s + (now - self._running_since if self.running else 0.0)

    def _arm(self) -> None:
        super()._arm()
        running = self._armed < float("inf")
        if running == self.running:
            return
        now = self._loop.now
        self.running_s, self._running_since, self.running = self.ran_until(now), now, running
        self.changed()


class Mark(NamedTuple):
    """Totals at the commit of a step."""

    time: float
    tokens: int
    """Output tokens trained, in all."""
    ages: int
    """Sum of their ages in steps."""
    trainer_idle_s: float
    instances_running_s: float


class SharedCluster(Cluster):
    rollout_kind = SharedRollout

    def __init__(self, setting: Setting, seed: int, sharing: Sharing, trains: Callable[[int], bool]) -> None:
        """``trains``: whether training on a prompt's group takes any time."""
        self._sharing = sharing
        self._trains = trains
        self._state: tuple[Any, ...] = ()
        self._state_since = 0.0
        self._times: dict[tuple[int, bool], float] = {}
        """Seconds by how many instances ran and whether the trainer worked."""
        self.marks: list[Mark] = []
        super().__init__(setting, seed)

    def new_trainer(self) -> SimTrainer:
        setting = self.setting
        parts = (self.loop, setting.trainer, setting.groups, self.weights, self.pushed, self._trainer_waits_for)
        trainer = SharedTrainer(*parts, trains=self._trains)
        trainer.changed = self._share
        return trainer

    def new_rollout(self, name: str, speed: float = 1.0) -> SimRollout:
        rollout = super().new_rollout(name, speed)
        assert isinstance(rollout, SharedRollout)
        rollout.changed = self._share
        return rollout

    def _share(self) -> None:
        """A process started or stopped working: set all speeds."""
        assert isinstance(self.trainer, SharedTrainer)
        running = [rollout for rollout in self.rollouts if isinstance(rollout, SharedRollout) and rollout.running]
        state = (self.trainer.busy, *(rollout.name for rollout in running))
        if state == self._state:
            return
        if self._state:
            before = len(self._state) - 1, self._state[0]
            self._times[before] = self._times.get(before, 0.0) + self.loop.now - self._state_since
        self._state, self._state_since = state, self.loop.now
        instance, trainer = self._sharing.speeds(len(running), self.trainer.busy)
        self.trainer.set_speed(trainer)
        for rollout in running:
            rollout.slow_down(instance)

    def overlap(self) -> Overlap:
        """The overlap in this run."""
        training = sum(seconds for (_, busy), seconds in self._times.items() if busy)
        running = sum(count * seconds for (count, _), seconds in self._times.items())
        cores = self._sharing.cores
        full = {count: seconds for (count, busy), seconds in self._times.items() if busy and count >= cores}
        met = sum(count * seconds for count, seconds in full.items())
        return Overlap(sum(full.values()) / training if training else 0.0, met / running if running else 0.0)

    def _committed(self, step: int, groups: list[Group]) -> None:
        super()._committed(step, groups)
        recorder, now = self.recorder, self.loop.time()
        running_s = sum(each.ran_until(now) for each in self.rollouts if isinstance(each, SharedRollout))
        ages = sum(age * count for age, count in recorder.token_staleness.items())
        self.marks.append(Mark(now, recorder.trained_tokens, ages, sum(self.trainer.idle.values()), running_s))


def calibrated(shares: Shares, setting: Setting, cores: int, trains: Callable[[int], bool], seed: int = 0) -> Sharing:
    """The shares under which simulating the measured run reproduces it, with the overlap of the simulation itself."""
    sharing = Sharing.measured(shares, cores, Overlap.guessed(shares, cores, setting.instances))
    for _ in range(ROUNDS):
        cluster = SharedCluster(setting, seed, sharing, trains)
        cluster.run()
        sharing = Sharing.measured(shares, cores, cluster.overlap())
    return sharing
