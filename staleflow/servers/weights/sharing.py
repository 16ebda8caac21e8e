"""Who gives a version to whom, so that it spreads from node to node instead of leaving the trainer's once for each.

The trainer's node sends to ``MOST_SENDING`` others at a time, and so does every node that has the version. Whoever asks
while all are busy waits. With each transfer that ends there is one more to send, so the time for all grows with the
logarithm of their number; a cluster of three nodes gets everything from the trainer's. ::

    sharing = Sharing()
    sharing.ask("c1", version=7)         # OWN: from the trainer's node
    sharing.has("c1", 7, ("10.0.0.3", 40123))
    sharing.ask("c4", version=7)         # ("10.0.0.3", 40123), or None: wait

It knows only what it is told, and does no I/O. A node that did not answer, or gave something else, is not named again
before it says that it has a version.
"""

from collections.abc import Hashable
from dataclasses import dataclass

MOST_SENDING = 2
"""Transfers from one node at a time: one stream may not fill a fast link."""
Place = tuple[str, int]
"""Host and port."""
OWN: Place = ("", 0)
"""The trainer's node."""


@dataclass(slots=True)
class _Holder:
    version: int
    place: Place
    sending: int = 0


class Sharing:
    def __init__(self, most: int = MOST_SENDING) -> None:
        self._most = most
        self._own = _Holder(-1, OWN)
        self._holders: dict[Hashable, _Holder] = {}
        """By client, in the order in which they got their version."""
        self._from: dict[Hashable, _Holder] = {}
        """By client: who sends to it now."""

    def ask(self, client: Hashable, version: int) -> Place | None:
        """From where ``client`` gets ``version`` now; None: all who have it are busy, and it should wait."""
        self.done(client)
        mine = self._holders.get(client)
        free = [self._own] if self._own.sending < self._most else []
        free += [
            each
            for each in self._holders.values()
            if each.version >= version and each.sending < self._most and each is not mine
        ]
        if not free:
            return None
        chosen = free[0]  # the trainer's own, else who has had it for longest
        chosen.sending += 1
        self._from[client] = chosen
        return chosen.place

    def done(self, client: Hashable) -> None:
        """What it was to be sent is there, or did not come."""
        if (holder := self._from.pop(client, None)) is not None:
            holder.sending -= 1

    def has(self, client: Hashable, version: int, place: Place) -> None:
        """It has the version, and gives it to others at ``place``."""
        self.done(client)
        if (known := self._holders.get(client)) is None:
            self._holders[client] = _Holder(version, place)
        else:
            known.version, known.place = version, place

    def lost(self, client: Hashable) -> None:
        """Whoever was to send to it did not."""
        holder = self._from.get(client)
        self.done(client)
        for name in [name for name, each in self._holders.items() if each is holder]:
            del self._holders[name]

    def left(self, client: Hashable) -> None:
        """It asks for nothing any more, and gives nothing."""
        self.done(client)
        self._holders.pop(client, None)
