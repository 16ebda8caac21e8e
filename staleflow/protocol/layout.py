"""The ledger's groups as the paper draws them: one buffer of places for each step. For people, never stored."""

from collections.abc import Sequence

from staleflow.types import StepState, StepView


def lay_out(
    first_step: int,
    batch_size: int,
    places: int,
    taken: Sequence[str],
    in_flight: Sequence[Sequence[str]],
    complete: Sequence[Sequence[str]],
) -> list[StepView]:
    """Groups in flight as late as their deadlines allow, complete groups as early as there is a place.

    ``in_flight[i]`` and ``complete[i]`` are due at ``first_step + i``. A schedulable set always fits this way: moving
    a group in flight to a later step it may use, and a complete one forward in exchange, breaks no deadline.
    """
    steps = range(len(in_flight))
    waiting: list[list[str]] = [[] for _ in steps]
    done: list[list[str]] = [list(taken) if step == 0 else [] for step in steps]

    def full(step: int) -> bool:
        return len(waiting[step]) + len(done[step]) >= places

    step = len(steps) - 1
    for deadline in reversed(steps):
        for group in reversed(in_flight[deadline]):
            step = min(step, deadline)
            while full(step):
                step -= 1
            waiting[step].append(group)
    for groups in waiting:
        groups.reverse()
    step = 0
    for deadline in steps:
        for group in complete[deadline]:
            while full(step):
                step += 1
            done[step].append(group)

    def state(step: int) -> StepState:
        if len(done[step]) >= batch_size:
            return "ready"
        return "stuck" if full(step) else "open"

    return [
        StepView(
            step=first_step + step,
            state=state(step),
            groups=done[step] + waiting[step],
            waiting_for=list(waiting[step]) if state(step) == "stuck" else [],
        )
        for step in steps
    ]
