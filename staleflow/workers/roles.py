"""What each role of a run loads before it serves: an instance, the trainer, the evaluator.

    serve = build(setup, link)          # loads, says ``Ready``, and returns the loop to run
    serve()

Nothing here knows how the process was started or what carries its messages.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.rollout.options import ENGINES
from staleflow.types import Ready, Setup
from staleflow.workers.link import Link

if TYPE_CHECKING:
    from staleflow.config import Config
    from staleflow.rollout.engine import Engine
    from staleflow.servers.weights import LocalParameterServer


def build(setup: Setup, link: Link) -> Callable[[], None]:
    return {"instance": _instance, "trainer": _trainer, "evaluator": _evaluator}[setup.role](setup, link)


class LazyWeights:
    """The parameter server, joined at the first pull: its writer may start later than its readers. A copy in another
    process joins it by itself."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._server: LocalParameterServer | None = None

    def __reduce__(self) -> tuple[type[LazyWeights], tuple[str]]:
        return LazyWeights, (self._store,)

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:
        return self._joined().pull(into, at_least)

    def lend(self, use: Callable[[int, Iterator[tuple[str, Any]]], None], at_least: int) -> int:
        return self._joined().lend(use, at_least)

    def _joined(self) -> LocalParameterServer:
        if self._server is None:
            from staleflow.servers.weights import LocalParameterServer

            self._server = LocalParameterServer.attach(self._store)
        return self._server


def _instance(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.tasks.opening import stop_tokens
    from staleflow.workers.rollout import Requests, RolloutWorker, serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    requests = Requests(config.sampling(stop_tokens(Path(setup.model))), config.seed)
    worker = RolloutWorker(setup.name, _engine(setup, config), LazyWeights(setup.store), requests, setup.incarnation)
    link.send(Ready(-1))
    return lambda: serve(worker, link)


def _engine(setup: Setup, config: Config) -> Engine:
    make = ENGINES.load(config.rollout.engine)
    return make(setup.model, config.engine_options(), **config.rollout.engine_arguments)


def _trainer(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.servers.weights import standby_of
    from staleflow.training.build import build
    from staleflow.training.checkpoints import load as load_checkpoint
    from staleflow.training.standby import Standby
    from staleflow.workers.trainer import TrainerWorker, serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    trainer = build(setup.model, config.trainer_options())
    weights = _store(setup, setup.store, config.rollout.dtype)
    kept = Standby(_store(setup, standby_of(setup.store)), Path(setup.run)) if config.processes.with_standby else None
    stores = [weights] if kept is None else [weights, kept]
    worker = TrainerWorker(trainer, weights, link.send, Path(setup.model), kept)
    if not worker.revive() and setup.checkpoint:
        load_checkpoint(trainer, setup.checkpoint)
    worker.publish()
    link.send(Ready(trainer.version))

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


def _store(setup: Setup, name: str, dtype: str = "float32") -> LocalParameterServer:
    """That of the trainer before this one, or a new one. One left by an earlier attempt of the run is not resumed
    from: it may be ahead of the checkpoint that this attempt began with."""
    import torch

    from staleflow.servers.weights import LocalParameterServer, NoStoreError

    if setup.standby:
        with contextlib.suppress(NoStoreError):  # it died before it made one
            return LocalParameterServer.take_over(name)
    cast = torch.bfloat16 if dtype == "bfloat16" else None  # in full precision an engine reads what is trained
    return LocalParameterServer.create(name, dtype=cast)


def _evaluator(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.reward.judge import Judge
    from staleflow.tasks.opening import decoder_of, open_source, open_task, was_cut
    from staleflow.workers.best import Best
    from staleflow.workers.evaluator import Evaluator, Signs, serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    source = open_source(config.data, config.seed)
    task = open_task(config.data, source, Path(setup.model), config.seed, config.evaluation.problems)
    engine = _engine(setup, config)
    cut = was_cut(task, config.rollout.stop_strings)
    judge = Judge(config.reward, decoder_of(config.data, Path(setup.model)), cut)
    moved, sampling = Signs(link).move, config.evaluation_sampling(task.stop_tokens)
    kept = Path(setup.run) / "kept"
    if not setup.standby:  # versions of another attempt, which may not be those that this one makes
        shutil.rmtree(kept, ignore_errors=True)
    best = None
    if config.checkpoints.best:
        best = Best(Path(setup.run) / "checkpoints" / "best", Path(setup.model), config.evaluation.figure)
    evaluator = Evaluator(
        engine,
        LazyWeights(setup.store),
        task.held_out,
        sampling,
        judge,
        kept,
        moved,
        config.evaluation.samples,
        config.reward.names,
        best,
    )
    link.send(Ready(-1))
    return lambda: serve(evaluator, link)
