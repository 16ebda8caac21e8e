"""Plays the embedded task of several turns (``tasks/calculator.py``): a tool that adds, and an exact answer.

The tool is a sum, so it runs in the worker itself; what does more belongs in a process (``tools.py``).
"""

import json
from collections.abc import Mapping
from typing import Any

from staleflow.agents.client import LimitError, Model
from staleflow.agents.outcome import Outcome, scored, truncated
from staleflow.agents.play import Limits
from staleflow.tasks.task import Problem

NUMBER = {"type": "integer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
        },
    }
]


async def play(task: Problem, model: Model, limits: Limits) -> Outcome:
    assert isinstance(task.prompt, list)
    messages: list[Mapping[str, Any]] = list(task.prompt)
    try:
        async with limits.agent():
            while calls := (message := await model.chat(messages, TOOLS)).get("tool_calls"):
                messages += [message, *(result(call) for call in calls)]
    except LimitError as error:
        return truncated(0.0, str(error))
    if message.finish_reason == "length":
        return truncated(0.0, "the answer was cut off")
    return scored(float(message["content"] == str(task.facts["answer"])))


def result(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": _added(call["function"])}


def _added(call: Mapping[str, Any]) -> str:
    try:
        arguments = json.loads(call["arguments"])
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, KeyError, TypeError):
        return "error: give two numbers, a and b"
