"""What an environment is: a coroutine that plays one episode and says how it ended. ::

    async def play(task: Problem, model: Model, limits: Limits) -> Outcome:
        messages = [{"role": "user", "content": task.prompt}]
        async with limits.setup():
            sandbox = await start_sandbox()
        try:
            async with limits.agent():
                while calls := (message := await model.chat(messages, tools=TOOLS)).get("tool_calls"):
                    messages += [message, *await sandbox.run(calls)]
        except LimitError as error:
            return truncated(0.0, str(error))
        async with limits.score():
            return scored(await sandbox.score(message))

``environment.play=my_module:play`` names it; ``environment.arguments`` are passed by name. What is in none of the three
phases counts as the agent's. ``model.base_url`` and ``model.api_key`` serve every client that speaks OpenAI's protocol.
A bare number is taken for ``scored``. Whatever it raises is a failure: the episode is played again.

The loop is shared with the other episodes of the worker: what blocks goes to ``in_thread`` or to a process
(``tools.py``).
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar

from staleflow.agents.client import LimitError, Model
from staleflow.agents.options import PLAYS, Environment
from staleflow.errors import ConfigError
from staleflow.tasks.task import Messages, Problem

Phase = Literal["setup", "agent", "score"]
Play = Callable[[Problem, Model, "Limits"], Awaitable[Any]]
Result = TypeVar("Result")


class Limits:
    """The time limits of an episode, and its phases."""

    def __init__(self, options: Environment, entered: Callable[[Phase], None] = lambda _: None) -> None:
        self.max_turns = options.max_turns
        self.seconds: Mapping[Phase, float] = {
            "setup": options.setup_s,
            "agent": options.agent_s,
            "score": options.score_s,
        }
        self._entered = entered
        self._phase: Phase = "agent"
        self._timer: asyncio.Timeout | None = None

    def setup(self) -> AbstractAsyncContextManager[None]:
        return self._in("setup")

    def agent(self) -> AbstractAsyncContextManager[None]:
        """Time in which the model is asked does not count."""
        return self._in("agent")

    def score(self) -> AbstractAsyncContextManager[None]:
        return self._in("score")

    def over(self) -> bool:
        """Raise ``LimitError`` in the phase that the episode is in; False if it is in none of the three."""
        if self._timer is None or self._timer.expired():
            return False
        self._timer.reschedule(asyncio.get_running_loop().time())
        return True

    def why(self) -> str:
        return f"its {self._phase} took more than environment.{self._phase}_s={self.seconds[self._phase]:g}"

    @asynccontextmanager
    async def _in(self, phase: Phase) -> AsyncIterator[None]:
        self._enter(phase)
        timer = self._timer = asyncio.timeout(None)
        try:
            async with timer:
                yield
        except TimeoutError:
            if timer.expired():
                raise LimitError(self.why()) from None
            raise
        finally:
            self._timer = None
            self._enter("agent")

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase:
            self._phase = phase
            self._entered(phase)


def load_play(options: Environment) -> Play:
    """The configured environment, with its arguments."""
    assert options.play is not None
    PLAYS.check(options.play, options.arguments)
    function = PLAYS.load(options.play)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"environment.play={options.play} does not wait: write async def {function.__name__}(...)")
    return partial(function, **options.arguments)


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """What blocks, in a thread. A thread cannot be cancelled: this returns no sooner than the function does, so that
    a worker in which one never does is killed."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(task)
        raise


def messages_of(said: Any) -> Messages:
    """Messages as they are; a text as that of the user; nothing as none."""
    return list(said) if isinstance(said, list) else [{"role": "user", "content": str(said)}] if said else []
