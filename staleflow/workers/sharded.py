"""The first rank of a sharded trainer: to the control plane it is the trainer, to the other ranks it says what to do.

    team = Team(setup, config.training.ranks)
    worker = lead(team, setup, link, config, stores)
    worker.publish()

Whatever it does with the trainer it tells the others first (``workers/rank.py``), and all do it together. A rank that
dies ends the trainer: the run starts another, which starts all its ranks anew and continues from what was published, as
after the death of any trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from staleflow.config import Config
from staleflow.servers.weights import standby_of
from staleflow.training import sharded_checkpoints
from staleflow.training.build import read_model
from staleflow.training.checkpoints import save
from staleflow.training.ranks import meet
from staleflow.training.sharded import ShardedTrainer
from staleflow.training.sharded_store import RankedServer
from staleflow.training.standby import Standby
from staleflow.training.trainer import StepReport, Trainer
from staleflow.training.work import GroupRows
from staleflow.types import Feed, Finish, Reset, Setup
from staleflow.workers.link import Link
from staleflow.workers.rank import MEETING, Flush, Keep, Load, Push, Revive, Write
from staleflow.workers.team import Team
from staleflow.workers.trainer import TrainerWorker


class LeadingTrainer(ShardedTrainer):
    """Says what it does before it does it."""

    def __init__(self, team: Team, *given: Any) -> None:
        self._team = team
        super().__init__(*given)

    def feed(self, step: int, groups: Sequence[GroupRows], missing: int = 0) -> None:
        self._team.tell(Feed(step, [list(group) for group in groups]))
        super().feed(step, groups, missing)

    def advance(self) -> None:
        Trainer.advance(self)  # the others begin when this one does

    def flush(self) -> None:
        if self.waiting:
            self._team.tell(Flush())
        super().flush()

    def finish(self, step: int) -> StepReport:
        self.flush()
        self._team.tell(Finish(step))
        return super().finish(step)

    def reset(self) -> None:
        self._team.tell(Reset())
        super().reset()


class LeadingStandby(Standby):
    def __init__(self, team: Team, *given: Any) -> None:
        self._team = team
        super().__init__(*given)

    def copy(self, trainer: Trainer) -> None:
        self._team.tell(Keep())
        super().copy(trainer)

    def revive(self, trainer: Trainer) -> int:
        self._team.tell(Revive())
        return super().revive(trainer)


class LeadingWorker(TrainerWorker):
    def __init__(self, team: Team, trainer: LeadingTrainer, *given: Any) -> None:
        self._team = team
        self._sharded = trainer
        super().__init__(trainer, *given, save=self._save_together)

    def _push(self) -> None:
        self._team.tell(Push())
        super()._push()

    def _save_together(self, trainer: Trainer, folder: Path, **more: Any) -> None:
        def write(_: Trainer, made: Path) -> None:
            self._team.tell(Write(str(made)))
            sharded_checkpoints.write(self._sharded, made)

        save(trainer, folder, write=write, **more)

    def load(self, folder: str) -> None:
        self._team.tell(Load(folder))
        sharded_checkpoints.load(self._sharded, folder)


def lead(team: Team, setup: Setup, link: Link, config: Config, stores: list[Any]) -> LeadingWorker:
    """The trainer of this process and its team. ``stores`` gets what is to be closed, or left to a successor."""
    from staleflow.workers.roles import store_of

    options = config.trainer_options()
    stores.append(team)
    torch.set_num_threads(max(1, setup.threads // options.ranks))
    model = read_model(setup.model)
    ranks = meet(0, options.ranks, Path(setup.run) / MEETING, options.device)
    trainer = LeadingTrainer(team, model, options, ranks)
    weights = RankedServer(ranks, setup.store, store_of(setup, setup.store, config.rollout.dtype))
    stores.append(weights)
    beside, kept = ranks.beside(), None
    if config.processes.with_standby:
        name = standby_of(setup.store)
        kept = LeadingStandby(team, RankedServer(beside, name, store_of(setup, name)), Path(setup.run))
        stores.append(kept)
    return LeadingWorker(team, trainer, weights, link.send, Path(setup.model), kept)
