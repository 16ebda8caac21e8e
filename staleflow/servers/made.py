"""What the steps since the newest checkpoint were made of: enough to make them again, without decoding anything.

    server.made[step] = MadeStep.of(groups)     # with the commit; the tokens stay in the journal's files
    rows_of(server.made[step], journal)         # after a crash: what the trainer was fed, group by group
    server.forget(version)                      # a checkpoint of this version is on disk

The tokens were written once, when they came; keeping a step costs some 20 bytes of memory for each trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from staleflow.servers.database import DamagedError
from staleflow.servers.lifecycle import Group
from staleflow.servers.payloads import TOKEN_BYTES
from staleflow.types import TOKEN, Row, Spans, token_count

if TYPE_CHECKING:
    from staleflow.servers.durable import DurableJournal

_Members = list[tuple[int, Spans, float]]
"""Of each member its number in the group, versions and reward."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, _Members]]).decode


class MadeStep(NamedTuple):
    bytes: int
    """Of its payload on disk."""
    body: bytes
    """The groups with their members, packed."""

    @classmethod
    def of(cls, groups: Iterable[Group]) -> MadeStep:
        size = 0
        found: list[tuple[str, list[Any]]] = []
        for group in groups:
            used = [(at, each) for at, each in enumerate(group.members) if each.state == "consumed"]
            size += group.prompt_tokens * TOKEN.itemsize + TOKEN_BYTES * sum(each.generated for _, each in used)
            found.append((group.name, [(at, each.spans, each.reward or 0.0) for at, each in used]))
        return cls(size, _encode(found))

    def names(self) -> Iterator[str]:
        """Under which its payload is kept: groups and their members."""
        for group, members in _decode(self.body):
            yield group
            for at, _, _ in members:
                yield f"{group}/{at}"


def rows_of(step: MadeStep, journal: DurableJournal) -> list[list[Row]]:
    """What the trainer was fed. ``DamagedError`` if the journal does not have all of it."""
    parts: dict[str, list[tuple[bytes, bytes]]] = {}
    for name, chunk in journal.chunks(set(step.names())):
        parts.setdefault(name, []).append((chunk.tokens, chunk.logprobs))
    held = {name: (b"".join(a for a, _ in each), b"".join(b for _, b in each)) for name, each in parts.items()}
    rows = [
        [
            Row(f"{group}/{at}", held.get(group, (b"", b""))[0], *held.get(f"{group}/{at}", (b"", b"")), spans, reward)
            for at, spans, reward in members
        ]
        for group, members in _decode(step.body)
    ]
    if any(not row.prompt_bytes or row.tokens.size != token_count(row.spans) for group in rows for row in group):
        raise DamagedError(f"{journal.path}-payload does not have every token of a step: resume from a checkpoint")
    return rows
