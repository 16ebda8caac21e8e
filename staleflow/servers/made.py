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
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import TOKEN_BYTES
from staleflow.types import TOKEN, Row, Spans, episode_of, token_count

if TYPE_CHECKING:
    from staleflow.servers.durable import DurableJournal


class _Member(msgspec.Struct, array_like=True, frozen=True):
    at: int
    """Its number in the group."""
    spans: Spans
    reward: float
    branch: int = -1
    """This and the rest: where an environment played. Which branch of its episode it is."""
    prompt: int = 0
    """Tokens of the group's prompt that it begins with."""
    masked: bool = False

    def name(self, group: str) -> str:
        return f"{group}/{self.at}" + (f"~{self.branch}" if self.branch > 0 else "")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, list[_Member]]]).decode


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
            members = [
                (at, each.spans, each.reward or 0.0) if each.branch is None else _played(each) for at, each in used
            ]
            found.append((group.name, members))
        return cls(size, _encode(found))

    def names(self) -> Iterator[str]:
        """Under which its payload is kept: groups and their members."""
        for group, members in _decode(self.body):
            yield group
            for each in members:
                yield each.name(group)


def _played(each: Trajectory) -> _Member:
    assert each.branch is not None
    at, _, branch = each.name.rpartition("/")[2].partition("~")
    return _Member(int(at), each.spans, each.reward or 0.0, int(branch or 0), each.prompt_tokens, each.branch.masked)


def rows_of(step: MadeStep, journal: DurableJournal) -> list[list[Row]]:
    """What the trainer was fed. ``DamagedError`` if the journal does not have all of it."""
    parts: dict[str, list[tuple[bytes, bytes]]] = {}
    for name, chunk in journal.chunks(set(step.names())):
        if not chunk.start:  # or anew from there
            parts[name] = []
        parts[name].append((chunk.tokens, chunk.logprobs))
    held = {name: (b"".join(a for a, _ in each), b"".join(b for _, b in each)) for name, each in parts.items()}
    rows = [
        [_row(each, group, held) for each in sorted(members, key=lambda each: (each.at, each.branch))]
        for group, members in _decode(step.body)
    ]
    if any(not row.prompt_bytes or row.tokens.size != token_count(row.spans) for group in rows for row in group):
        raise DamagedError(f"{journal.path}-payload does not have every token of a step: resume from a checkpoint")
    return rows


def _row(each: _Member, group: str, held: dict[str, tuple[bytes, bytes]]) -> Row:
    name, nothing = each.name(group), (b"", b"")
    prompt = held.get(group, nothing)[0]
    row = name, prompt[: each.prompt * TOKEN.itemsize or None], *held.get(name, nothing), each.spans, each.reward
    return Row(*row) if each.branch < 0 else Row(*row, episode_of(name), each.masked)
