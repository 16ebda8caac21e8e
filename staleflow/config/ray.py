"""The section ``ray``: where a run with ``runtime=ray`` finds its cluster, and what each of its processes takes."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from staleflow.settings import Positive, Section

if TYPE_CHECKING:
    from staleflow.config.schema import Config

CONNECT_S = 5.0
INSTALL = "pip install 'staleflow[ray]'"


@dataclass(frozen=True, slots=True)
class RayOptions(Section):
    address: str | None = None
    """The cluster to join, ``HOST:PORT`` or ``auto``; null: that of the variable ``RAY_ADDRESS``, or a cluster of its
    own on this machine, which ends with the run."""
    cpus: Positive = 1.0
    """CPUs that an instance, the trainer and the evaluator each take in a cluster that is joined."""
    gpus: Positive = 1.0
    """GPUs that each of them takes there if its device is ``cuda``; 0.5: two share one."""

    @property
    def joins(self) -> str:
        """The address of the cluster that is joined; empty: one is started."""
        return self.address or os.environ.get("RAY_ADDRESS", "")


def problems(config: "Config") -> Iterator[str]:
    """What keeps ``runtime=ray`` from working, each in one line with the fix."""
    if config.runtime != "ray":
        return
    for setting, device in (("rollout.device", config.rollout.device), ("training.device", config.training.device)):
        if ":" in device and config.ray.joins:
            yield f"{setting}={device}, but the Ray cluster chooses the GPU: give {setting}=cuda"
    if importlib.util.find_spec("ray") is None:
        yield f"runtime=ray needs Ray, which is not installed: {INSTALL}"
    if joins := config.ray.joins:
        yield from _unreachable(joins, "ray.address" if config.ray.address else "RAY_ADDRESS")


def _unreachable(address: str, setting: str) -> Iterator[str]:
    """Ray itself takes minutes to say so."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        yield f"{setting}={address} is not the address of a Ray cluster: give HOST:PORT, or auto"
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        yield (
            f"{setting}={address}: no Ray cluster is there ({error}): start one with ray start --head, give another "
            f"address, or leave {setting} out for a cluster of the run's own"
        )
