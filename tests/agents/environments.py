"""Environments that the tests name; they run in worker processes."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from staleflow.agents.client import LimitError, Model
from staleflow.agents.outcome import Outcome, failed, scored, truncated
from staleflow.agents.play import Limits, in_thread
from staleflow.tasks.task import Problem

WAIT = "import threading; threading.Event().wait()"


async def behave(task: Problem, model: Model, limits: Limits, bonus: float = 0.0) -> Any:  # noqa: ARG001
    """Does what the prompt says."""
    print("what an environment prints is not an answer", flush=True)
    phase, _, how = str(task.prompt).partition(" ")
    if phase in ("setup", "agent", "score"):
        async with getattr(limits, phase)():
            await hang(how, task)
    match task.prompt:
        case "crash":
            os._exit(3)
        case "exit":
            sys.exit(4)
        case "interrupt":
            raise KeyboardInterrupt
        case "base":
            raise BaseException("nobody catches this")
        case "no text":
            return scored(1.0, {"\ud800": 1.0})
        case "exception":
            raise KeyError("no such\nthing")
        case "outside":
            await asyncio.Event().wait()
        case "keep":
            try:
                async with limits.agent():
                    await asyncio.Event().wait()
            except LimitError as error:
                return truncated(0.5, str(error))
        case "cannot be cancelled":
            await stubborn(task)
        case "failed":
            return failed("the sandbox is away")
        case "odd":
            return task.facts["odd"]
        case "nan":
            return scored(float("nan"))
        case "kind":
            return Outcome("excellent", 1.0)  # pyright: ignore[reportArgumentType]
        case "orphan":
            await hang("with a child", task)
        case _:
            return scored(float(task.facts["reward"]) + bonus, {"base": 1.0})


async def hang(how: str, task: Problem) -> None:
    match how:
        case "waits":
            await asyncio.Event().wait()
        case "blocks":
            threading.Event().wait()
        case "thread":
            await in_thread(threading.Event().wait)
        case "with a child":  # in a session of its own, which a signal to the worker's group would miss
            child = subprocess.Popen([sys.executable, "-c", WAIT], start_new_session=True)
            Path(task.facts["file"]).write_text(str(child.pid))
            await asyncio.Event().wait()


async def stubborn(task: Problem) -> None:
    Path(task.facts["file"]).write_text(str(os.getpid()))
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def blocking(task: Problem, model: Model, limits: Limits) -> float:  # noqa: ARG001
    return 1.0


async def broken(task: Problem, model: Model) -> float:  # noqa: ARG001
    return 1.0


def twice(task: Problem, output: str) -> float:  # noqa: ARG001
    """Scores what a program printed."""
    return 2 * float(output)


async def three_turns(task: Problem, model: Model, limits: Limits) -> Outcome:  # noqa: ARG001
    """Whatever the model says, in three turns; a reward that differs between episodes."""
    assert isinstance(task.prompt, list)
    messages: list[Any] = list(task.prompt)
    said = ""
    for _ in range(3):
        message = await model.chat(messages, max_tokens=6)
        said += str(message["content"])
        messages += [message, {"role": "user", "content": "7"}]
    return scored(float(len(said) % 3))


async def always_fails(task: Problem, model: Model, limits: Limits) -> Outcome:  # noqa: ARG001
    return failed("the sandbox is away")
