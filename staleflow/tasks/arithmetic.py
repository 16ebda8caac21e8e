"""Arithmetic in words, for models that know some: ``What is 3 + 4?``, and the right number.

``data.source: staleflow.tasks.arithmetic:problems`` with ``data.arguments: {digits: 1, operations: "+-*"}``; the reward
is ``last-number``. SmolLM2-135M-Instruct gets about a third of the one-digit sums right, so there is something to
learn from the first step on::

    problems(digits=1, operations="+")[0]       # {"prompt": "What is 6 + 2?", "answer": "8", ...}
"""

from typing import Any

from staleflow.tasks.order import Order
from staleflow.tasks.task import TaskError

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
MOST = 100_000
"""Most rows of a data set without a count."""


def problems(digits: int = 1, operations: str = "+-*", count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """All questions about numbers of ``digits`` digits, or ``count`` of them. No result is negative."""
    unknown = set(operations) - set(OPERATIONS)
    if not operations or unknown:
        raise TaskError(f"operations={operations!r}: give some of {''.join(OPERATIONS)}")
    if digits < 1:
        raise TaskError(f"digits={digits}: give at least 1")
    numbers = range(10 ** (digits - 1), 10**digits)
    size = len(operations) * len(numbers) ** 2
    if size > MOST and count is None:
        raise TaskError(f"digits={digits} makes {size:,} questions: give a count, such as count=10000")
    order, rows = Order(size, seed, epochs=1), dict[str, dict[str, Any]]()
    for number in range(size):
        place = order.place(number)
        assert place is not None
        rest, a = divmod(place[1], len(numbers))
        operation, b = divmod(rest, len(numbers))
        row = _row(numbers[a], numbers[b], operations[operation])
        rows.setdefault(row["prompt"], row)
        if len(rows) == count:
            break
    return list(rows.values())


def _row(a: int, b: int, operation: str) -> dict[str, Any]:
    if operation == "-" and a < b:
        a, b = b, a
    return {"prompt": f"What is {a} {operation} {b}?", "answer": str(OPERATIONS[operation](a, b))}
