"""What a dead attempt at a run left in shared memory: its weights, and the state that its trainer can be revived with.

left_behind(directory)      # the version that a trainer can be brought to; -1 if something is missing or damaged
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path

from staleflow.run.directory import RunDirectory
from staleflow.servers.weights import WeightsError, standby_of
from staleflow.servers.weights.segments import StoreRegistry
from staleflow.training.fed import note_of

WAIT_S = 10.0
"""For processes of the dead attempt that have not noticed yet."""
LOOK_S = 0.1


def left_behind(directory: RunDirectory, registry: Path | None = None, wait_s: float = WAIT_S) -> int:
    """Every byte is read, and compared with its checksum."""
    from staleflow.servers.weights.parameter_server import LocalParameterServer  # loads PyTorch

    names = directory.store, standby_of(directory.store)
    folder = StoreRegistry(registry)
    until = time.monotonic() + wait_s
    while not all(folder.free(folder.writer(name)) for name in names):
        if time.monotonic() >= until:
            return -1
        time.sleep(LOOK_S)
    try:
        with ExitStack() as held:
            weights, standby = (
                held.enter_context(closing(LocalParameterServer.attach(name, registry=registry))) for name in names
            )
            newest, kept = weights.newest(), standby.newest()
            whole = 0 <= kept <= newest and weights.whole() and standby.whole()
    except (WeightsError, OSError):
        return -1
    return newest if whole and all(note_of(directory.path, step).exists() for step in range(kept, newest)) else -1
