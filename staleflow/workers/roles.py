"""What each role of a run loads before it serves: an instance, the trainer, the evaluator.

    serve = build(setup, link)          # loads, says ``Ready``, and returns the loop to run
    serve()

Nothing here knows how the process was started or what carries its messages.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.rollout.making import make_engine
from staleflow.servers.weights import NoStoreError, standby_of
from staleflow.types import Moved, Ready, Setup
from staleflow.workers.link import Link, Signs
from staleflow.workers.own_engine import watched

if TYPE_CHECKING:
    from staleflow.config import Config
    from staleflow.rollout.engine import Engine
    from staleflow.servers.weights.mirror import MirroredWeights
    from staleflow.servers.weights.parameter_server import LocalParameterServer
    from staleflow.workers.trainer import TrainerWorker


ANNOUNCED_S = 600.0
"""For a version that was announced. Its trainer may have died with all memory, and another makes it again."""
LOOK_S = 0.02
TAKE_OVER_S = 60.0
"""A trainer that begins on another node may find somebody there who still fetches."""


def build(setup: Setup, link: Link) -> Callable[[], None]:
    serve = {"instance": _instance, "trainer": _trainer, "evaluator": _evaluator}[setup.role](setup, link)
    gc.freeze()  # what is loaded stays: to look at all of it for garbage takes a quarter of a second each time
    return serve


class LazyWeights:
    """The parameter server, joined at the first pull: its writer may start later than its readers, and after the loss
    of all memory another one makes it again. A copy in another process joins it by itself."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._server: LocalParameterServer | None = None
        self.moved: Callable[[], None] = lambda: None
        """Called now and then while it waits."""

    def __reduce__(self) -> tuple[type[LazyWeights], tuple[str]]:
        return LazyWeights, (self._store,)

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:
        return self.wait_for(at_least).pull(into, at_least)

    def lend(self, use: Callable[[int, Iterator[tuple[str, Any]]], None], at_least: int) -> int:
        return self.wait_for(at_least).lend(use, at_least)

    def wait_for(self, at_least: int) -> LocalParameterServer:
        """Until the version is there, as it mostly is. ``TimeoutError`` if it does not come."""
        until = time.monotonic() + ANNOUNCED_S
        while (server := self._joined()) is None or server.newest() < at_least:
            if time.monotonic() > until:
                raise TimeoutError(f"version {at_least} did not come within {ANNOUNCED_S:g} s: no trainer has made it")
            self.moved()
            time.sleep(LOOK_S)
        return server

    def close(self) -> None:
        if self._server is not None:
            self._server.detach()

    def _joined(self) -> LocalParameterServer | None:
        if self._server is None:
            from staleflow.servers.weights.parameter_server import LocalParameterServer

            with contextlib.suppress(NoStoreError):
                self._server = LocalParameterServer.attach(self._store)
        return self._server


def _weights(setup: Setup, link: Link) -> LazyWeights | MirroredWeights:
    if setup.source:
        from staleflow.servers.weights.mirror import MirroredWeights

        weights = MirroredWeights(setup.store, Path(setup.source))
    else:
        weights = LazyWeights(setup.store)
    weights.moved = Signs(link).move  # whoever waits for another trainer does not stand still
    return weights


def _instance(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.tasks.opening import stop_tokens
    from staleflow.workers.rollout import Requests, RolloutWorker, serve, stream_s

    config = load(str(Path(setup.run) / "config.yaml"), [])
    requests = Requests(config.sampling(stop_tokens(Path(setup.model))), config.seed)
    weights = _weights(setup, link)
    parts = setup.name, _engine(setup, config), weights, requests, setup.incarnation
    worker = RolloutWorker(*parts, before_pull=weights.wait_for)
    link.send(Ready(-1))
    every_s = stream_s(config.rollout.instances)
    return _then_close(weights, lambda: serve(worker, link, every_s=every_s))


def _then_close(weights: LazyWeights | MirroredWeights, serve: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with contextlib.closing(weights):
            serve()

    return run


def _engine(setup: Setup, config: Config) -> Engine:
    rollout = config.rollout
    again = setup.incarnation > 1
    engine = make_engine(rollout.engine, setup.model, config.engine_options(), rollout.engine_arguments, again)
    return watched(engine, rollout.engine)


def _trainer(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.workers.trainer import serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    stores: list[Any] = []
    make = _sharded if config.training.ranks > 1 else _alone
    worker = make(setup, link, config, stores)
    if not worker.revive() and setup.checkpoint:
        worker.load(setup.checkpoint)
    worker.publish()
    link.send(Ready(worker.trainer.version))

    def run() -> None:
        leave = methodcaller("close")
        try:
            serve(worker, link)
        except BaseException:  # for the one that takes its place, be it only to save
            leave = methodcaller("detach")
            raise
        finally:
            for store in stores:
                leave(store)

    return run


def _alone(setup: Setup, link: Link, config: Config, stores: list[Any]) -> TrainerWorker:
    """A trainer in this process. ``stores`` gets what is to be closed, or left to a successor."""
    from staleflow.training.build import build
    from staleflow.training.rehearsal import rehearse
    from staleflow.training.standby import Standby
    from staleflow.workers.trainer import TrainerWorker

    trainer = build(setup.model, config.trainer_options())
    if trainer.device.type == "cuda":
        rehearse(trainer)
    weights = store_of(setup, setup.store, config.rollout.dtype)
    stores.append(weights)
    kept = None
    if config.processes.with_standby:
        kept = Standby(store_of(setup, standby_of(setup.store)), Path(setup.run))
        stores.append(kept)
    return TrainerWorker(trainer, weights, link.send, Path(setup.model), kept)


def _sharded(setup: Setup, link: Link, config: Config, stores: list[Any]) -> TrainerWorker:
    """The same over several processes."""
    from staleflow.workers.team import Team

    team = Team(setup, config.training.ranks)  # before this one imports what they import too
    from staleflow.workers.sharded import lead

    return lead(team, setup, link, config, stores)


def store_of(setup: Setup, name: str, dtype: str = "float32") -> LocalParameterServer:
    """That of the trainer before this one, or a new one. One left by an earlier attempt of the run is not resumed
    from: it may be ahead of the checkpoint that this attempt began with."""
    import torch

    from staleflow.servers.weights.parameter_server import LocalParameterServer

    if setup.standby:
        with contextlib.suppress(NoStoreError):  # it died before it made one
            return LocalParameterServer.take_over(name, wait_s=TAKE_OVER_S if setup.source else 0.0)
    cast = torch.bfloat16 if dtype == "bfloat16" else None  # in full precision an engine reads what is trained
    return LocalParameterServer.create(name, dtype=cast)


def _evaluator(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.reward.judge import Judge
    from staleflow.tasks.opening import decoder_of, open_source, open_task, was_cut
    from staleflow.workers.best import Best
    from staleflow.workers.evaluator import Evaluator, serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    source = open_source(config.data, config.seed)
    task = open_task(config.data, source, Path(setup.model), config.seed, config.evaluation.problems)
    engine = _engine(setup, config)
    cut = was_cut(task, config.rollout.stop_strings)
    judge = played = None
    if config.environment.play is None:
        judge = Judge(
            config.reward, decoder_of(config.data, Path(setup.model)), cut, lambda why: link.send(Moved(why=why))
        )
    else:
        from staleflow.workers.playing import played_by

        played = played_by(engine, config.environment, task, Path(setup.model))
    moved, sampling = Signs(link).move, config.evaluation_sampling(task.stop_tokens)
    kept = Path(setup.run) / "kept"
    if not setup.standby:  # versions of another attempt, which may not be those that this one makes
        shutil.rmtree(kept, ignore_errors=True)
    best = None
    if config.checkpoints.best:
        best = Best(Path(setup.run) / "checkpoints" / "best", Path(setup.model), config.evaluation.figure)
    weights = _weights(setup, link)
    evaluator = Evaluator(
        engine,
        weights,
        task.held_out,
        sampling,
        judge,
        kept,
        moved,
        config.evaluation.samples,
        config.reward.names,
        best,
        played,
    )
    link.send(Ready(-1))
    return _then_close(weights, lambda: serve(evaluator, link))
