"""Reward functions, and a filter, that the tests of whole runs name."""

from staleflow.reward.function import Response
from staleflow.servers.lifecycle import Group
from staleflow.tasks.task import Problem


def evenness(problem: Problem, response: Response) -> float:
    """Something that a random model gets right by half, and differently for each prompt."""
    shift = int(problem.facts["answer"]) % 2
    return sum((token + shift) % 2 for token in response.tokens) / max(1, len(response.tokens))


def not_a_number(problem: Problem, response: Response) -> float:  # noqa: ARG001
    return float("nan")


def text(problem: Problem, response: Response) -> str:  # noqa: ARG001
    return "1.0"


def broken(problem: Problem, response: Response) -> float:  # noqa: ARG001
    if response.tokens:
        raise RuntimeError("the service is down")
    return 0.0


def enormous(problem: Problem, response: Response) -> float:
    """So far apart that no gradient is finite."""
    return 1e300 * evenness(problem, response)


def later_ones(group: Group, first: int) -> str | None:
    return "early" if int(group.name.removeprefix("p")) < first else None
