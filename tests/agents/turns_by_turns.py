"""An environment for whole runs: three turns, and a reward for what the model said."""

from typing import Any

from staleflow.agents.client import Model
from staleflow.agents.outcome import Outcome, scored
from staleflow.agents.play import Limits
from staleflow.tasks.task import Problem


async def three(task: Problem, model: Model, limits: Limits) -> Outcome:
    """Each answer is counted, and the count is the next question."""
    said: list[Any] = list(task.prompt)
    text = ""
    async with limits.agent():
        for _ in range(3):
            message = await model.chat(said, max_tokens=6)
            content = str(message["content"])
            text += content
            said += [message, {"role": "user", "content": f"{len(content)}?"}]
    return scored(sum(ord(each) % 2 for each in text) / max(1, len(text)))
