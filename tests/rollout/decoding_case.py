"""A decoding step with random weights and its exact result, and CUDA kernels compiled for the CPU (emulation.h)."""

import ctypes
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from staleflow.rollout import chain, chain_plan
from staleflow.rollout.attention import Layout, PagedAttention
from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}


def compiled(folder: Path, kind: str, text: str, options: dict[str, str]) -> ctypes.CDLL:
    """Kernels for the CPU. ``kind``: that of the file which says how they are launched."""
    source, library = folder / f"{kind}.cpp", folder / f"{kind}.so"
    before, after = ('#include "emulation.h"\n#include "emulation_device.h"\n', f'\n#include "emulation_{kind}.h"\n')
    source.write_text(before + text + after)
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", f"-I{Path(__file__).parent}"]
    named = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["g++", *flags, *named, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


class Case:
    """A model with random weights, entries in shuffled pages, and one token for each of several sequences."""

    def __init__(self, folder: Path, config: dict[str, Any], lengths: list[int], page: int) -> None:
        torch.manual_seed(len(lengths))
        (folder / "config.json").write_text(json.dumps(LLAMA | config))
        self.folder, self.rows, self.page = folder, len(lengths), page
        self.model = Model(read_config(folder), torch.bfloat16)
        for name, view in self.model.parameters.items():
            noise = 0.1 * torch.randn(view.shape)
            view.copy_(1 + noise if "norm" in name else noise)
        pages = [-(-length // page) for length in lengths]
        self.attention = self.memory(torch.bfloat16, sum(pages) + 1)
        for entries in self.attention.entries:
            entries.normal_()
        shuffled = torch.randperm(sum(pages) + 1).int().split([*pages, 1])
        self.tables = torch.full((self.rows, max(pages)), self.attention.null_page, dtype=torch.int32)
        for table, held in zip(self.tables, shuffled, strict=False):
            table[: len(held)] = held
        self.positions = torch.tensor(lengths, dtype=torch.int32) - 1
        pages_now = self.tables[torch.arange(self.rows), self.positions // page].long()
        self.slots = pages_now * page + self.positions.long() % page
        self.last = torch.randint(0, 100, (self.rows,))
        self.given = torch.randint(0, 100, (self.rows,), dtype=torch.int32)
        moved = torch.randperm(self.rows)
        self.given[::2] = (-1 - moved[::2]).int()  # these continue with the last token of another row

    def memory(self, dtype: torch.dtype, pages: int) -> PagedAttention:
        return PagedAttention(self.model.config.geometry, pages, self.page, dtype, torch.device("cpu"))

    def exact(self) -> tuple[Tensor, list[Tensor]]:
        """Logits and entries by the plain path in single precision."""
        model = Model(self.model.config, torch.float32)
        for name, view in model.parameters.items():
            view.copy_(self.model.parameters[name])
        attention = self.memory(torch.float32, self.attention.null_page)
        for exact, entries in zip(attention.entries, self.attention.entries, strict=True):
            exact.copy_(entries)
        order = self.positions.argsort(descending=True)
        tables, positions = self.tables[order].long(), self.positions[order].long()
        attention.begin(Layout(self.slots[order].numpy(), tables.numpy(), (positions + 1).numpy(), []))
        tokens = torch.where(self.given < 0, self.last[(-1 - self.given).clamp_min(0)], self.given.long())
        logits = torch.empty(self.rows, model.config.vocabulary)
        logits[order] = model.forward(tokens[order], positions, attention, None)
        return logits, attention.entries

    def equals(self, found: Tensor, exact: tuple[Tensor, list[Tensor]]) -> bool:
        """Whether these logits, and this memory, are what they should be up to rounding."""
        logits, entries = exact
        if not ((found - logits).norm(dim=1) / logits.norm(dim=1)).max() < 0.03:
            return False
        return all(
            (mine.float() - right)[:, self.slots].norm() < 0.02 * right[:, self.slots].norm()
            for mine, right in zip(self.attention.entries, entries, strict=True)
        )

    def leaves_others_alone(self, entries: list[Tensor]) -> bool:
        """Whether entries of other slots than those of the step are what they were."""
        others = torch.ones(entries[0].shape[1], dtype=torch.bool).index_fill(0, self.slots, False)
        pairs = zip(self.attention.entries, entries, strict=True)
        return all(torch.equal(mine.float()[:, others], before[:, others]) for mine, before in pairs)

    def restore(self, entries: list[Tensor]) -> None:
        for mine, before in zip(self.attention.entries, entries, strict=True):
            mine.copy_(before)


class _Link(ctypes.Structure):
    """As emulation_chain.h declares it."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_int) for name in ("blocks", "threads", "shared_memory")),
    )


def emulated_tiles(matrix: Tensor, rows: int) -> chain.TensorMap:
    """As emulation_device.h declares it."""
    outputs, columns = matrix.shape
    return chain.TensorMap(room=(matrix.data_ptr(), columns, outputs, rows))


def run_chain(case: Case, library: ctypes.CDLL, seed: int, form: chain_plan.Form = chain_plan.WHOLE) -> Tensor:
    """Logits by the chain of kernels. What nobody has written is not a number."""
    model, rows = case.model, case.rows
    buffers = chain.Buffers(model, case.attention)
    for buffer in vars(buffers).values():
        buffer.fill_(torch.nan)
    links = chain.links(
        model, case.attention, buffers, emulated_tiles, case.given, case.last, case.positions, case.tables, form
    )
    made = (_Link * len(links))(*map(_link, links))
    failure: bytes | None = library.emulate(made, len(made), seed)
    if failure is not None:
        raise RuntimeError(failure.decode())
    x = buffers.x[:rows].float()
    normed = functional.rms_norm(x, (model.config.hidden,), model.norm.float(), model.config.epsilon)
    return functional.linear(normed, model.head.float())


def _link(link: chain.Link) -> _Link:
    arguments: Sequence[Any] = link.arguments
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    return _Link(link.name.encode(), pointers, link.blocks, link.threads, link.shared_memory)
