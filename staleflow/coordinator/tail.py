"""What to do when a nearly complete step waits for its last few groups.

Acts only when the open step waits for at most ``tail_groups`` groups, and has waited for nothing else for
``tail_patience`` of the time between two versions (never while that is unknown). Then

``wait``     does nothing: every trajectory ends by itself;
``replace``  gives the groups up, so that others take their places and their prompts are drawn again, each once:
             a prompt that is always slow would otherwise be generated again and again;
``truncate`` ends their unfinished trajectories where they are and scores them.

Age alone is not a reason to give anything up: a group that the step does not wait for is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from staleflow.coordinator.situation import Abort, Situation, Truncate
from staleflow.coordinator.strategies import Strategies


def wait(situation: Situation, strategies: Strategies) -> Sequence[Abort | Truncate]:  # noqa: ARG001
    return []


def replace(situation: Situation, strategies: Strategies) -> Sequence[Abort | Truncate]:
    if not _stuck(situation, strategies):
        return []
    first = dict.fromkeys(blocker.group for blocker in situation.blockers if blocker.attempt == 0)
    return [Abort(group, "tail") for group in first]


def truncate(situation: Situation, strategies: Strategies) -> Sequence[Abort | Truncate]:
    if not _stuck(situation, strategies):
        return []
    names = situation.fleet.names
    return [Truncate(blocker.trajectory, names[blocker.instance]) for blocker in situation.blockers]


def _stuck(situation: Situation, strategies: Strategies) -> bool:
    since, step_s = situation.blocked_since, situation.pace.step_s
    if since is None or not step_s or situation.now - since < strategies.tail_patience * step_s:
        return False
    return 0 < len({blocker.group for blocker in situation.blockers}) <= strategies.tail_groups
