"""The control plane's part of a checkpoint: ledger, cursor, every live trajectory with its tokens, and the record.

also = {STATE: pack_state(server, record, origin)}      # goes into the trainer's checkpoint
refuse_others(folder, origin)                           # before anything is started
record = unpack_state((folder / STATE).read_bytes(), server, journal)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from staleflow.config import Config, ConfigError
from staleflow.config.resuming import trained
from staleflow.run.record import Record
from staleflow.servers.durable import DurableJournal
from staleflow.servers.payloads import Chunk
from staleflow.servers.state import ENDED, restore, to_state
from staleflow.servers.trajectories import TrajectoryServer

STATE = "run.state"
FORMAT = 1


class Origin(msgspec.Struct, array_like=True):
    """What a run is made of: a checkpoint can be resumed with the same and with nothing else."""

    settings: dict[str, Any]
    """By dotted name, those that change what is trained."""
    data: str
    """Fingerprint of the prompts: equal where every number means the same prompt."""

    @classmethod
    def of(cls, config: Config, data: str) -> Origin:
        settings = msgspec.msgpack.encode(trained(config))  # lists for tuples, as they are read back
        return cls(msgspec.msgpack.decode(settings), data)


class _State(msgspec.Struct, array_like=True):
    format: int
    server: dict[str, Any]
    payloads: list[tuple[str, bytes, bytes]]
    record: bytes
    origin: Origin | None = None
    """None in a checkpoint that was made before it was kept."""


def pack_state(server: TrajectoryServer, record: Record, origin: Origin) -> bytes:
    payloads = server.payloads
    assert payloads is not None
    names = [*(name for name in server.groups), *(each.name for each in server)]
    held = [
        (name, payloads.tokens(name).tobytes(), payloads.logprobs(name).tobytes()) for name in names if name in payloads
    ]
    return msgspec.msgpack.encode(_State(FORMAT, to_state(server), held, record.to_bytes(), origin))


def refuse_others(checkpoint: Path, now: Origin) -> None:
    """Refuse to resume from a checkpoint that was made with other settings or other data."""
    made = msgspec.msgpack.decode((checkpoint / STATE).read_bytes(), type=_State).origin
    if made is None:
        return
    was = [f"{name}={value}" for name, value in made.settings.items() if now.settings.get(name, ...) != value]
    if was:
        raise ConfigError(
            f"{checkpoint} was made with {', '.join(was)}: write that into config.yaml again, or start a new run"
        )
    if made.data != now.data:
        raise ConfigError(
            f"the data is not what {checkpoint} was made with: put the old data.source back, or start a new run"
        )


def unpack_state(body: bytes, server: TrajectoryServer, journal: DurableJournal) -> Record:
    """Bring a new server to where the checkpoint was made, and let its journal begin there."""
    state = msgspec.msgpack.decode(body, type=_State)
    if state.format != FORMAT:
        raise ConfigError(f"the checkpoint has format {state.format}, this version of StaleFlow reads {FORMAT}")
    restore(server, state.server)
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
    journal.snapshot(to_state(server))
    return Record.from_bytes(state.record)


def newest(checkpoints: Path) -> Path | None:
    """The latest checkpoint that a run can go on from."""
    return max((each for each in checkpoints.glob("step-*") if (each / STATE).is_file()), default=None)
