"""What the open step waits for, in words: which groups, and how far each is.

waits_for(server)       # "2 of 16 groups: p373 (decoding, 212 tokens), p380 (being scored)"

Of a group that environments play, also for whom and for how long: ``p7 (episode p7/3: tool search, 214 s)``.
"""

from __future__ import annotations

from collections.abc import Callable

from staleflow.servers.lifecycle import Group
from staleflow.servers.trajectories import ON_AN_INSTANCE, TrajectoryServer

MOST_NAMED = 4
"""Groups that are named; of more, those with the earliest deadlines."""


def _unknown(_episode: str) -> str:
    return "environment"


def waits_for(server: TrajectoryServer, played: Callable[[str], str] = _unknown) -> str:
    """``played``: what an environment does with an episode, and for how long."""
    ledger = server.ledger
    if ledger.frontier > ledger.version:
        return f"the trainer to push version {ledger.frontier}"
    if waiting := ledger.blocking():
        places = ledger.batch_size - ledger.taken
        all_needed = len(waiting) <= places
        count = f"{len(waiting)} of {ledger.batch_size} groups" if all_needed else f"{places} of {len(waiting)} groups"
        what = f"{count}: {_named([server.groups[name] for name in waiting], played)}"
    else:
        what = f"more complete groups ({ledger.taken} of {ledger.batch_size} are there)"
    if server.short_of_memory:
        what += " (prompts wait for memory that consumed trajectories will free)"
    return what


def _named(groups: list[Group], played: Callable[[str], str]) -> str:
    named = ", ".join(f"{group.name} ({progress(group, played)})" for group in groups[:MOST_NAMED])
    return f"{named} and {len(groups) - MOST_NAMED} more" if len(groups) > MOST_NAMED else named


def progress(group: Group, played: Callable[[str], str] = _unknown) -> str:
    """How far a group is: where its slowest members are."""
    if any(each.state == "queued" for each in group.members):
        return "waits for an instance"
    if running := [each.generated for each in group.members if each.state in ON_AN_INSTANCE]:
        return f"{f'{len(running)} ' if len(running) > 1 else ''}decoding, {max(running):,} tokens"
    if waiting := [each.name for each in group.members if each.state == "waiting"]:
        return f"episode {waiting[0]}: {played(waiting[0])}"
    return "being scored" if not group.complete else "complete"
