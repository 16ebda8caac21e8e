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
"""

from __future__ import annotations

from math import sqrt

from bench.shared_cores import SharedCluster, SharedRollout, SharedTrainer, Sharing
from staleflow.simulate.setting import Setting
from staleflow.simulate.trainer import SimTrainer

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


class CardTrainer(SharedTrainer):
    def set_speed(self, speed: float) -> None:
        if abs(speed / self._speed - 1) > NOTICED:
            super().set_speed(speed)


class CardCluster(SharedCluster):
    rollout_kind = CardRollout

    def __init__(self, setting: Setting, seed: int, slice_s: float | None) -> None:
        """``slice_s``: None if everyone has a card."""
        self._slice_s = slice_s
        super().__init__(setting, seed, ENOUGH, lambda _: True)

    def new_trainer(self) -> SimTrainer:
        setting = self.setting
        parts = (self.loop, setting.trainer, setting.groups, self.weights, self.pushed, self._trainer_waits_for)
        trainer = CardTrainer(*parts, trains=self._trains)
        trainer.changed = self._share
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
    work = setting.trainer.train_s(end.tokens - begin.tokens + prompts)
    busy = end.time - begin.time - (end.trainer_idle_s - begin.trainer_idle_s)
    return work / busy


def slice_for(setting: Setting, share: float) -> float:
    """The longer the slices, the more of the card has a trainer beside steps of decoding that are shorter."""
    low, high = SHORTEST_S, LONGEST_S
    for _ in range(ROUNDS):
        middle = sqrt(low * high)
        cluster = CardCluster(setting, 0, middle)
        cluster.run()
        low, high = (middle, high) if trainers_share(cluster) < share else (low, middle)
    return sqrt(low * high)
