"""Plays environments that are served by OpenEnv (``openenv-core`` 0.3): ``reset`` and ``step`` over a connection. ::

    environment:
      play: openenv
      arguments: {base_url: "http://localhost:8000", action: message, observation: echoed_message}

The model's answer goes to the field ``action`` of an action; the field ``observation`` of what comes back is what it
reads as the next message of the user (without it, the whole observation as JSON). Rewards are added up. ``reset``:
columns of the row that are given to ``reset``. Every episode has a session of its own on the server, which is closed at
its end.
"""

import json
from collections.abc import Sequence
from typing import Any

from staleflow.agents.client import LimitError, Model
from staleflow.agents.outcome import Outcome, scored, truncated
from staleflow.agents.play import Limits, messages_of
from staleflow.tasks.task import Problem


async def play(
    task: Problem,
    model: Model,
    limits: Limits,
    base_url: str,
    action: str = "message",
    observation: str = "",
    reset: Sequence[str] = (),
) -> Outcome:
    from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]

    def seen(result: Any) -> str:
        found = result.observation
        return str(found.get(observation, "")) if observation else json.dumps(found)

    messages, rewards = messages_of(task.prompt), []
    client = GenericEnvClient(base_url=base_url)
    try:
        async with limits.setup():
            await client.connect()
            result = await client.reset(**{name: task.facts[name] for name in reset})
            messages += messages_of(seen(result) if observation else "")
        async with limits.agent():
            while not result.done:
                message = await model.chat(messages)
                result = await client.step({action: message.get("content") or ""})
                rewards.append(float(result.reward or 0.0))
                messages += [message, *messages_of(seen(result))]
        return scored(sum(rewards))
    except LimitError as error:
        if not rewards:
            raise
        return truncated(sum(rewards), str(error))
    finally:
        await client.close()
