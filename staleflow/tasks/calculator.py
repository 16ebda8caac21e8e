"""The embedded task of several turns: add three to six numbers with a tool that adds two.

A conversation; what the model makes is marked, the rest is given::

    <|begin|><|user|>17 + 5 + 60<|end|><|assistant|>
        [<tool_call>{"name": "add", "arguments": {"a": 17, "b": 5}}</tool_call><|end|>]
    <|tool|>22<|end|><|assistant|>
        [<tool_call>{"name": "add", "arguments": {"a": 22, "b": 60}}</tool_call><|end|>]
    <|tool|>82<|end|><|assistant|>
        [82<|end|>]

**Reward** 1 if the last message is the exact sum, else 0; ``agents/calculator.py`` plays it. Every number, up to 99, is
one token, and so is each fixed part of a call: 8 tokens for a call, 2 for the answer, three to six turns.

**The teacher** of the warm start is wrong on purpose: it tires. Mostly it stops after two calls and answers with the
sum so far, and now and then it skips a number. So the base model can use the tool, and does not use it to the end;
accuracy begins between 25 % and 45 %. It stops less often later on: reinforcement cannot select what the base model
never does right, and the longest episodes need every call.

::

    task = Calculator(seed=0)
    problem = task.problem(0, "held-out")
    turns = transcript(problem.facts["numbers"], lambda _call: "add")
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from staleflow.tasks.adder import Shape
from staleflow.tasks.task import Problem, Split, TaskError, digest, held_out

MOST = 99
"""The largest number, and the largest sum."""
FEWEST_NUMBERS, MOST_NUMBERS = 3, 6
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""What a call has before, between and after its numbers."""
PARTS = ("<tool_call>", '{"name": "add", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PLUS = " + "
BEGIN = "<|begin|>"
"""Of every conversation."""
LETTERS = 'abcdefghijklmnopqrstuvwxyz .,:;-_"{}'
"""So that any other text, such as an error of the tool, is tokens too."""
VOCABULARY = ("<pad>", "<|end|>", BEGIN, *ROLES, *PARTS, PLUS, *(str(number) for number in range(MOST + 1)), *LETTERS)
PAD, END = 0, 1
WORD = "|".join((*(re.escape(word) for word in VOCABULARY if not word.isdigit() and len(word) > 1), r"\d{1,2}|."))
"""What one token is, as a regular expression."""
TEMPLATE = (
    BEGIN + "{% for each in messages %}<|{{ each.role }}|>{{ each.content or '' }}"
    "{% for call in each.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}"
    "</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The chat template of its model."""
MOST_PROMPT_TOKENS = 2 * MOST_NUMBERS + 3
MOST_RESPONSE_TOKENS = 12 * (MOST_NUMBERS - 1) + 2
"""Of the correct response, with the results of the tool."""
SHAPE = Shape()
Step = Literal["add", "stop", "skip"]


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the warm start's teacher does wrong."""

    stop: tuple[float, ...] = (0.05, 0.2, 0.6, 0.4, 0.3)
    """How likely it stops instead of its first call, its second, ..."""
    skip: float = 0.05
    """How likely it skips a number."""

    def step(self, call: int, chance: float) -> Step:
        return "stop" if chance < self.stop[call] else "skip" if chance < self.stop[call] + self.skip else "add"


_number = {word: at for at, word in enumerate(VOCABULARY)}


class Turn(NamedTuple):
    made: str
    given: str
    """What follows it; empty after the last."""


@dataclass(frozen=True, slots=True)
class Calculator:
    seed: int = 0

    def problem(self, index: int, split: Split = "train") -> Problem:
        if index < 0:
            raise TaskError(f"problem number {index}: numbers start at 0")
        attempt = 0
        while True:
            numbers = _numbers(digest("calculator", self.seed, split, index, attempt))
            if held_out("calculator", *numbers) == (split == "held-out"):
                asked = [{"role": "user", "content": PLUS.join(map(str, numbers))}]
                return Problem(asked, {"numbers": numbers, "answer": sum(numbers)})
            attempt += 1

    def verify(self, problem: Problem, tokens: Sequence[int]) -> float:
        """Of the last message."""
        return float(list(tokens[-2:]) == encoded(f"{problem.facts['answer']}<|end|>"))


def prompt_text(numbers: Sequence[int]) -> str:
    """What the model reads first."""
    return f"{BEGIN}<|user|>{PLUS.join(map(str, numbers))}<|end|><|assistant|>"


def transcript(numbers: Sequence[int], step: Callable[[int], Step]) -> list[Turn]:
    """A whole episode; ``step`` decides what the model does instead of its first call, its second, and so on."""
    total, left = numbers[0], list(numbers[1:])
    turns: list[Turn] = []
    before, between, after = CALL
    while left and (does := step(len(turns))) != "stop":
        if does == "skip" and len(left) > 1:
            del left[0]
        number = left.pop(0)
        made = f"{before}{total}{between}{number}{after}<|end|>"
        total += number
        turns.append(Turn(made, f"<|tool|>{total}<|end|><|assistant|>"))
    return [*turns, Turn(f"{total}<|end|>", "")]


def encoded(text: str) -> list[int]:
    """The tokens of a text of this task, as its tokenizer gives them."""
    return [_number[word] for word in re.findall(WORD, text)]


def _numbers(bits: int) -> list[int]:
    bits, more = divmod(bits, MOST_NUMBERS - FEWEST_NUMBERS + 1)
    count = FEWEST_NUMBERS + more
    largest = MOST // count
    numbers: list[int] = []
    for _ in range(count):
        bits, number = divmod(bits, largest)
        numbers.append(1 + number)
    return numbers
