"""A decoding step of at most 128 sequences as a chain of kernels of which each begins before the last has ended.

A block asks for its weights (chain.cu), or for the first of its context (chain_attention.cu), while the kernel before
finishes. For bfloat16 on compute capability 9.0 (H100, H200) and models whose sizes ``fits`` accepts. The constants
are those that were fastest on an H200 (``bench/gpu/stages.py --changes``). ::

    chain = Chain(model, attention)
    logits_NV = chain.decode(given_N, last_N, positions_N, tables_NP)
"""

import ctypes
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.model import Layer, Model
from staleflow.rollout.model_folder import ModelConfig
from staleflow.rollout.nvrtc import CHAINED, SHARED_MEMORY, checked, compiled, driver, function, launch, load, text_of

SIZES = (8, 16, 32, 64, 128)
"""Sequences for which there are kernels."""
MOST_ROWS, ANY_ROWS = SIZES[-1], 0
TILE, DEPTH, GROUP, WARP = 64, 64, 128, 32
"""Outputs and columns that a warpgroup takes at a time; threads that multiply, and those of the copying warp."""
MEMORY = {2: 114_000, 3: 76_000}
"""Bytes of shared memory of a block where so many of a kernel are to fit on a multiprocessor. A smaller block would
leave room for those of kernels further ahead, and be held up by what they ask of the memory."""
MULTIPROCESSORS = 132
RING_OF_ATTENTION, LEAST_STAGES, MOST_STAGES = 65_536, 4, 8
"""Bytes of the ring of attention; its stages."""
MANY = 64
"""Sequences from which on a block sends sums in one copy: before, one by one is faster."""
BLOCKS, CLUSTER = 100, 8
"""Blocks that are enough to keep the memory busy; most blocks of a product's cluster."""
ATTENDING, LEAST_PIECE, SHORT = 256, 64, 1024
"""Blocks that are enough for attention; tokens of context that one should have; of a context that is short."""
PIECES, LARGEST = 8, 16
"""Most pieces of a context, which are a cluster; and most in the wide form, which is for few long contexts."""
PRODUCTS, ATTENTION = ("device", "common", "chain"), ("device", "common", "chain_attention")
"""Sources of the two programs."""


def fits(config: ModelConfig, dtype: torch.dtype, page_size: int, rows: int) -> bool:
    """Whether the chain can decode this number of rows of this model."""
    _, heads, kv_heads, head_dim = config.geometry
    sizes = (config.hidden, config.intermediate, heads * head_dim, (heads + 2 * kv_heads) * head_dim)
    return (
        dtype == torch.bfloat16
        and rows <= MOST_ROWS
        and head_dim in (64, 128)
        and heads <= 8 * kv_heads
        and page_size in (16, 32, 64)
        and all(size % TILE == 0 for size in sizes)
    )


def rows_of_kernel(rows: int) -> int:
    """For which a kernel is compiled that serves this number of rows."""
    return next(size for size in SIZES if rows <= size)


def split_of(columns: int, outputs: int) -> int:
    """Blocks of a cluster, which divide the columns of the same outputs: what they send each other takes time, too."""
    split = 1
    while split < CLUSTER and outputs // TILE * split < BLOCKS and 2 * split <= columns // DEPTH:
        split *= 2
    return split


def pieces_of(rows: int, kv_heads: int, longest: int, wide: bool = False) -> int:
    """Into how many pieces each context of at most ``longest`` tokens is cut. The more there are, the longer joining
    them takes: the third and fourth have to be worth it, and those after them even more."""
    pieces, most, enough = 1, LARGEST if wide else PIECES, ATTENDING if longest <= SHORT else 2 * ATTENDING
    while pieces < most and rows * kv_heads * pieces < enough // pieces and 2 * pieces * LEAST_PIECE <= longest:
        pieces *= 2
    return pieces


class Shape(NamedTuple):
    """How a product is divided."""

    split: int
    """Blocks of a cluster, which divide the columns of the same outputs."""
    tiles: int
    """Of 64 outputs."""
    stages: int
    rows: int

    @classmethod
    def of(cls, columns: int, outputs: int, rows: int) -> "Shape":
        """With as long a ring as there is room for."""
        split, stage = split_of(columns, outputs), 2 * DEPTH * (TILE + rows)
        together = min(max(MEMORY), max(min(MEMORY), -(-outputs // TILE * split // MULTIPROCESSORS)))
        sums = 4 * (TILE + 4) * rows
        room = MEMORY[together] - 4 * rows - 32 - (sums if split > 1 else 16)
        return cls(split, outputs // TILE, max(2, room // (stage + 16), -(-sums // stage)), rows)

    @property
    def blocks(self) -> int:
        return self.tiles * self.split

    @property
    def shared_memory(self) -> int:
        """The ring, sums of other blocks, two gates for each stage, another, and a factor for each row."""
        sums = 4 * (TILE + 4) * self.rows if self.split > 1 else 16
        return self.stages * (2 * DEPTH * (TILE + self.rows) + 16) + sums + 8 + 4 * self.rows + 16


def shapes_of(config: ModelConfig, rows: int) -> dict[str, Shape]:
    """Of the four products of a layer."""
    _, heads, kv_heads, head_dim = config.geometry
    queries, qkv = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    return {
        "qkv": Shape.of(config.hidden, qkv, rows),
        "out": Shape.of(queries, config.hidden, rows),
        "up": Shape.of(config.hidden, 2 * config.intermediate, rows),
        "down": Shape.of(config.intermediate, config.hidden, rows),
    }


def macros(config: ModelConfig, page_size: int, rows: int) -> dict[str, str]:
    """For the kernels of a number of rows, or with ``ANY_ROWS`` for attention."""
    _, heads, kv_heads, head_dim = config.geometry
    sizes = {
        "HIDDEN": config.hidden,
        "WIDE": config.intermediate,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page_size,
        "QK_NORM": int(config.qk_norm),
    }
    if rows == ANY_ROWS:
        sizes |= {"MOST_STAGES": MOST_STAGES, "KEPT": attention_kept(config)}
    else:
        sizes |= {"ROWS": rows, "MANY": MANY}
        for name, shape in shapes_of(config, rows).items():
            sizes |= {f"SPLIT_{name.upper()}": shape.split, f"STAGES_{name.upper()}": shape.stages}
    named = {name: str(size) for name, size in sizes.items()}
    return named | {"EPSILON": f"{config.epsilon:e}f", "SCALE": f"{head_dim**-0.5:e}f"}


def attention_stages(config: ModelConfig, page_size: int, rows: int) -> int:
    """Pages whose keys and values lie in the ring together. Of few sequences many blocks fit on a multiprocessor.

    Warps take pages in turn. The one that looks at a page has to be the one that looks at the next in its place, which
    it could not tell from the one before if it had not seen that.
    """
    in_turn = max(1, 16 * (GROUP // WARP) // page_size)
    fit = RING_OF_ATTENTION // (4 * config.geometry[3] * page_size)
    most = min(fit, LEAST_STAGES if rows <= 32 else MOST_STAGES)
    return max(2, in_turn, most // in_turn * in_turn)


def attention_kept(config: ModelConfig) -> int:
    """Bytes of shared memory of a block besides the ring: no less than chain_attention.cu has."""
    _, heads, kv_heads, head_dim = config.geometry
    share, warps = heads // kv_heads, GROUP // WARP
    queries, fresh, lines = 8 * (head_dim + 8) * 2, 2 * head_dim * 2, warps * share * (head_dim + 4) * 4
    found = 4 * (share * head_dim + LARGEST * 2 * share) + 2 * warps * 8 * 4
    return -(-(queries + fresh + lines + found + 16 * MOST_STAGES + 8 + 4 * 32 + 16) // 1024) * 1024


class TensorMap(ctypes.Structure):
    """How a matrix is copied in tiles, as CUDA's driver describes it."""

    _fields_ = (("room", ctypes.c_uint64 * 16),)


def tiles_of(matrix: Tensor, rows: int) -> TensorMap:
    """Tiles of this many rows and ``DEPTH`` columns of ``matrix [outputs, columns]``."""
    outputs, columns = matrix.shape
    # the driver wants it at a multiple of 64 bytes, and ctypes cannot be asked for that
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    two = ctypes.c_uint32 * 2
    bfloat16, plain, swizzled, promoted = 9, 0, 3, 2  # CU_TENSOR_MAP_..._BFLOAT16, _NONE, _128B, _L2_128B
    checked(
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(made), bfloat16, 2, ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, outputs), (ctypes.c_uint64 * 1)(2 * columns), two(DEPTH, rows), two(1, 1),
            plain, swizzled, promoted, plain,
        )
    )  # fmt: skip
    return made


class Job(ctypes.Structure):
    """An argument of a product, as chain.cu declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "scaled", "to", "squares", "bias", "norm")),
        ("rows", ctypes.c_int),
    )


class Begin(ctypes.Structure):
    """The argument of the first kernel."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("embedding", "given", "last")), ("job", Job))


CONTEXT = ("qkv", "entries", "to", "query_norm", "key_norm", "cos", "sin", "positions", "tables")


class Context(ctypes.Structure):
    """The argument of attention, as chain_attention.cu declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in CONTEXT),
        ("slots", ctypes.c_longlong),
        ("width", ctypes.c_int),
        ("stages", ctypes.c_int),
    )


class Link(NamedTuple):
    """A kernel and its arguments."""

    name: str
    blocks: int
    threads: int
    shared_memory: int
    arguments: list[Any]


class Buffers:
    """What passes from kernel to kernel."""

    def __init__(self, model: Model, attention: PagedAttention) -> None:
        config = model.config
        _, heads, kv_heads, head_dim = config.geometry

        def halves(columns: int) -> Tensor:
            return torch.zeros(MOST_ROWS, columns, dtype=model.dtype, device=attention.device)

        self.x, self.scaled = halves(config.hidden), halves(config.hidden)
        self.qkv, self.attended = halves((heads + 2 * kv_heads) * head_dim), halves(heads * head_dim)
        self.gated = halves(config.intermediate)
        self.squares = torch.zeros(config.hidden // TILE, MOST_ROWS, dtype=torch.float32, device=attention.device)


def links(
    model: Model,
    attention: PagedAttention,
    buffers: Buffers,
    tiles: Any,
    given: Tensor,
    last: Tensor,
    positions: Tensor,
    tables: Tensor,
    wide: bool = False,
) -> list[Link]:
    """The kernels of a step, in order. ``tiles(matrix, rows)``: as ``tiles_of`` describes them."""
    config, rows, size = model.config, len(positions), rows_of_kernel(len(positions))
    kv_heads = config.geometry[2]
    shapes, page, longest = shapes_of(config, size), attention.page_size, tables.shape[1] * attention.page_size
    pieces = pieces_of(rows, kv_heads, longest, wide)
    stages = attention_stages(config, page, rows)
    memory = attention_kept(config) + stages * 4 * config.geometry[3] * page

    def job(to: Tensor | None, bias: Tensor | None, norm: Tensor | None) -> Job:
        return Job(*map(_at, (buffers.x, buffers.scaled, to, buffers.squares, bias, norm)), rows)

    def product(name: str, matrix: Tensor, source: Tensor, made: Job) -> Link:
        shape = shapes[name]
        arguments = [tiles(matrix, TILE // 2 if name == "up" else TILE), tiles(source, size), made]
        return Link(f"product_{name}", shape.blocks, GROUP + WARP, shape.shared_memory, arguments)

    def attend(layer: Layer, entries: Tensor) -> Link:
        pointers = (
            buffers.qkv, entries, buffers.attended, layer.query_norm, layer.key_norm, *model.turns, positions, tables,
        )  # fmt: skip
        context = Context(*map(_at, pointers), entries.shape[1], tables.shape[1], stages)
        arguments = [tiles(entries.view(-1, entries.shape[2]), page), context]
        return Link(f"attend_{pieces}", rows * kv_heads * pieces, GROUP + WARP, memory, arguments)

    begin = Begin(*map(_at, (model.embedding, given, last)), job(None, None, model.layers[0].attention_norm))
    found = [Link("chain_begin", rows, GROUP, 0, [begin])]
    norms = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
    for layer, entries, norm in zip(model.layers, attention.entries, norms, strict=True):
        found += [
            product("qkv", layer.qkv, buffers.scaled, job(buffers.qkv, layer.qkv_bias, None)),
            attend(layer, entries),
            product("out", layer.out, buffers.attended, job(None, layer.out_bias, layer.mlp_norm)),
            product("up", layer.gate_up, buffers.scaled, job(buffers.gated, layer.gate_up_bias, None)),
            product("down", layer.down, buffers.gated, job(None, layer.down_bias, norm)),
        ]
    return found


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Chain:
    def __init__(self, model: Model, attention: PagedAttention) -> None:
        self._model, self._attention = model, attention
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._tiles: dict[tuple[int, int], TensorMap] = {}

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(self._model, self._attention)

    def fits(self, rows: int) -> bool:
        return fits(self._model.config, self._model.dtype, self._attention.page_size, rows)

    def compilations(self, most: int) -> list[Callable[[], bytes]]:
        """What compiles the kernels for up to this number of rows."""
        sizes = {rows_of_kernel(rows) for rows in range(1, most + 1) if self.fits(rows)}
        return [partial(self._compiled, size) for size in ([ANY_ROWS, *sizes] if sizes else [])]

    def widens(self, rows: int, longest: int) -> bool:
        """Whether the wide form cuts contexts of up to so many tokens into more pieces."""
        kv_heads = self._model.config.geometry[2]
        return pieces_of(rows, kv_heads, longest, wide=True) > pieces_of(rows, kv_heads, longest)

    def decode(
        self,
        given: Tensor,
        last: Tensor,
        positions: Tensor,
        tables: Tensor,
        wide: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits of one token of each row: the given one, or for -1 - n the last one of row n."""
        from staleflow.rollout import cuda_kernels as kernels

        model, rows = self._model, len(positions)
        for each in self.links(given, last, positions, tables, wide):
            kernel = self._function(rows_of_kernel(rows), each)
            launch(kernel, each.blocks, each.threads, each.shared_memory, each.arguments, CHAINED)
        normed = kernels.add_and_norm(self._buffers.x[:rows], None, model.norm, model.config.epsilon)
        return torch.mm(normed, model.head.t(), out=out)

    def links(self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor, wide: bool) -> list[Link]:
        model, attention, buffers = self._model, self._attention, self._buffers
        return links(model, attention, buffers, self._tiles_of, given, last, positions, tables, wide)

    def _compiled(self, size: int) -> bytes:
        options = macros(self._model.config, self._attention.page_size, size)
        text = text_of(*(ATTENTION if size == ANY_ROWS else PRODUCTS))
        return compiled("chain.cu", text, tuple(sorted(options.items())))

    def _function(self, rows: int, link: Link) -> ctypes.c_void_p:
        size = ANY_ROWS if link.name.startswith("attend") else rows
        if size not in self._modules:
            self._modules[size] = load(self._compiled(size))
        if (size, link.name) not in self._functions:
            self._functions[size, link.name] = function(self._modules[size], link.name.encode(), SHARED_MEMORY)
        return self._functions[size, link.name]

    def _tiles_of(self, matrix: Tensor, rows: int) -> TensorMap:
        at = matrix.data_ptr(), rows
        if at not in self._tiles:
            self._tiles[at] = tiles_of(matrix, rows)
        return self._tiles[at]
