"""What a reward function is, and how the one that a run names is found and called.

A reward function takes the problem and the response and returns a number; it may be ``async``::

    def reward(problem: Problem, response: Response) -> float:
        return float(response.text.strip() == problem.facts["answer"])

``reward: my_module:reward`` in the configuration names it. Built in are ``adder``, ``exact-match``, ``last-number``,
``math-verify``, ``reasoning-gym``, and an ``http://`` or ``https://`` address (see ``verifiers.py``). What is not
a finite number is a failure with a reason, never a zero::

    score = load_reward("exact-match")
    value = checked(score(problem, Response("42", (7, 9))))
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from staleflow.errors import StaleFlowError
from staleflow.tasks.sources import load_function
from staleflow.tasks.task import Problem, TaskError

BAD_REWARD = "the reward is "
"""How an answer begins that says: the function returns something that cannot be a reward."""


class Response(NamedTuple):
    text: str
    tokens: tuple[int, ...] = ()


Reward = Callable[[Problem, Response], float | Awaitable[float]]


class RewardError(StaleFlowError, ValueError):
    """A reward that cannot be used, in one line with the fix."""


def load_reward(spec: str, timeout_s: float = 10.0) -> Reward:
    """The function that ``spec`` names. ``timeout_s`` is for those that ask over the network."""
    from staleflow.reward import verifiers

    if spec.startswith(("http://", "https://")):
        return verifiers.http_service(spec, timeout_s)
    if ":" not in spec:
        make = verifiers.BUILT_IN.get(spec)
        if make is None:
            names = ", ".join(verifiers.BUILT_IN)
            raise TaskError(f"reward {spec!r} is not known: write module:function, an http address, or one of {names}")
        return make()
    return load_function(spec, "reward")


def called(reward: Reward, problem: Problem, response: Response, runner: asyncio.Runner) -> float:
    """The reward of a response, also where the function is ``async``. Raises whatever the function does."""

    async def awaited(value: Awaitable[object]) -> object:
        return await value

    value: object = reward(problem, response)
    return checked(runner.run(awaited(value)) if inspect.isawaitable(value) else value)


def checked(value: Any) -> float:
    """The reward as a float, or an error that says what is wrong with it."""
    if hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise RewardError(f"{BAD_REWARD}an array of several numbers: return one") from None
    if not isinstance(value, int | float):
        raise RewardError(f"{BAD_REWARD}{_short(value)}, a {type(value).__name__}: return a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{BAD_REWARD}{number}: return a finite number")
    return number


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
