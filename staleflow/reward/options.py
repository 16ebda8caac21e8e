"""How responses are scored: the section ``reward`` of the configuration, and the built-in rewards.

A reward function is ``reward(problem, response, **arguments) -> float``; it may be ``async``. See ``function.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from staleflow.registry import Entry, Registry
from staleflow.settings import Amount, Count, Positive, Section
from staleflow.tasks.options import ADDER

HTTP = ("http://", "https://")
REWARDS = Registry(
    "reward.function",
    {
        ADDER: Entry("staleflow.reward.verifiers:adder"),
        "exact-match": Entry("staleflow.reward.verifiers:exact_match"),
        "last-number": Entry("staleflow.reward.verifiers:last_number"),
        "math-verify": Entry("staleflow.reward.verifiers:math_verify", needs="math_verify"),
        "reasoning-gym": Entry("staleflow.reward.verifiers:reasoning_gym", needs="reasoning_gym"),
        **{prefix: Entry("staleflow.reward.verifiers:http_service") for prefix in HTTP},
    },
    takes=("problem", "response"),
    arguments="arguments",
)


@dataclass(frozen=True, slots=True)
class Reward(Section):
    function: Annotated[str, REWARDS] = ADDER
    """``adder``, ``exact-match``, ``last-number``, ``math-verify``, ``reasoning-gym``, ``module:function``, or the
    http(s) address of a service."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to ``module:function``."""
    workers: Count = 1
    """Processes that score responses."""
    timeout_s: Positive = 10.0
    """Time limit for one response."""
    tries: Count = 3
    """After this many failures for a response, its group is released with the reason, and replaced."""
    patience_s: Amount = 300.0
    """How long a service that is away (connection refused, 429, 502, 503, 504, no answer in time) is asked again; then
    the run ends, with a checkpoint."""
    environment: tuple[str, ...] = ()
    """Names of further environment variables that its workers see, such as an API key."""

    def contradictions(self) -> Iterator[str]:
        if self.function in HTTP:
            yield f"function={self.function} has no host: give an address such as http://localhost:8000"
