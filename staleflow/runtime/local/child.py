"""What every process of a run begins with: ``python -m staleflow.runtime.local.child FD``.

The socket ``FD`` brings a ``Setup`` first. The process takes its place among the cores, loads what its role needs, says
``Ready``, and serves until it is told to stop or the control plane is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.runtime.local.directory import RunDirectory
from staleflow.runtime.local.link import Gone, Link
from staleflow.runtime.local.messages import Broken, Ready, Setup, ToProcess
from staleflow.runtime.local.parts import engine_options, sampling, trainer_options

if TYPE_CHECKING:
    from staleflow.servers.weights import LocalParameterServer

START_S = 60.0


class LazyWeights:
    """The parameter server, joined at the first pull: its writer may start later than its readers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._server: Any = None

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:
        if self._server is None:
            from staleflow.servers.weights import LocalParameterServer

            self._server = LocalParameterServer.attach(self._setup.store, registry=registry(self._setup))
        return self._server.pull(into, at_least)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the control plane decides when to stop
    link = Link(socket.socket(fileno=descriptor), ToProcess)
    setup = next(iter(link.receive(START_S)), None)
    if not isinstance(setup, Setup):
        sys.exit(f"no set-up came within {START_S:g} s")
    take_place(setup)
    try:
        serve = {"instance": _instance, "trainer": _trainer, "evaluator": _evaluator}[setup.role](setup, link)
        serve()
    except Gone:
        return
    except ValueError as error:  # what the user can put right, in one line
        with contextlib.suppress(Gone):
            link.send(Broken(str(error)))
        raise


def registry(setup: Setup) -> Path:
    """Where the parameter server of this run is found, and of no other run."""
    return RunDirectory(Path(setup.run)).weights


def take_place(setup: Setup) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # cores may have been taken away since they were counted
            os.sched_setaffinity(0, setup.cores)
    if setup.nice:
        os.nice(setup.nice)
    import torch

    torch.set_num_threads(setup.threads)


def _instance(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.rollout.builtin import TorchEngine
    from staleflow.rollout.worker import RolloutWorker, serve
    from staleflow.tasks.opening import stop_tokens

    config = load(str(Path(setup.run) / "config.yaml"), [])
    engine = TorchEngine(setup.model, engine_options(config), version=-1)
    drawing = sampling(config, stop_tokens(Path(setup.model)))
    worker = RolloutWorker(engine, LazyWeights(setup), drawing, config.seed)
    link.send(Ready(-1))
    return lambda: serve(worker, link)


def _trainer(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.training.build import build
    from staleflow.training.checkpoints import load as load_checkpoint
    from staleflow.training.standby import revive
    from staleflow.training.trainer import StalenessError
    from staleflow.training.worker import TrainerWorker, serve

    config = load(str(Path(setup.run) / "config.yaml"), [])
    trainer = build(setup.model, trainer_options(config), config.training.device)
    weights = _store(setup)
    if weights.newest() >= 0:
        revive(trainer, weights)
    elif setup.checkpoint:
        load_checkpoint(trainer, setup.checkpoint)
    worker = TrainerWorker(trainer, weights, link.send, Path(setup.model), standby=config.processes.standby)
    worker.publish()
    link.send(Ready(trainer.version))

    def run() -> None:
        try:
            serve(worker, link)
        except (ValueError, StalenessError, FloatingPointError):  # another trainer would come to the same
            weights.close()
            raise
        except BaseException:
            weights.detach()
            raise
        weights.close()

    return run


def _store(setup: Setup) -> LocalParameterServer:
    """That of the trainer before this one, or a new one. One left by an earlier life of the run is not gone on from:
    it may be ahead of the checkpoint that this life began with."""
    from staleflow.servers.weights import LocalParameterServer, NoStoreError

    if setup.standby:
        with contextlib.suppress(NoStoreError):  # it died before it made one
            return LocalParameterServer.take_over(setup.store, registry=registry(setup))
    return LocalParameterServer.create(setup.store, registry=registry(setup))


def _evaluator(setup: Setup, link: Link) -> Any:
    from staleflow.config import load
    from staleflow.reward.function import load_reward
    from staleflow.rollout.builtin import TorchEngine
    from staleflow.rollout.evaluator import Evaluator, serve
    from staleflow.tasks.opening import open_task

    config = load(str(Path(setup.run) / "config.yaml"), [])
    task = open_task(config, Path(setup.model))
    engine = TorchEngine(setup.model, engine_options(config), version=-1)
    evaluator = Evaluator(
        engine,
        engine.model.parameters,
        LazyWeights(setup),
        task.held_out,
        sampling(config, task.stop_tokens, config.evaluation.temperature),
        load_reward(config.reward.function, config.reward.timeout_s),
        task.decode,
    )
    link.send(Ready(-1))
    return lambda: serve(evaluator, link)


if __name__ == "__main__":
    main(int(sys.argv[1]))
