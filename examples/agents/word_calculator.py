"""Word problems with a calculator: what the model calculates is worked out for it, until it answers without.

staleflow train one-gpu data.source=examples.agents.word_calculator:problems data.arguments='{path: svamp.jsonl}' \
    environment.play=examples.agents.word_calculator:play

Three examples in the prompt show how it goes, so that a model of 135 M parameters, which knows no tools, can begin.
Rows have ``Body``, ``Question`` and ``Answer``, as those of SVAMP.
"""

import json
import re
from pathlib import Path

from staleflow.agents.client import LimitError
from staleflow.agents.outcome import scored, truncated

SHOWN = (
    ("Tom has 3 apples and buys 4 more. How many apples does he have now?", "3 + 4", "7"),
    ("A box holds 6 pens. How many pens are in 5 boxes?", "6 * 5", "30"),
    ("Ann had 20 coins and lost 8 of them. How many coins does she have left?", "20 - 8", "12"),
)
NUMBER = r"-?\d+(?:\.\d+)?"
CALCULATION = re.compile(rf"({NUMBER}) *([-+*/]) *({NUMBER})")
NOTHING = "nothing: division by zero"
MOST_TOKENS = 24
"""Of one turn."""


def problems(path: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{"prompt": asked(f"{row['Body']} {row['Question']}"), "answer": row["Answer"]} for row in rows]


def asked(question: str) -> list[dict[str, str]]:
    turns = [("user", question)]
    for each, calculation, result in reversed(SHOWN):
        turns = [("user", each), ("assistant", calculation), ("user", f"= {result}"), ("assistant", result), *turns]
    return [{"role": role, "content": content} for role, content in turns]


def calculated(text: str) -> str | None:
    """The result of the first calculation in a text; None if there is none."""
    if (found := CALCULATION.search(text)) is None:
        return None
    left, sign, right = float(found[1]), found[2], float(found[3])
    if sign == "/" and not right:
        return NOTHING
    return f"{ {'+': left + right, '-': left - right, '*': left * right, '/': left / (right or 1)}[sign]:g}"


async def play(task, model, limits):
    messages = list(task.prompt)
    try:
        async with limits.agent():
            while result := calculated((message := await model.chat(messages, max_tokens=MOST_TOKENS))["content"]):
                messages += [message, {"role": "user", "content": f"= {result}"}]
    except LimitError as error:
        return truncated(0.0, str(error))
    numbers = re.findall(NUMBER, message["content"])
    return scored(float(bool(numbers) and abs(float(numbers[-1]) - float(task.facts["answer"])) < 1e-3))
