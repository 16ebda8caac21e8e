"""The kernel for few sequences, emulated on the CPU: the same source, compiled for a GPU of fibers (emulation.h)."""

import ctypes
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.rollout import few
from staleflow.rollout.attention import Layout, PagedAttention
from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import read_config

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
HERE = Path(__file__).parent
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
DIVIDED = {"intermediate_size": 2560, "hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": False}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}


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

    def exact(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
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

    def emulated(self, blocks: int, polled: bool) -> torch.Tensor:
        options = few.macros(self.model.config, self.page, self.rows, blocks, polled)
        text = few.source(("few_products", "few_attention", "few"))
        source, library = self.folder / "few.cpp", self.folder / "few.so"
        source.write_text(f'#include "emulation.h"\n{text}\n#include "emulation_main.h"\n')
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}"]
        named = [f"-D{name}={value}" for name, value in options.items()]
        subprocess.run(["g++", *flags, *named, str(source), "-o", str(library)], check=True)
        memory = few.Memory(self.model, self.attention, blocks)
        step = memory.step(self.given, self.last, self.positions, self.tables)
        assert ctypes.CDLL(str(library)).emulate(ctypes.byref(step), self.rows) == 0, "all threads wait"
        return memory.logits[: self.rows].float()


@pytest.mark.parametrize(
    ("config", "lengths", "blocks", "page", "polled"),
    [
        ({}, [37], 3, 16, True),
        (BIASED | {"hidden_size": 1056, "head_dim": 64}, [1, 400], 3, 16, False),
        (QWEN3, [1500, 16, 17], 16, 32, True),
        ({"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 384}, [300, 129, 5], 7, 16, True),
        (DIVIDED, [1 + 9 * at for at in range(17)], 5, 16, True),
    ],
    ids=["one", "biased-in-cuts-at-barriers", "qwen3-in-pieces", "square-in-pieces", "many-with-divided-columns"],
)
def test_a_step_equals_the_plain_path(
    tmp_path: Path, config: dict[str, Any], lengths: list[int], blocks: int, page: int, polled: bool
) -> None:
    case = Case(tmp_path, config, lengths, page)
    logits, entries = case.exact()
    found = case.emulated(blocks, polled)
    assert ((found - logits).norm(dim=1) / logits.norm(dim=1)).max() < 0.03
    for mine, exact in zip(case.attention.entries, entries, strict=True):
        assert (mine.float() - exact)[:, case.slots].norm() < 0.02 * exact[:, case.slots].norm()
        untouched = torch.ones(mine.shape[1], dtype=torch.bool).index_fill(0, case.slots, False)
        assert torch.equal(mine.float()[:, untouched], exact[:, untouched])


def test_a_kernel_that_waits_in_vain_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that never come are not numbers, and neither are the logits: the step fails instead of hanging."""
    case = Case(tmp_path, {}, [37], 16)
    monkeypatch.setattr(few, "PATIENCE", 0)
    assert not torch.isfinite(case.emulated(3, polled=True)).any()


def test_every_divided_product_is_complete() -> None:
    """Parts and tiles cover all columns and rows, and no block has two parts."""
    for hidden in (64, 576, 896, 1536, 3584, 5120):
        for wide in (160, 1536, 4864, 8960, 18_944):
            for tiles in (1, 2, 4):
                parts, each = few.divided(hidden, wide, tiles, 132)
                assert 1 <= parts <= wide // 32
                units = math.ceil(math.ceil(hidden / 16) / each) * parts
                assert parts == 1 or units <= 132
