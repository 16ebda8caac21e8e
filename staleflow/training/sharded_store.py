"""A parameter server that all ranks of a trainer push to and pull from together, each its own rows.

    weights = RankedServer(ranks, "run-7", LocalParameterServer.create("run-7"))      # on the first rank
    weights = RankedServer(ranks, "run-7")                                            # on the others
    weights.push(trainer.version, trainer.weights())                                  # all call it

What lies in the store is what one process would have pushed: instances, and a trainer of any number of ranks, read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from staleflow.servers.weights import WeightsError
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.pushing import PushResult
from staleflow.training.part_files import local, place
from staleflow.training.ranks import Ranks


class RankedServer:
    def __init__(self, ranks: Ranks, name: str, server: LocalParameterServer | None = None) -> None:
        """``server``: on the first rank, as its writer."""
        self._ranks = ranks
        self._name = name
        self._server = server
        self._pushes = LocalParameterServer.together(server, ranks.gather, ranks.rank, ranks.size)

    def push(self, version: int, tensors: Mapping[str, Tensor]) -> PushResult | None:
        return self._pushes.push(version, {name: self._ranks.part(tensor) for name, tensor in tensors.items()})

    def newest(self) -> int:
        assert self._server is not None, "the first rank knows"
        return self._server.newest()

    def pull(self, into: Mapping[str, Tensor], at_least: int = 0, *, verify: bool = False) -> int:
        """Copy what this rank holds of the newest version, which nobody must push to meanwhile."""
        if self._server is None:
            with LocalParameterServer.attach(self._name) as server:
                return self._read(server, into, at_least)
        if verify and not self._server.whole():
            raise WeightsError(f"the newest version of {self._name} is damaged: resume from a checkpoint")
        return self._read(self._server, into, at_least)

    def _read(self, server: LocalParameterServer, into: Mapping[str, Tensor], at_least: int) -> int:
        def copy(_version: int, stored: Iterator[tuple[str, Tensor]]) -> None:
            missing = set(into)
            for name, tensor in stored:
                if name not in into or into[name].shape != tensor.shape:
                    raise WeightsError(f"tensor {name!r} of {self._name} is not one of this trainer")
                missing.discard(name)
                local(into[name]).copy_(tensor[place(into[name], self._ranks) or ...])
            if missing:
                raise WeightsError(f"tensor {min(missing)!r} is not in {self._name}")

        return server.lend(copy, at_least)

    def forget(self) -> None:
        """There is nothing to forget: a pull copies everything."""

    def close(self) -> None:
        self._pushes.close()
        if self._server is not None:
            self._server.close()

    def detach(self) -> None:
        self._pushes.close()
        if self._server is not None:
            self._server.detach()
