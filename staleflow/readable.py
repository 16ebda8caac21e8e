"""Waiting for what can be read: as ``select.select``, which fails in a process with more than a thousand open files.

if readable([socket.fileno()], timeout_s): data = socket.recv(PIECE)
"""

import math
import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Those that can be read without waiting, as soon as there is one: something came, or the other end is gone. None
    after ``seconds`` (None: wait for as long as it takes)."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [each for each, _ in poll.poll(None if seconds is None else math.ceil(1000 * max(0.0, seconds)))]
