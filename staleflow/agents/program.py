"""Plays an episode by a program of your own that honours ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. ::

    environment:
      play: program
      arguments: {command: [python3, my_agent.py]}

The program is started for each episode, in the folder of the run's start, with the task as one JSON object
(``prompt``, ``facts``) on its standard input. Its last line of output is the reward: a number, or a JSON object
``{"reward": 1, "parts": {...}, "truncated": "why"}``, of which all but the reward may be left out. With ``score``, a
``module:function``, that is called as ``score(task, output)`` instead, and returns a number or an ``Outcome``. An exit
code other than 0 is a failure.

Every call that it makes under its key belongs to the episode. Its ``OPENAI_MODEL`` is ``policy``; any name is served.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from staleflow.agents.client import Model
from staleflow.agents.outcome import Outcome, failed, scored, truncated
from staleflow.agents.play import Limits, in_thread
from staleflow.agents.tools import ToolLimits, run
from staleflow.registry import Entry, Registry
from staleflow.tasks.task import Problem

SCORES: Registry[Entry] = Registry("environment.arguments.score", {}, takes=("task", "output"))


class Said(msgspec.Struct):
    """The last line of a program."""

    reward: float
    parts: dict[str, float] = {}
    truncated: str = ""


async def play(
    task: Problem,
    model: Model,
    limits: Limits,
    command: Sequence[str],
    score: str = "",
    memory_mib: int | None = None,
) -> Any:
    given = msgspec.json.encode({"prompt": task.prompt, "facts": task.facts}).decode()
    seen = {**os.environ, **model.environment}
    async with limits.agent():
        done = await run(command, given, ToolLimits(None, memory_mib, None), seen, folder=os.getcwd())
    if done.code:
        return failed(f"{command[0]}: {done.why}; its last words: {done.output[-500:].strip()}")
    async with limits.score():
        return await in_thread(SCORES.load(score), task, done.output) if score else said(done.output)


def said(output: str) -> Outcome:
    """What the last line says."""
    line = (output.strip().splitlines() or [""])[-1]
    try:
        found = msgspec.json.decode(line, type=float | Said)
    except msgspec.DecodeError as error:
        return failed(f"the program's last line is {line[:100]!r}, which is not a reward ({error})")
    if isinstance(found, float):
        return scored(found)
    return (
        truncated(found.reward, found.truncated, found.parts) if found.truncated else scored(found.reward, found.parts)
    )
