"""The world behind the ports, as small as it can be: everything is remembered and nothing happens by itself."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, TypeVar

from staleflow.coordinator.strategies import Strategies
from staleflow.protocol import StalenessLedger
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.ports import Heard
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate.clock import VirtualLoop
from staleflow.types import Command, Drop, Fence, InstanceState, PullWeights, Report, Submit, TrajectoryNews, Work
from tests.coordinator.make_situations import COST

Result = TypeVar("Result")


def on_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    return VirtualLoop().run(main)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, on virtual time."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        on_virtual_time(test(*arguments, **named))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


class FakeInstance:
    """Remembers its commands. It answers for its state at any time, until ``silent_since``."""

    def __init__(self, name: str = "i0", version: int = 0, incarnation: int = 0) -> None:
        self.name = name
        self.version = version
        self.incarnation = incarnation
        self.applied = Fence(0, 0, 0)
        self.running = 0
        self.context = 0
        self.kv_free = 100_000
        self.silent_since: float | None = None
        self.looked = 0
        self.commands: list[Command] = []
        self.holding: list[tuple[str, int]] = []

    def send(self, command: Command) -> None:
        self.commands.append(command)

    @property
    def submitted(self) -> list[Work]:
        return [work for command in self.commands if isinstance(command, Submit) for work in command.work]

    @property
    def aborted(self) -> list[tuple[str, int]]:
        return [name for command in self.commands if isinstance(command, Drop) for name in command.names]

    @property
    def pulls(self) -> list[int]:
        return [command.version for command in self.commands if isinstance(command, PullWeights)]

    @property
    def state(self) -> InstanceState:
        return InstanceState(self.version, self.running, 0, self.context, self.kv_free, 100_000, 64)

    def heard(self) -> Heard:
        self.looked += 1
        try:
            time = now() if self.silent_since is None else self.silent_since
        except RuntimeError:  # no loop: a unit test without time
            time = 0.0
        return Heard(time, self.incarnation, self.applied, self.state)

    def held(self) -> list[tuple[str, int]]:
        return self.holding

    def report(self, **news: Any) -> Report:
        return Report(self.name, self.incarnation, self.applied, self.state, **news)


class FakeTrainer:
    """Remembers what it was fed since the last reset, step by step."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, str]] = []
        self.finished: list[int] = []
        self.resets = 0
        self.version = 0

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        self.fed += [(step, group.name) for group in groups]

    def finish(self, step: int) -> None:
        self.finished.append(step)

    def reset(self) -> None:
        self.resets += 1
        self.fed, self.finished = [], []

    def durable(self) -> int:
        return self.version

    def names(self) -> list[str]:
        return [name for _, name in self.fed]


class FakeRewards:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, trajectory: Trajectory) -> None:
        self.asked.append(trajectory.name)


class FakePrompts:
    def __init__(self, count: int = 10**6) -> None:
        self.count = count

    def tokens(self, prompt: int) -> int | None:
        return 100 if prompt < self.count else None

    def ids(self, prompt: int) -> bytes:
        raise AssertionError(f"nobody keeps payload here, yet prompt {prompt} was asked for")


class World:
    """A control plane over fakes. Call it inside ``on_virtual_time``."""

    def __init__(
        self,
        batch: int = 2,
        staleness: int = 1,
        size: int = 1,
        extra: int = 0,
        instances: Sequence[str] = ("i0",),
        prompts: int = 10**6,
        settings: dict[str, Any] | None = None,
        **strategies: Any,
    ) -> None:
        self.journal = MemoryJournal()
        self.server = TrajectoryServer(StalenessLedger(batch, staleness), size, extra, self.journal)
        self.trainer, self.rewards = FakeTrainer(), FakeRewards()
        chosen = Settings(Strategies(**{"migration": "off", **strategies}), COST, **(settings or {}))
        self.control = ControlPlane(chosen, self.server, self.trainer, self.rewards, FakePrompts(prompts))
        self.instances = {name: FakeInstance(name) for name in instances}
        for each in self.instances.values():
            self.control.join(each)

    def start(self, steps: int = 10) -> "asyncio.Task[None]":
        return asyncio.create_task(self.control.run(steps), name="the run")

    async def begin(self, steps: int = 10) -> "asyncio.Task[None]":
        """Until the first trajectories are where they are sent."""
        run = self.start(steps)
        await asyncio.sleep(1)
        return run

    def finish(self, name: str, version: int = 0, tokens: int = 10) -> None:
        """Its instance has made the last token of a trajectory."""
        one = self.server.trajectories[name]
        assert one.instance is not None
        news = TrajectoryNews(name, one.epoch, ((version, tokens),))
        self.control.on_report(self.instances[one.instance].report(finished=[news]))

    def finish_and_score(self, *names: str, version: int = 0) -> None:
        for name in names:
            self.finish(name, version)
            self.control.on_scored(name, 1.0)

    def push(self) -> None:
        """The trainer has made a version durable, and says so."""
        self.trainer.version += 1
        self.control.on_pushed(self.trainer.version)
