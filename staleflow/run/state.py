"""The control plane's part of a checkpoint: ledger, cursor, every live trajectory with its tokens, and the record.

also = {STATE: pack_state(server, record)}         # goes into the trainer's checkpoint
record = unpack_state((folder / STATE).read_bytes(), server, journal)
"""

from __future__ import annotations

from typing import Any

import msgspec

from staleflow.errors import RunError, line_of
from staleflow.run.record import Record
from staleflow.servers.durable import DurableJournal
from staleflow.servers.state import ENDED, restore, to_state
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Chunk

STATE = "run.state"
FORMAT = 1


class _State(msgspec.Struct, array_like=True):
    format: int
    server: dict[str, Any]
    payloads: list[tuple[str, bytes, bytes]]
    record: bytes


def pack_state(server: TrajectoryServer, record: Record) -> bytes:
    payloads = server.payloads
    assert payloads is not None
    names = [*(name for name in server.groups), *(each.name for each in server)]
    held = [
        (name, payloads.tokens(name).tobytes(), payloads.logprobs(name).tobytes()) for name in names if name in payloads
    ]
    state = to_state(server) | {"made": ()}  # what came before is in the checkpoint
    return msgspec.msgpack.encode(_State(FORMAT, state, held, record.to_bytes()))


def unpack_state(body: bytes, server: TrajectoryServer, journal: DurableJournal) -> Record:
    """Bring a new server to where the checkpoint was made, and let its journal begin there."""
    state = _read(body)
    try:
        restore(server, state.server)
        record = Record.from_bytes(state.record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise RunError(f"{_unreadable(error)}: move the checkpoint away to resume from an earlier one") from error
    payloads = server.payloads
    assert payloads is not None
    for name, tokens, logprobs in state.payloads:
        chunk = Chunk(0, tokens, logprobs)
        if tokens:
            payloads.add(name, chunk)
            journal.append(("restored", name), (name, chunk))
    for each in server:
        if each.state in ENDED:
            payloads.seal(each.name)
    journal.snapshot(to_state(server) | {"beside": state.record})
    return record


def version_in(body: bytes) -> int:
    """The version at which the state was packed. ``RunError`` if it is not such a state."""
    state = _read(body)
    try:
        return int(state.server["ledger"]["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(_unreadable(error)) from error


def _read(body: bytes) -> _State:
    try:
        state = msgspec.msgpack.decode(body, type=_State)
    except ValueError as error:
        raise RunError(_unreadable(error)) from error
    if state.format != FORMAT:
        raise RunError(f"{STATE} has format {state.format}, this version of StaleFlow reads {FORMAT}: update StaleFlow")
    return state


def _unreadable(error: Exception) -> str:
    return f"{STATE} cannot be read ({line_of(error)})"
