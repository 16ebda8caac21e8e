"""The parameter server: versioned weights, pushed by the trainer and pulled by instances, with no barrier between them.

What a parameter server promises (``parameter_server``): ``push`` makes a version visible at once and whole; ``pull``
ends with one version in all tensors; neither waits for the other; the death of any process leaves the newest version to
be pulled.

Here is what the control plane needs of it, without PyTorch: the names of a run's stores, and who may keep them::

    with claim("run-7", standby_of("run-7")):       # meanwhile nobody takes them for leftovers
        discard("run-7", standby_of("run-7"))       # this run begins without what one before it left
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from staleflow.servers.weights.segments import BusyStoreError, NoStoreError, StoreRegistry, WeightsError
from staleflow.servers.weights.slots import segments_of

__all__ = ["BusyStoreError", "NoStoreError", "WeightsError", "claim", "discard", "reclaim", "standby_of"]


def standby_of(store: str) -> str:
    """The name of the store with the standby state that belongs to a store of weights."""
    return f"{store}-standby"


@contextmanager
def claim(*names: str, registry: Path | str | None = None, keep: bool = False) -> Generator[None]:
    """Meanwhile the stores of these names are not leftovers, even if no process is attached. What dead runs left is
    reclaimed before and after; with ``keep``, not what was left under these names. After an error everything stays:
    another attempt may continue with it."""
    folder = StoreRegistry(registry)
    if not keep:
        reclaim(registry)
    with ExitStack() as claims:
        for name in names:
            claims.callback(folder.disclaim, name, folder.claim(name))
        if keep:
            reclaim(registry)
        yield
    reclaim(registry)


def discard(*names: str, registry: Path | str | None = None) -> None:
    """Remove the stores of these names, whoever holds them, such as killed processes that the kernel has not ended yet.
    They keep what they have mapped."""
    folder = StoreRegistry(registry)
    with folder.locked():
        for name in names:
            with suppress(FileNotFoundError):
                if (segments := segments_of(folder.control(name).read_bytes())) is not None:
                    folder.remove(name, segments)


def reclaim(registry: Path | str | None = None) -> list[str]:
    """Free what dead runs left in the registry. Returns the names of their stores."""
    folder = StoreRegistry(registry)
    with folder.locked():
        return folder.reclaim(segments_of)
