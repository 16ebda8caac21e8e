"""A decoding step of at most 32 sequences as one persistent kernel (few.cu), compiled for the model when first used.

The kernel is for bfloat16 on GPUs of compute capability 9.0 (H100, H200), and for models whose sizes ``fits`` accepts;
everything else decodes with ``chain.py`` or ``cuda.decode``. ::

    few = FewRows(model, attention)
    logits_NV = few.decode(given_N, last_N, positions_N, tables_NP)
"""

import ctypes
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import ModelConfig
from staleflow.rollout.nvrtc import COOPERATIVE, SHARED_MEMORY, compiled, function, launch, load, text_of

MOST_ROWS = 32
HELD_REGISTERS = 120
"""Most registers of a thread for its part of a product's input; with 144, others would be spilled."""
STEP, WARPS = 32, 8
"""Columns of a matrix that a warp takes at a time; the warps of a block that compute."""
LONGEST_CUT, CUT = 28, 24
"""Steps of a row that lie in the ring together: all of a row that has no more than the first, else the second."""
LEAST_CHUNK, WINDOW, PATIENCE = 128, 2, 1 << 20
"""Least tokens of context for a block; slots of the ring under way; how often a thread looks for what is not there."""
THREADS = 384
MARKS = 20
"""Places of the code in a trace, as few_products.cu counts them."""


def fits(config: ModelConfig, dtype: torch.dtype, page_size: int, rows: int) -> bool:
    """Whether the kernel can decode this number of rows of this model."""
    _, heads, kv_heads, head_dim = config.geometry
    sizes = (config.hidden, config.intermediate, heads * head_dim)
    return (
        dtype == torch.bfloat16
        and rows <= MOST_ROWS
        and head_dim in (64, 128)
        and heads <= 8 * kv_heads
        and page_size % 16 == 0
        and all(size % STEP == 0 for size in sizes)
        and _held(max(config.hidden, heads * head_dim) // STEP, _tiles(rows)) <= HELD_REGISTERS
    )


def _tiles(rows: int) -> int:
    """Of eight rows each, as the kernel is compiled for."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _held(steps: int, tiles: int) -> int:
    """Registers of a thread for the input of this number of steps, as few.cu cuts them."""
    cut = steps if steps <= LONGEST_CUT else CUT
    return 4 * tiles * -(-steps // cut) * -(-cut // WARPS)


def divided(hidden: int, wide: int, tiles: int, blocks: int) -> tuple[int, int]:
    """How the product with the longest rows is divided: (parts of its columns, tiles of its rows for each block).

    Undivided, a block adds to the residual what it computed. With many rows, or long ones, the input of a whole product
    is too much for a block: then columns are divided as well, and another stage adds up the parts.
    """
    steps, every = wide // STEP, -(-hidden // 16)
    if _held(steps, tiles) <= HELD_REGISTERS:
        return 1, 1
    found: list[tuple[int, int, int]] = []
    for each in range(1, every + 1):
        parts = min(blocks // -(-every // each), steps)
        if parts and _held(-(-steps // parts), tiles) <= HELD_REGISTERS:
            found.append((each * -(-steps // parts), parts, each))
    _, parts, each = min(found)
    return parts, each


def items_of(kv_heads: int, blocks: int) -> int:
    """Most pieces into which the contexts of all rows and heads are cut."""
    return -(-MOST_ROWS * kv_heads // blocks) * blocks


def macros(
    config: ModelConfig, page_size: int, rows: int, blocks: int, polled: bool, traced: bool = False
) -> dict[str, str]:
    layers, heads, kv_heads, head_dim = config.geometry
    split, tiles = divided(config.hidden, config.intermediate, _tiles(rows), blocks)
    values = {
        "HIDDEN": config.hidden,
        "WIDE": config.intermediate,
        "LAYERS": layers,
        "LONGEST_CUT": LONGEST_CUT,
        "LONG_CUT": CUT,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "VOCABULARY": config.vocabulary,
        "PAGE": page_size,
        "QK_NORM": int(config.qk_norm),
        "TILES8": _tiles(rows),
        "GRID": blocks,
        "SHARED_MEMORY": SHARED_MEMORY,
        "DOWN_SPLIT": split,
        "DOWN_TILES": tiles,
        "CHUNK": LEAST_CHUNK,
        "MOST_ROWS": MOST_ROWS,
        "ITEMS": items_of(kv_heads, blocks),
        "WINDOW": WINDOW,
        "PATIENCE": PATIENCE,
        "POLLED": int(polled),
        "TRACED": int(traced),
    }
    named = {name: str(value) for name, value in values.items()}
    return named | {"EPSILON": f"{config.epsilon:e}f", "SCALE": f"{head_dim**-0.5:e}f"}


SOURCES = ("device", "common", "few_products", "few_attention", "few")
POINTERS = (
    "layers", "embedding", "norm", "head", "cos", "sin", "given", "positions", "tables", "last",
    "x", "qkv", "attended", "gated", "logits", "parts", "sums", "meeting", "trace",
)  # fmt: skip


class Step(ctypes.Structure):
    """The argument of the kernel, as few.cu declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("slots", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
    )


class Memory:
    """What the kernel works with besides its inputs: tensors of the layers, and room for what passes between stages."""

    def __init__(self, model: Model, attention: PagedAttention, blocks: int) -> None:
        config, device = model.config, attention.device
        _, heads, kv_heads, head_dim = config.geometry
        queries, rows = heads * head_dim, MOST_ROWS
        split = max(divided(config.hidden, config.intermediate, tiles, blocks)[0] for tiles in (1, 2, 4))

        def halves(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=model.dtype, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        addresses = [
            [0 if tensor is None else tensor.data_ptr() for tensor in (
                layer.qkv, layer.qkv_bias, layer.out, layer.out_bias,
                layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias,
                layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm, entries,
            )]
            for layer, entries in zip(model.layers, attention.entries, strict=True)
        ]  # fmt: skip
        self.logits = halves(rows, config.vocabulary)
        self.trace = torch.zeros(blocks, len(model.layers) + 1, MARKS, dtype=torch.int64, device=device)
        """Written by a kernel that is compiled with ``TRACED``."""
        self.slots = attention.entries[0].shape[1]
        self._tensors = {
            "layers": torch.tensor(addresses, dtype=torch.int64).to(device),
            "embedding": model.embedding,
            "norm": model.norm,
            "head": model.head,
            "cos": model.turns[0],
            "sin": model.turns[1],
            "x": halves(4, rows, config.hidden),
            "qkv": halves(2, rows, (heads + 2 * kv_heads) * head_dim),
            "attended": halves(2, rows, queries),
            "gated": halves(rows, config.intermediate),
            "logits": self.logits,
            "parts": floats(2, items_of(kv_heads, blocks), heads // kv_heads, head_dim + 2),
            "sums": floats(split, rows, config.hidden),
            "meeting": torch.zeros(2, dtype=torch.int32, device=device),
            "trace": self.trace,
        }

    def step(self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor) -> Step:
        inputs = {"given": given, "last": last, "positions": positions, "tables": tables}
        pointers = {name: tensor.data_ptr() for name, tensor in (self._tensors | inputs).items()}
        return Step(**pointers, slots=self.slots, rows=len(positions), width=tables.shape[1])


class FewRows:
    def __init__(self, model: Model, attention: PagedAttention, traced: bool = False) -> None:
        """``traced``: blocks write down when they passed which place (``trace``)."""
        self._traced = traced
        self._model, self._attention = model, attention
        self._blocks = torch.cuda.get_device_properties(attention.device).multi_processor_count
        self._kernels: dict[tuple[int, bool], ctypes.c_void_p] = {}

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self._model, self._attention, self._blocks)

    @property
    def trace(self) -> Tensor:
        """``[blocks, layers + 1, MARKS]``: cycles of each block's own clock, of the last step."""
        return self._memory.trace

    def fits(self, rows: int) -> bool:
        return fits(self._model.config, self._model.dtype, self._attention.page_size, rows)

    def compilations(self, most: int) -> list[Callable[[], bytes]]:
        """What compiles the kernels for up to this number of rows."""
        sizes = {8 * _tiles(rows) for rows in range(1, most + 1) if self.fits(rows)}
        return [partial(self._compiled, rows, True) for rows in sizes]

    def decode(self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor, polled: bool = True) -> Tensor:
        """Logits of one token of each row: the given one, or for -1 - n the last one of row n.

        They are good until the next call. Blocks wait for each other by looking at values (``polled``) or at barriers.
        """
        rows = len(positions)
        kernel = self._kernels.get((_tiles(rows), polled))
        if kernel is None:
            module = load(self._compiled(rows, polled))
            kernel = self._kernels[_tiles(rows), polled] = function(module, b"decode_few", SHARED_MEMORY)
        step = self._memory.step(given, last, positions, tables)
        launch(kernel, self._blocks, THREADS, SHARED_MEMORY, [step], COOPERATIVE)
        return self._memory.logits[:rows]

    def _compiled(self, rows: int, polled: bool) -> bytes:
        page = self._attention.page_size
        options = macros(self._model.config, page, rows, self._blocks, polled, self._traced)
        return compiled("few.cu", text_of(*SOURCES), tuple(sorted(options.items())))
