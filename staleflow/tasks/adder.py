"""The embedded default task: add ``c`` to ``x``, ``n`` times, modulo 97, writing down every sum.

Prompt, always 4 tokens: the increment, the counter, two digits of ``x``. Response, ``3 n + 4`` tokens: for each
addition the counter, one less every time, and the sum; then ``=``, the last sum and the end. For c = 7, n = 3, x = 49::

    +7 #3 4 9   ->   #2 5 6  #1 6 3  #0 7 0  = 7 0 </s>

**Reward** 1 if the response ends with ``=``, the right two digits and the end token, and has no other ``=``; else 0.
The sums on the way are not checked.

**Lengths** are skewed although prompts are not: ``n`` has a log-normal shape on 1..36, so a correct response has 22.8
tokens on average, 112 at most, and a coefficient of variation of 0.85.

**The modulus** is 97 and not 100 so that rewards are clean. Modulo 100 ten forgotten carries cancel and one wrong long
response in six is rewarded. Here a forgotten carry is an error of -10, at most 36 of them occur, and no multiple of 10
below 970 is a multiple of 97: a response with any forgotten carry gets 0.

**The teacher** of the warm start is wrong on purpose: where an addition needs a carry it forgets it, seldom for the
increments 1 and 2 and mostly for the others. It always wraps around at 97 correctly: that is rare, and must be seen to
be learned at all. So the base model knows how to carry and rarely does; reinforcement has something to select, and
accuracy begins between 20 % and 40 %.

::

    task = Adder(seed=0)
    problem = task.problem(0, "held-out")
    assert task.verify(problem, task.solve(problem)) == 1
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from staleflow.tasks.task import Problem, Split, TaskError, digest, held_out

MODULUS = 97
MOST_ADDITIONS = 36
INCREMENTS = range(1, 10)
PAD, END, EQUALS, FIRST_DIGIT = 0, 1, 2, 3
FIRST_COUNTER = FIRST_DIGIT + 10
FIRST_INCREMENT = FIRST_COUNTER + MOST_ADDITIONS + 1
VOCABULARY = (
    "<pad>",
    "</s>",
    "=",
    *(str(digit) for digit in range(10)),
    *(f"#{count}" for count in range(MOST_ADDITIONS + 1)),
    *(f"+{increment}" for increment in INCREMENTS),
)
PROMPT_TOKENS = 4
MAX_RESPONSE_TOKENS = 3 * MOST_ADDITIONS + 4

_shape = [math.exp(-((math.log(n) - 1.35) ** 2) / (2 * 1.15**2)) / n for n in range(1, MOST_ADDITIONS + 1)]
ADDITIONS_P = tuple(weight / sum(_shape) for weight in _shape)
"""The probability of 1, 2, ... additions."""
_CUMULATIVE = tuple(accumulate(ADDITIONS_P))


@dataclass(frozen=True, slots=True)
class Teacher:
    """How often the warm start's teacher forgets a carry."""

    forget: float = 0.7
    forget_small: float = 0.25
    small: int = 2
    """Increments up to this one count as small."""

    def forgets(self, increment: int, chance: float) -> bool:
        return chance < (self.forget_small if increment <= self.small else self.forget)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the model that learns the task (``base_model.py``)."""

    hidden: int = 128
    intermediate: int = 336
    layers: int = 3
    heads: int = 4
    positions: int = 256


@dataclass(frozen=True, slots=True)
class Adder:
    seed: int = 0

    def problem(self, index: int, split: Split = "train") -> Problem:
        if index < 0:
            raise TaskError(f"problem number {index}: numbers start at 0")
        attempt = 0
        while True:
            bits = digest("adder", self.seed, split, index, attempt)
            bits, x = divmod(bits, MODULUS)
            bits, c = divmod(bits, len(INCREMENTS))
            n = 1 + min(bisect(_CUMULATIVE, bits % 2**40 / 2**40), MOST_ADDITIONS - 1)
            if is_held_out(x, c + 1, n) == (split == "held-out"):
                return make(x, c + 1, n)
            attempt += 1

    def verify(self, problem: Problem, tokens: Sequence[int]) -> float:
        right = int(problem.facts["answer"])
        ending = [EQUALS, *digits(right), END]
        return float(list(tokens[-4:]) == ending and list(tokens).count(EQUALS) == 1)

    def solve(self, problem: Problem) -> list[int]:
        """The correct response."""
        return respond(problem, lambda _increment: False)


def is_held_out(x: int, c: int, n: int) -> bool:
    return held_out("adder", x, c, n)


def make(x: int, c: int, n: int) -> Problem:
    prompt = (FIRST_INCREMENT + c - 1, FIRST_COUNTER + n, *digits(x))
    return Problem(prompt, {"x": x, "c": c, "n": n, "answer": (x + c * n) % MODULUS})


def respond(problem: Problem, forgets: Callable[[int], bool]) -> list[int]:
    """A response that forgets a carry wherever ``forgets(increment)`` says so."""
    value, c = int(problem.facts["x"]), int(problem.facts["c"])
    tokens: list[int] = []
    for left in reversed(range(int(problem.facts["n"]))):
        carries = value % 10 + c >= 10 and value + c < MODULUS
        value = (value + c - 10 * (carries and forgets(c))) % MODULUS
        tokens += (FIRST_COUNTER + left, *digits(value))
    return [*tokens, EQUALS, *digits(value), END]


def digits(value: int) -> tuple[int, int]:
    return FIRST_DIGIT + value // 10, FIRST_DIGIT + value % 10


def text(tokens: Sequence[int]) -> str:
    """Tokens as a person reads them."""
    return " ".join(VOCABULARY[token] for token in tokens)
