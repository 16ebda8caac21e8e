# pyright: reportMissingImports=false
"""Our backend of vLLM's weight transfer: in each worker of vLLM, it pulls from the parameter server.

``vllm_plugin`` registers it by name; an engine asks its workers for it between two steps::

    versions = llm.collective_rpc(pull, args=(source, at_least))
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from staleflow.rollout.engine import LendingSource
from staleflow.rollout.vllm.cpu import forget_experts, unpacked, with_head
from staleflow.rollout.vllm.places import Places, places, whole


@dataclass
class Init(WeightTransferInitInfo):
    version: int


@dataclass
class Update(WeightTransferUpdateInfo):
    source: LendingSource
    version: int


class PullEngine(WeightTransferEngine[Init, Update]):
    """In each worker of vLLM: pulls from the parameter server what this worker holds of the model.

    First by vLLM's own loaders, which split and fuse the tensors; if they turn out to be plain copies (``places``),
    later pulls are these copies and nothing else. Everything happens in one call, because it is done again if the
    tensors were overwritten meanwhile."""

    init_info_cls = Init
    update_info_cls = Update
    version: int | None = None
    """None: of no certain version."""
    _places: Places | None = None
    _whole: Mapping[str, torch.Tensor] | None = None
    """Where each tensor is loaded as one."""
    _looked = False

    def init_transfer_engine(self, init_info: Init) -> None:
        self.version = init_info.version

    def receive_weights(self, update_info: Update) -> None:
        source, wanted = update_info.source, update_info.version
        if self._whole is not None:
            self.version = None
            self.version = source.pull(self._whole, wanted)
        else:
            self.version = source.lend(self._load, wanted)
            self._looked = True

    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if version == self.version:
            return
        self.version = None
        if self._places is not None:
            for name, tensor in tensors:
                for place in self._places[name]:
                    place.into.copy_(place.part_of(tensor))
            return
        seen: dict[str, torch.Tensor] = {}
        with set_current_vllm_config(self.vllm_config):
            packed = self._reload(_noted(tensors, seen))
            if not packed and not self._looked:
                self._places = places(self.model, seen)
                self._whole = None if self._places is None else whole(self._places, seen)

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Load by vLLM's own loaders. Returns whether layers keep packed copies beside what is loaded."""
        packed = self.device.type == "cpu"
        if packed:
            if unpacked(self.model):
                self.model.load_weights(tensors)
                return False
            forget_experts(self.model)
            tensors = with_head(tensors, self.model_config.hf_config)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors)
        finalize_layerwise_reload(self.model, self.model_config)
        return packed

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...

    def trainer_send_weights(self, *_: Any, **__: Any) -> None:  # 0.26 has it here
        raise NotImplementedError("the trainer pushes to the parameter server")


def _noted(
    tensors: Iterable[tuple[str, torch.Tensor]], seen: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        seen[name] = tensor
        yield name, tensor


def pull(worker: Any, source: LendingSource, version: int) -> int:
    """In a worker. Returns the version that it holds then."""
    worker.start_weight_update()
    worker.update_weights({"source": source, "version": version})
    worker.finish_weight_update()
    return worker.weight_transfer_engine.version


@dataclass(frozen=True)
class Copies:
    """A version in tensors of this process."""

    version: int
    tensors: Mapping[str, torch.Tensor]

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int) -> int:  # noqa: ARG002
        for name, tensor in self.tensors.items():
            into[name].copy_(tensor)
        return self.version

    def lend(self, use: Any, at_least: int) -> int:  # noqa: ARG002
        use(self.version, iter(self.tensors.items()))
        return self.version
