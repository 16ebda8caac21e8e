"""Processes that have one card in turn: which of them has it, for how long, and how fast each is because of that.

Kernels of different processes do not run at the same time. Each process that has work gets the card for a slice of
time, and gives it back sooner if it has no more to do. A trainer always has more: it takes whole slices. An instance
launches a step when the one before is done, so a step of decoding that is shorter than a slice is all of its turn::

    round = slice * (1 if the trainer works) + sum of min(step, slice) over the instances that run + a switch for each

Then an instance is ``min(step, slice) / round`` times as fast as alone, and the trainer ``slice / round`` times: how
much of the card each has depends on how many sequences run. One sequence slows the trainer little and waits long for
it; hundreds of them, as right after a pull, hold up the next version. ::

    cluster = CardCluster(setting, seed=0, slice_s=0.002)
    cluster.run()
    cluster.marks
    slice_for(setting, share=0.7)       # the slice with which the trainer has this share beside instances

Without ``Passes`` a trainer works off tokens as they come. With them it makes passes, which cost something however few
tokens they have, and begins with them as the real one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any, NamedTuple

from bench.shared_cores import SharedCluster, SharedRollout, SharedTrainer, Sharing
from staleflow.simulate.setting import Setting
from staleflow.simulate.trainer import Fed, SimTrainer
from staleflow.training.gathering import gathers

ENOUGH = Sharing(10**6, 1.0, 1.0)
SWITCH_S = 1.5e-4
"""In which nobody has the card because it changes hands. By traces of an H200 a step of decoding waits for 2.35 ms
beside a trainer at work, however many sequences run (1 to 240), and the trainer gets about 2.05 ms of that."""
NOTICED = 0.01
"""Speeds that differ by less are not set anew: contexts grow with every step."""
SHORTEST_S, LONGEST_S = 1e-5, 1.0
"""Between these a slice is looked for."""
ROUNDS = 10


class CardRollout(SharedRollout):
    """Calls ``changed`` whenever other sequences run than before."""

    _speed = 1.0

    @property
    def step_s(self) -> float:
        """Its present step, if it had the card to itself."""
        instance = self.engine.instance
        prefilled = min(instance.chunk, instance.prefilling_tokens)
        return instance.cost.step(instance.running, instance.context_tokens, prefilled)

    def set_speed(self, speed: float) -> None:
        if abs(speed / self._speed - 1) > NOTICED:
            self._speed = speed
            self.slow_down(speed)

    def _arm(self) -> None:
        super()._arm()
        if self.running:
            self.changed()


class Passes(NamedTuple):
    pass_s: float
    """Seconds of a pass beyond those of its tokens."""
    micro_tokens: int
    at_once: bool = False
    """Begin with whatever waits whenever there is nothing else to do, as on a GPU of its own."""

    def least_s(self, tokens: float) -> float:
        """Beyond that of tokens, if all passes are full."""
        return self.pass_s * tokens / self.micro_tokens


class CardTrainer(SharedTrainer):
    passes: Passes | None = None

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._waiting: list[int] = []
        """Tokens of each group that no pass was begun with."""
        self._came = 0
        """Groups of the present step."""
        self._last: int | None = None
        """The step, once it is known that no more will come."""

    def set_speed(self, speed: float) -> None:
        if abs(speed / self._speed - 1) > NOTICED:
            super().set_speed(speed)

    def feed(self, step: int, groups: Sequence[Fed]) -> None:
        if self.passes is None:
            super().feed(step, groups)
        elif self.alive:
            self._waiting += [group.tokens if self._trains(group.prompt) else 0 for group in groups]
            self._came += len(groups)
            self._begin()

    def finish(self, step: int) -> None:
        if self.passes is None:
            super().finish(step)
        elif self.alive:
            self._last = step
            self._begin()

    def reset(self) -> None:
        self._waiting, self._came, self._last = [], 0, None
        super().reset()

    def _done(self, timer: int) -> None:
        super()._done(timer)
        if self.passes is not None:
            self._begin()

    def _begin(self) -> None:
        """With what waits, if nothing else is to be done and nothing is waited for."""
        assert self.passes is not None
        tokens, most = sum(self._waiting), self.passes.micro_tokens
        missing = self._batch_size - self._came
        if self.busy or (not self.passes.at_once and gathers(len(self._waiting), missing, tokens, most)):
            return
        if self._waiting:
            self._waiting = []
            self._add(self.cost.train_s(tokens) + self.passes.pass_s * max(1, ceil(tokens / most)), None)
        elif self._last is not None:
            last, self._last, self._came = self._last, None, 0
            super().finish(last)


class CardCluster(SharedCluster):
    rollout_kind = CardRollout

    def __init__(self, setting: Setting, seed: int, slice_s: float | None, passes: Passes | None = None) -> None:
        """``slice_s``: None if everyone has a card."""
        self._slice_s, self.passes = slice_s, passes
        super().__init__(setting, seed, ENOUGH, lambda _: True)

    def new_trainer(self) -> SimTrainer:
        setting = self.setting
        parts = (self.loop, setting.trainer, setting.groups, self.weights, self.pushed, self._trainer_waits_for)
        trainer = CardTrainer(*parts, trains=self._trains)
        trainer.changed, trainer.passes = self._share, self.passes
        return trainer

    def _share(self) -> None:
        if self._slice_s is None:
            return
        trainer, most = self.trainer, self._slice_s
        assert isinstance(trainer, CardTrainer)
        running = [each for each in self.rollouts if isinstance(each, CardRollout) and each.running]
        turns = [min(most, each.step_s or most) for each in running]  # it may not have begun yet
        everyone = sum(turns) + most * trainer.busy
        if len(turns) + trainer.busy > 1:
            everyone += SWITCH_S * (len(turns) + trainer.busy)
        trainer.set_speed(most / everyone if trainer.busy else 1.0)
        for each, turn in zip(running, turns, strict=True):
            each.set_speed(turn / everyone)


def trainers_share(cluster: CardCluster) -> float:
    """Of the card while it trained, over all steps but the first: seconds of work over seconds that went by."""
    setting, begin, end = cluster.setting, cluster.marks[0], cluster.marks[-1]
    prompts = sum(
        setting.group_size * cluster.workload.prompt_tokens(at) for at in range(setting.groups * (setting.steps - 1))
    )
    tokens = end.tokens - begin.tokens + prompts
    work = setting.trainer.train_s(tokens) + (cluster.passes.least_s(tokens) if cluster.passes is not None else 0.0)
    busy = end.time - begin.time - (end.trainer_idle_s - begin.trainer_idle_s)
    return work / busy


def slice_for(setting: Setting, share: float, passes: Passes | None = None) -> float:
    """The longer the slices, the more of the card has a trainer beside steps of decoding that are shorter."""
    low, high = SHORTEST_S, LONGEST_S
    for _ in range(ROUNDS):
        middle = sqrt(low * high)
        cluster = CardCluster(setting, 0, middle, passes)
        cluster.run()
        low, high = (middle, high) if trainers_share(cluster) < share else (low, middle)
    return sqrt(low * high)
