"""A trajectory server and its journal, small enough to look at whole."""

from typing import Any

import numpy as np

from staleflow.protocol import StalenessLedger
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import TrajectoryServer

ALL = 10**9


class Source:
    """Prompt ``n`` has ``first + n`` tokens, all of them ``n``."""

    def __init__(self, count: int = ALL, first: int = 100) -> None:
        self.count, self.first = count, first

    def tokens(self, prompt: int) -> int | None:
        return self.first + prompt if prompt < self.count else None

    def ids(self, prompt: int) -> bytes:
        return np.full(self.first + prompt, prompt, "<i4").tobytes()


def empty_server(
    batch: int = 2, staleness: int = 1, redundancy: int = 0, size: int = 1, extra: int = 0
) -> tuple[TrajectoryServer, MemoryJournal]:
    journal = MemoryJournal()
    return TrajectoryServer(StalenessLedger(batch, staleness, redundancy), size, extra, journal), journal


def admitted(server: TrajectoryServer, count: int = 1) -> list[Group]:
    groups = [server.admit(Source()) for _ in range(count)]
    return [group for group in groups if group is not None]


def run_to_score(server: TrajectoryServer, one: Trajectory, version: int, reward: float = 1.0) -> bool:
    """From the queue to its score, on an instance of ``version``. Whether it could be placed."""
    if server.place(one.name, "i0", version) is None:
        return False
    assert server.generated(one.name, one.epoch, (*one.spans, (version, 10)))
    server.score(one.name, reward)
    return True


def finish(server: TrajectoryServer, group: Group, version: int | None = None) -> None:
    """Complete the group with as many members as it needs."""
    for member in group.members[: group.needed]:
        assert run_to_score(server, member, server.ledger.version if version is None else version)


def state_of(server: TrajectoryServer) -> dict[str, Any]:
    """All that the server knows, as plain values."""
    resuming, fresh = server.queue(ALL)
    return {
        "ledger": server.ledger.to_state(),
        "steps": server.ledger.view(),
        "groups": [group_state(group) for group in server.groups.values()],
        "trajectories": [trajectory_state(one) for one in server],
        "owed": list(server.owed),
        "leased": list(server.leased),
        "next prompt": server.next_prompt,
        "attempts": dict(server.attempts),
        "resuming": [one.name for one in resuming],
        "fresh": [group.name for group in fresh],
        "waiting": (server.waiting, server.fresh),
    }


def group_state(group: Group) -> tuple[Any, ...]:
    members = tuple(member.name for member in group.members)
    return (
        group.name,
        group.prompt,
        group.attempt,
        group.prompt_tokens,
        group.needed,
        members,
        group.version,
        (
            group.scored,
            group.complete,
        ),
    )


def trajectory_state(one: Trajectory) -> tuple[Any, ...]:
    return (
        one.name,
        one.group.name,
        one.state,
        one.epoch,
        one.instance,
        one.spans,
        one.generated,
        one.moves,
        one.reward,
        one.branch,
    )
