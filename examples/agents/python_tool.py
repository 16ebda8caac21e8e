"""An environment of your own: the model may run Python, in a process with limits, and must give the right number.

staleflow train plain model=MODEL data.source=... data.chat=true environment.play=examples.agents.python_tool:play
"""

import json

from staleflow.agents.client import LimitError
from staleflow.agents.outcome import scored, truncated
from staleflow.agents.tools import ToolLimits, run

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs a program, and returns what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


async def play(task, model, limits, seconds=5.0):
    messages = list(task.prompt)
    try:
        async with limits.agent():
            while calls := (message := await model.chat(messages, TOOLS)).get("tool_calls"):
                messages.append(message)
                for call in calls:
                    code = json.loads(call["function"]["arguments"]).get("code", "")
                    done = await run(["python3", "-I", "-c", code], limits=ToolLimits(seconds, memory_mib=256))
                    said = f"{done.output}{done.why}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    except LimitError as error:
        return truncated(0.0, str(error))
    return scored(float((message["content"] or "").strip() == task.facts["answer"]))
