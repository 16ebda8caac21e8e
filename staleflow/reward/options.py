"""How responses are scored: the section ``reward`` of the configuration, and the built-in rewards.

A reward function is ``reward(problem, response, **arguments) -> float``; it may be ``async``. See ``function.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from staleflow.registry import Entry, Registry
from staleflow.settings import Amount, Count, Positive, Section, several, short_name
from staleflow.tasks.options import ADDER

HTTP = ("http://", "https://")
PYTHON = "python:"
"""A function of the program that started the run."""
UNLIKE = "rewards do; here it is called for each response, returns one number, and finds the row in problem.facts"
REWARDS = Registry(
    "reward.function",
    {
        ADDER: Entry("staleflow.reward.verifiers:adder"),
        "exact-match": Entry("staleflow.reward.verifiers:exact_match"),
        "last-number": Entry("staleflow.reward.verifiers:last_number"),
        "math-verify": Entry("staleflow.reward.verifiers:math_verify", needs="math_verify"),
        "reasoning-gym": Entry("staleflow.reward.verifiers:reasoning_gym", needs="reasoning_gym"),
        **{prefix: Entry("staleflow.reward.verifiers:http_service") for prefix in HTTP},
        PYTHON: Entry("staleflow.reward.function:elsewhere", arguments=True, listed=False),
    },
    takes=("problem", "response"),
    arguments="arguments",
    foreign={"completions": f"as TRL's {UNLIKE}", "solution_str": f"as verl's {UNLIKE}"},
)


@dataclass(frozen=True, slots=True)
class Reward(Section):
    function: Annotated[str | tuple[str, ...], REWARDS] = ADDER
    """``adder``, ``exact-match``, ``last-number``, ``math-verify``, ``reasoning-gym``, ``module:function``, or the
    http(s) address of a service; or a list of these, whose weighted sum is the reward."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to ``module:function``. Of several: by the name of each, which is what follows its colon."""
    weights: tuple[float, ...] = ()
    """The weight of each function; empty: 1 each."""
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

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function,) if isinstance(self.function, str) else self.function

    @property
    def names(self) -> tuple[str, ...]:
        """By which each reward is reported: what follows the colon of its function."""
        return tuple(short_name(each) for each in self.functions)

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)

    def arguments_of(self, name: str) -> dict[str, Any]:
        return self.arguments if len(self.functions) == 1 else self.arguments.get(name, {})

    def contradictions(self) -> Iterator[str]:
        for each in self.functions:
            if each in HTTP:
                yield f"function={each} has no host: give an address such as http://localhost:8000"
        if not self.functions:
            yield "function is an empty list: name at least one"
        yield from several("function", self.names, self.arguments, "arguments")
        if self.weights and len(self.weights) != len(self.functions):
            yield f"weights are {len(self.weights)} for {len(self.functions)} functions: give one for each"
