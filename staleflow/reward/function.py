"""What a reward function is, and how the configured one is loaded and called.

A reward function takes the problem and the response and returns a number; it may be ``async``::

    def reward(problem: Problem, response: Response) -> float:
        return float(response.text.strip() == problem.facts["answer"])

``reward.function=my_module:reward`` names it, and ``reward.arguments`` are passed to it by name. There may be several:
the response gets their sum, weighted by ``reward.weights``. The built-in ones are in ``verifiers.py``. A result that is
not a finite number is a failure with a reason, never a zero::

    rewards = load_rewards(Reward("exact-match"))
    value, parts = rewards.of(problem, Response("42", (7, 9)), runner)
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from staleflow.errors import StaleFlowError, shown
from staleflow.reward.options import PYTHON, REWARDS, Reward
from staleflow.tasks.task import Problem

BAD_REWARD = "the reward is "
"""Prefix of the failures of a function that returns something other than a finite number."""


class Response(NamedTuple):
    text: str
    tokens: tuple[int, ...] = ()
    cut: bool = False
    """Ended by a length limit instead of by the model."""


Score = Callable[[Problem, Response], float | Awaitable[float]]
"""A reward function whose further arguments, if any, are bound."""
NONE: Mapping[str, Score] = MappingProxyType({})


class RewardError(StaleFlowError, ValueError):
    """A reward cannot be loaded or used; the message is one line with the fix."""


class ServiceAwayError(RewardError):
    """A service that the reward needs does not answer at the moment. Not the response's fault: asked again later."""


class Rewards:
    """What a response gets: the weighted sum of all rewards, and each of them."""

    def __init__(self, functions: Sequence[Score], weights: Sequence[float]) -> None:
        self._functions = tuple(functions)
        self._weights = tuple(weights)

    def of(self, problem: Problem, response: Response, runner: asyncio.Runner) -> tuple[float, tuple[float, ...]]:
        """The reward and, where there are several, its parts. Raises whatever a function raises."""
        parts = tuple(reward_of(each, problem, response, runner) for each in self._functions)
        reward = checked(sum(weight * part for weight, part in zip(self._weights, parts, strict=True)))
        return reward, parts if len(parts) > 1 else ()


def load_rewards(options: Reward, own: Mapping[str, Score] = NONE) -> Rewards:
    """The configured functions. ``own``: those of the program that started the run, by name."""
    return Rewards([load_reward(options, at, own) for at in range(len(options.functions))], options.all_weights)


def load_reward(options: Reward, at: int = 0, own: Mapping[str, Score] = NONE) -> Score:
    """One of the configured functions. Built-in ones that call a service get the address and the time limit."""
    function, arguments = options.functions[at], options.arguments_of(options.names[at])
    if function.startswith(PYTHON):
        return partial(own.get(function.removeprefix(PYTHON), elsewhere), **arguments)
    REWARDS.check(function, arguments)
    asked = {"address": function, "timeout_s": 0.9 * options.timeout_s}  # before the worker is killed
    built_in = REWARDS.key(function) is not None
    return REWARDS.bound(function, asked if built_in else {}, arguments)


def elsewhere(problem: Problem, response: Response) -> float:  # noqa: ARG001
    """In the place of a function of the program that started the run, where there is none."""
    raise RewardError("the reward is a function of the program that started the run: give it there again")


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
