"""A whole run of episodes in one process, on virtual time: the control plane, real engines and a real trainer.

An environment is a coroutine over tokens: ``async def play(episodes, name, problem) -> Outcome``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.agents.outcome import Outcome, failed
from staleflow.agents.turns import EpisodeOverError
from staleflow.coordinator.strategies import Strategies
from staleflow.protocol import StalenessLedger
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.options import EngineOptions, Sampling
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.episodes import Environments, Episodes
from staleflow.runtime.ports import Heard
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Limits, Payloads
from staleflow.tasks.task import Problem
from staleflow.training.options import TrainerOptions
from staleflow.training.trainer import StepReport, Trainer
from staleflow.types import Chunk, Command, Row
from staleflow.workers.rollout import Requests, RolloutWorker
from tests.coordinator.make_situations import COST

VOCABULARY, END = 48, 1
MOST = 24
"""Made tokens of a branch."""
STEP_S = 0.01
Play = Callable[[Episodes, str, Problem], Awaitable[Outcome]]


def save_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt_of(number: int) -> list[int]:
    return [2 + (number * 7 + at) % 40 for at in range(4 + number % 3)]


class Prompts:
    def tokens(self, prompt: int) -> int | None:
        return len(prompt_of(prompt))

    def ids(self, prompt: int) -> bytes:
        return np.array(prompt_of(prompt), "<i4").tobytes()


class Store:
    """The weights of each version."""

    def __init__(self, first: dict[str, torch.Tensor]) -> None:
        self.versions = [first]

    def push(self, weights: dict[str, torch.Tensor]) -> None:
        self.versions.append({name: tensor.detach().clone() for name, tensor in weights.items()})

    def pull(self, into: Any, at_least: int) -> int:
        version = len(self.versions) - 1
        assert version >= at_least
        for name, tensor in into.items():
            tensor.copy_(self.versions[version][name])
        return version


class Instance:
    """A worker with a real engine, behind a port that is called at once."""

    def __init__(self, name: str, folder: Path, store: Store, incarnation: int = 0) -> None:
        self.name = name
        options = EngineOptions(kv_tokens=4096, page_size=4, max_running=16, dtype="float32")
        sampling = Sampling(max_tokens=MOST, stop_tokens=(END,))
        engine = TorchEngine(folder, options, version=-1)
        self.worker = RolloutWorker(name, engine, store, Requests(sampling, seed=5), incarnation)
        engine.pull(store, 0)
        self.made: dict[tuple[str, int], tuple[list[int], list[float], Any]] = {}
        """What left the engine, by name and epoch."""
        self.alive = True

    def send(self, command: Command) -> None:
        self.worker.hear(command)

    def heard(self) -> Heard:
        return Heard(now(), self.worker.applied.incarnation, self.worker.applied, self.worker.engine.snapshot())

    def held(self) -> list[tuple[str, int]]:
        return self.worker.held()

    async def serve(self, world: "World") -> None:
        while self.alive:
            await asyncio.sleep(STEP_S)
            if self.worker.pulling is not None:
                self.worker.pull()
            if self.worker.engine.busy:
                for result in self.worker.step().finished:
                    self.made[result.name, result.epoch] = result.tokens, result.logprobs, result.spans
            if (report := self.worker.report(everything=True)) is not None and self.alive:
                world.control.on_report(report)


class Pool:
    """Plays every episode as a task."""

    def __init__(self, world: "World", play: Play) -> None:
        self.world, self._play = world, play
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.played: list[tuple[str, int]] = []

    def play(self, episode: str, attempt: int, problem: Problem) -> None:
        self.cancel(episode)
        self.played.append((episode, attempt))
        self.tasks[episode] = asyncio.get_running_loop().create_task(self._run(episode, attempt, problem))

    def cancel(self, episode: str) -> None:
        if (task := self.tasks.pop(episode, None)) is not None:
            task.cancel()

    async def _run(self, episode: str, attempt: int, problem: Problem) -> None:
        episodes = self.world.episodes
        try:
            outcome = await self._play(episodes, episode, problem)
        except EpisodeOverError:
            return
        except RuntimeError as error:
            outcome = failed(str(error))
        self.tasks.pop(episode, None)
        episodes.outcome(episode, attempt, outcome)


class World:
    """Call it inside ``on_virtual_time``."""

    def __init__(
        self,
        folder: Path,
        play: Play,
        *,
        groups: int = 2,
        size: int = 3,
        staleness: int = 1,
        instances: int = 2,
        max_given: int = 64,
        trainer: dict[str, Any] | None = None,
        tries: int = 3,
    ) -> None:
        self.shape = groups, size, staleness, max_given, tries
        model = LlamaForCausalLM.from_pretrained(folder)
        self.trainer = Trainer(model, TrainerOptions(max_staleness=staleness, **(trainer or {})))
        self.store = Store({name: tensor.detach().clone() for name, tensor in self.trainer.weights().items()})
        self.instances = [Instance(f"i{at}", folder, self.store) for at in range(instances)]
        self.reports: list[StepReport] = []
        self.rows: list[list[list[Row]]] = []
        """By step: what was trained, group by group."""
        self._fed: list[list[Row]] = []
        self._play = play
        self.journal = MemoryJournal()
        self.term = 0
        self._control(self._server(self.journal))

    def _server(self, journal: MemoryJournal) -> EpisodeServer:
        groups, size, staleness, max_given, _ = self.shape
        limits = Limits(MOST, 64, VOCABULARY, max_given=max_given)
        return EpisodeServer(StalenessLedger(groups, staleness), size, 0, journal, Payloads(limits))

    def _control(self, server: EpisodeServer) -> None:
        self.server = server
        self.term += 1
        self.pool = Pool(self, self._play)
        environments = Environments(self.pool, lambda number: Problem(str(number), {}), tries=self.shape[4])
        settings = Settings(Strategies(headroom=8), COST, cycle_s=STEP_S, pull_s=0.01)
        self.control = ControlPlane(settings, server, self, self, Prompts(), self.term, environments)
        assert self.control.episodes is not None
        self.episodes = self.control.episodes

    # Ports

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        rows = [self.server.rows([group]) for group in groups]
        self._fed += rows
        self.trainer.feed(step, rows)

    def finish(self, step: int) -> None:
        asyncio.get_running_loop().call_later(STEP_S, self._update, step)

    def _update(self, step: int) -> None:
        if step != self.trainer.version or not self._fed:
            return
        self.reports.append(self.trainer.finish(step))
        self.rows.append(self._fed)
        self._fed = []
        self.store.push(self.trainer.weights())
        self.control.on_pushed(self.trainer.version)

    def reset(self) -> None:
        self.trainer.reset()
        self._fed = []

    def durable(self) -> int:
        return self.trainer.version

    def score(self, trajectory: Trajectory) -> None:
        raise AssertionError(f"{trajectory.name} is scored by its environment")

    # A run

    async def run(self, steps: int, between: Callable[["World"], Awaitable[None]] | None = None) -> None:
        self.tasks = [asyncio.create_task(each.serve(self)) for each in self.instances]
        for each in self.instances:
            self.control.join(each)
        run = asyncio.create_task(self.control.run(steps))
        if between is not None:
            first = self.control
            await between(self)
            if self.control is not first:
                run.cancel()
                run = asyncio.create_task(self.control.run(steps))
        await asyncio.wait_for(run, 60)
        for task in self.tasks:
            task.cancel()

    def restart(self, steps: int) -> None:
        """The control plane and all environments die; another one replays the journal."""
        for name in list(self.pool.tasks):
            self.pool.cancel(name)
        before, journal = self.server, MemoryJournal()
        server = self._server(journal)
        server.replay(self.journal.events)
        journal.events = list(self.journal.events)
        assert server.payloads is not None
        assert before.payloads is not None
        for name in [*server.groups, *(each.name for each in server if each.state != "aborted")]:
            tokens, logprobs = before.payloads.bytes_of(name)
            if tokens:
                server.payloads.add(name, Chunk(0, tokens, logprobs))
        self.journal = journal
        self._control(server)
        for each in self.instances:
            each.worker.take_over(self.term)
            self.control.join(each)
        self.control.recover(steps)


def now() -> float:
    return asyncio.get_running_loop().time()
