"""How an episode ended: scored, truncated (a limit ended it, and what there is was scored) or failed.

    scored(1.0)
    truncated(0.0, "no answer after 16 turns")
    failed("the sandbox did not start")

A failure is never a zero: the episode is played again. ``checked`` makes an ``Outcome`` of whatever an environment
returned, or says what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from staleflow.errors import shown
from staleflow.reward.function import RewardError
from staleflow.reward.function import checked as number

MOST_CHARACTERS = 2000
"""Of a reason."""
NO_REASON = "the environment gave no reason"


class Outcome(msgspec.Struct, frozen=True):
    kind: Literal["scored", "truncated", "failed"]
    reward: float | None = None
    """None only if it failed."""
    parts: dict[str, float] = {}
    """What the reward was made of, by name."""
    why: str = ""
    """Why it was truncated, or failed."""
    turn_rewards: tuple[float, ...] | None = None
    """The reward of each turn, where the environment gives them; shown, and not trained on."""


def scored(reward: float, parts: Mapping[str, float] | None = None) -> Outcome:
    return Outcome("scored", reward, dict(parts or {}))


def truncated(reward: float, why: str, parts: Mapping[str, float] | None = None) -> Outcome:
    return Outcome("truncated", reward, dict(parts or {}), why)


def failed(why: str) -> Outcome:
    return Outcome("failed", why=why[:MOST_CHARACTERS])


def checked(value: Any) -> Outcome:
    """What an environment returned, with plain finite numbers; a bare number is a reward. A failure if it is wrong."""
    if not isinstance(value, Outcome):
        try:
            return scored(number(value))
        except RewardError as error:
            return failed(f"play returned something else than an Outcome: {error}")
    if value.kind not in ("scored", "truncated"):
        known = value.kind == "failed"
        return failed((str(value.why) if known else f"play returned the kind {shown(value.kind)}") or NO_REASON)
    try:
        parts = {str(name): number(part) for name, part in dict(value.parts).items()}
        turns = None if value.turn_rewards is None else _numbers(value.turn_rewards)
        return Outcome(value.kind, number(value.reward), parts, str(value.why)[:MOST_CHARACTERS], turns)
    except (RewardError, TypeError, ValueError) as error:
        return failed(f"play returned an Outcome that cannot be used: {error}")


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(number(each) for each in values)
