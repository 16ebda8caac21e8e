"""How long a device works, and whether it still does: a CPU works during the call, a GPU also after it.

clock = clock_of(device)
with clock:
    ...                       # asks the device for something
clock.busy                    # whether it is still at it
clock.seconds()               # of all such work since the last answer; waits for its end
"""

from __future__ import annotations

import time

import torch


class CpuClock:
    busy = False

    def __init__(self) -> None:
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        found, self._seconds = self._seconds, 0.0
        return found


class GpuClock:
    """Events in the stream of the device, read when they are behind it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._pairs[-1][0].record()

    def __exit__(self, *error: object) -> None:
        self._pairs[-1][1].record()

    @property
    def busy(self) -> bool:
        return bool(self._pairs) and not self._pairs[-1][1].query()

    def seconds(self) -> float:
        pairs, self._pairs = self._pairs, []
        if pairs:
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


def clock_of(device: torch.device) -> CpuClock | GpuClock:
    return GpuClock() if device.type == "cuda" else CpuClock()
