"""Plays environments with ``reset``, ``step`` and ``close``, as Gymnasium has them, whose actions are texts. ::

    environment:
      play: gym
      arguments: {make: "my_games:Guess", arguments: {most: 100}}

``make(task, **arguments)`` gives one for each episode. ``reset()`` returns ``(observation, info)``, ``step(text)``
returns ``(observation, reward, terminated, truncated, info)``; the rewards are added up. An observation is a text,
which the model reads as a user message, or a list of messages; that of ``reset`` comes after the prompt of the row,
unless it is empty. Its methods run in threads, one at a time. One that never returns costs the worker, with the other
episodes that it plays: give ``environment.workers`` more, and ``environment.episodes`` fewer, where that can happen.
"""

from collections.abc import Mapping
from typing import Any

from staleflow.agents.client import LimitError, Model
from staleflow.agents.outcome import Outcome, scored, truncated
from staleflow.agents.play import Limits, in_thread, messages_of
from staleflow.registry import Entry, Registry
from staleflow.tasks.task import Problem

MAKERS: Registry[Entry] = Registry("environment.arguments.make", {}, takes=("task",))


async def play(
    task: Problem, model: Model, limits: Limits, make: str, arguments: Mapping[str, Any] | None = None
) -> Outcome:
    messages = messages_of(task.prompt)
    rewards: list[float] = []
    environment: Any = None
    try:
        async with limits.setup():
            environment = await in_thread(lambda: MAKERS.load(make)(task, **(arguments or {})))
            observation, _ = await in_thread(environment.reset)
        messages += messages_of(observation)
        async with limits.agent():
            while True:
                message = await model.chat(messages)
                observation, reward, ended, cut, _ = await in_thread(environment.step, message.get("content") or "")
                rewards.append(float(reward))
                if ended:
                    return scored(sum(rewards))
                if cut:
                    return truncated(sum(rewards), "the environment ended it")
                messages += [message, *messages_of(observation)]
    except LimitError as error:
        if not rewards:
            raise
        return truncated(sum(rewards), str(error))
    finally:
        if environment is not None:
            await in_thread(environment.close)
