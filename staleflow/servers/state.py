"""The trajectory server as plain values, and back: what a snapshot holds, and what a recovery starts from.

server = TrajectoryServer(StalenessLedger(8, 2), 16, 0, journal, payloads)
recover(server, journal)      # the state after the last event that survived
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from staleflow.protocol import StalenessLedger
from staleflow.servers.journal import Event
from staleflow.servers.lifecycle import Branch, Group, Trajectory
from staleflow.servers.made import MadeStep

if TYPE_CHECKING:
    from staleflow.servers.durable import DurableJournal
    from staleflow.servers.trajectories import TrajectoryServer

ENDED = ("generated", "scored", "complete")


def to_state(server: TrajectoryServer) -> dict[str, Any]:
    """Everything except payload."""
    return {
        "ledger": server.ledger.to_state(),
        "owed": list(server.owed),
        "leased": list(server.leased),
        "next_prompt": server.next_prompt,
        "attempts": list(server.attempts.items()),
        "resuming": list(server.resuming),
        "made": [(step, *made) for step, made in server.made.items()],
        "groups": [
            (
                group.name,
                group.prompt,
                group.attempt,
                group.prompt_tokens,
                group.version,
                group.scored,
                group.complete,
                [
                    (each.name, each.state, each.epoch, each.instance, each.spans, each.moves, each.faults, each.reward)
                    + (() if each.branch is None else (astuple(each.branch),))
                    for each in group.members
                ],
            )
            for group in server.groups.values()
        ],
    }


def restore(server: TrajectoryServer, state: Mapping[str, Any]) -> None:
    """Bring a new server to the state that ``to_state`` described."""
    server.ledger = StalenessLedger.from_state(state["ledger"])
    server.owed, server.leased = list(state["owed"]), list(state["leased"])
    server.next_prompt = state["next_prompt"]
    server.attempts = dict(state["attempts"])
    server.made = {step: MadeStep(*made) for step, *made in state.get("made", ())}
    for name, prompt, attempt, prompt_tokens, version, scored, complete, members in state["groups"]:
        group = Group(name, prompt, attempt, prompt_tokens, server.group_size)
        group.version, group.scored, group.complete = version, scored, complete
        group.members = [_member(group, *each) for each in members]
        server.hold(group)
    server.resume(state["resuming"])


def _member(
    group: Group, name: str, state: Any, epoch: int, instance: str | None, spans: Any, *rest: Any
) -> Trajectory:
    each = Trajectory(name, group, state, epoch, instance)
    each.stamp(tuple((version, count) for version, count in spans))
    each.moves, each.faults, each.reward, *branch = rest
    for parent, shared, prompt, until, turns, *kept in branch:
        each.branch = Branch(parent, shared, prompt, until, [(count, why) for count, why in turns], *kept)
    return each


def heard(events: Iterable[Event], hear: Callable[[Event], None]) -> Iterator[Event]:
    for event in events:
        hear(event)
        yield event


def recover(
    server: TrajectoryServer,
    journal: DurableJournal,
    restore_beside: Callable[[bytes], None] = lambda _: None,
    hear: Callable[[Event], None] = lambda _: None,
) -> None:
    """Bring a new server to the state that the journal describes, payload included.

    ``restore_beside`` gets what the snapshot holds of ``server.beside``, ``hear`` every event after it."""
    ledger = server.ledger
    journal.belongs_to(
        {
            "batch_size": ledger.batch_size,
            "max_staleness": ledger.max_staleness,
            "redundancy": ledger.redundancy,
            "group_size": server.group_size,
            "extra_members": server.extra_members,
        }
        | ({"plays": 1} if server.plays else {})
    )
    state, events = journal.recovered()
    if state is not None:
        restore(server, state)
        restore_beside(state.get("beside", b""))
    server.replay(heard(events, hear))
    if (payloads := server.payloads) is None:
        return
    kept = {name for step in server.made.values() for name in step.names()}
    for name, chunk in journal.payloads(payloads, kept):
        payloads.add(name, chunk)
    for each in server:
        if each.state in ENDED:
            payloads.seal(each.name)
        elif each.branch is not None and not each.generated and each.name in payloads:
            payloads.clear(each.name)  # it began anew, and has no token since
