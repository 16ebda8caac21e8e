"""What a reward function is, and how the configured one is loaded and called.

A reward function takes the problem and the response and returns a number; it may be ``async``::

    def reward(problem: Problem, response: Response) -> float:
        return float(response.text.strip() == problem.facts["answer"])

``reward.function=my_module:reward`` names it, and ``reward.arguments`` are passed to it by name. The built-in ones are
in ``verifiers.py``. A result that is not a finite number is a failure with a reason, never a zero::

    score = load_reward(Reward("exact-match"))
    value = checked(score(problem, Response("42", (7, 9))))
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from staleflow.errors import StaleFlowError, shown
from staleflow.reward.options import REWARDS, Reward
from staleflow.tasks.task import Problem

BAD_REWARD = "the reward is "
"""Prefix of the failures of a function that returns something other than a finite number."""


class Response(NamedTuple):
    text: str
    tokens: tuple[int, ...] = ()


Score = Callable[[Problem, Response], float | Awaitable[float]]
"""A reward function whose further arguments, if any, are bound."""


class RewardError(StaleFlowError, ValueError):
    """A reward cannot be loaded or used; the message is one line with the fix."""


class ServiceAwayError(RewardError):
    """A service that the reward needs does not answer at the moment. Not the response's fault: asked again later."""


def load_reward(options: Reward) -> Score:
    """The configured function. Built-in ones that call a service get the address and the time limit."""
    REWARDS.check(options.function, options.arguments)
    asked = {
        "address": options.function,
        "timeout_s": 0.9 * options.timeout_s,
    }  # before the worker is killed
    built_in = REWARDS.key(options.function) is not None
    return REWARDS.bound(options.function, asked if built_in else {}, options.arguments)


def reward_of(reward: Score, problem: Problem, response: Response, runner: asyncio.Runner) -> float:
    """The reward of a response; the function may be ``async``. Raises whatever the function raises."""

    async def awaited(value: Awaitable[object]) -> object:
        return await value

    value: object = reward(problem, response)
    return checked(runner.run(awaited(value)) if inspect.isawaitable(value) else value)


def checked(value: Any) -> float:
    """The reward as a float; ``RewardError`` if it is not a finite number."""
    if hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise RewardError(f"{BAD_REWARD}an array of several numbers: return one") from None
    if not isinstance(value, int | float):
        raise RewardError(f"{BAD_REWARD}{shown(value)}, a {type(value).__name__}: return a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{BAD_REWARD}{number}: return a finite number")
    return number
