"""The one error of workloads, and the checks that raise it with the value seen and what to write instead."""

from staleflow.errors import StaleFlowError

LARGEST = 1e12
"""No length or factor needs more, and products of what is below it stay finite."""


class WorkloadError(StaleFlowError, ValueError):
    """A workload that cannot be. One line, for people: what was wrong, the value seen, what to write instead."""


def require(holds: bool, name: str, value: object, instead: str) -> None:
    if not holds:
        raise WorkloadError(f"{name} is {shown(value)}: write {instead}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, name, value, f"a number from {low:g} to {high:g}")


def require_positive(name: str, value: float) -> None:
    require(0 < value <= LARGEST, name, value, f"a number above 0 and at most {LARGEST:g}")


def shown(value: object) -> str:
    """``repr`` on one line and short enough to read."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
