"""Processes of a run whose control plane is dead: kept if the run can continue with them, ended if not.

    left = take_over(directory, config)         # call it as the owner of the run

What the run cannot be continued without is the trainer, or what it has published for one that takes its place.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from staleflow.config import Config
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import Process, processes
from staleflow.servers.weights import standby_of
from staleflow.servers.weights.segments import StoreRegistry

GONE_S = 10.0
"""How long killed processes may take to be gone."""


def take_over(directory: RunDirectory, config: Config) -> list[Process]:
    """Those that the new control plane is to adopt; none if it cannot, and then there are none any more."""
    left = list(processes(directory.path))
    if (
        not left
        or any(each.name == "trainer" for each in left)
        or (config.processes.with_standby and _published(directory))
    ):
        return left
    end(left)
    return []


def _published(directory: RunDirectory) -> bool:
    registry = StoreRegistry(None)
    return all(registry.control(name).exists() for name in (directory.store, standby_of(directory.store)))


def end(left: Sequence[Process]) -> None:
    """Kill them, and wait until they are gone."""
    for each in left:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
    pids, until = {each.pid for each in left}, time.monotonic() + GONE_S
    while pids & {each.pid for each in processes()} and time.monotonic() < until:
        time.sleep(0.02)
