"""A decoding step of at most 256 sequences as a chain of kernels of which each begins before the last has ended.

A block asks for its weights (chain.cu), or for the first of its context (chain_attention.cu), while the kernel before
finishes. For bfloat16 on compute capability 9.0 (H100, H200) and models whose sizes ``chain_plan.fits`` accepts. ::

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
from staleflow.rollout.chain_plan import (
    ANY_ROWS,
    DEPTH,
    GROUP,
    MOST_ROWS,
    TILE,
    WARP,
    WHOLE,
    Form,
    attends,
    attention_kept,
    attention_stages,
    crowded,
    fits,
    forms_of,
    macros,
    pieces_of,
    rows_of_kernel,
    shapes_of,
)
from staleflow.rollout.model import Layer, Model
from staleflow.rollout.nvrtc import CHAINED, SHARED_MEMORY, checked, compiled, driver, function, launch, load, text_of

PRODUCTS, ATTENTION = ("device", "common", "chain"), ("device", "common", "chain_attention")
"""Sources of the two programs."""


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
    form: Form = WHOLE,
) -> list[Link]:
    """The kernels of a step, in order. ``tiles(matrix, rows)``: as ``tiles_of`` describes them."""
    config, rows = model.config, len(positions)
    shapes = shapes_of(config, rows_of_kernel(rows, form.parted), form.parted)

    def job(to: Tensor | None, bias: Tensor | None, norm: Tensor | None) -> Job:
        return Job(*map(_at, (buffers.x, buffers.scaled, to, buffers.squares, bias, norm)), rows)

    def product(name: str, matrix: Tensor, source: Tensor, made: Job) -> Link:
        shape = shapes[name]
        arguments = [tiles(matrix, TILE // 2 if name == "up" else TILE), tiles(source, shape.division.each), made]
        return Link(f"product_{name}", shape.blocks(rows), GROUP + WARP, shape.shared_memory, arguments)

    def attend(layer: Layer, entries: Tensor) -> Link:
        passed = buffers.qkv, buffers.attended, positions, tables
        return attending(model, attention, tiles, layer, entries, *passed, form.wide)

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


def attending(
    model: Model,
    attention: PagedAttention,
    tiles: Any,
    layer: Layer,
    entries: Tensor,
    qkv: Tensor,
    to: Tensor,
    positions: Tensor,
    tables: Tensor,
    wide: bool = False,
) -> Link:
    """Queries and keys of ``qkv`` are normed and rotated, keys and values stored, and attended to."""
    _, _, kv_heads, head_dim = model.config.geometry
    rows, page = len(positions), attention.page_size
    pieces = pieces_of(rows, kv_heads, tables.shape[1] * page, wide)
    blocks = rows * kv_heads * pieces
    crowd = crowded(model.config, blocks, pieces)
    stages = attention_stages(model.config, page, few=rows <= 32 or crowd)
    pointers = (qkv, entries, to, layer.query_norm, layer.key_norm, *model.turns, positions, tables)
    context = Context(*map(_at, pointers), entries.shape[1], tables.shape[1], stages)
    memory = attention_kept(model.config) + stages * 4 * head_dim * page
    arguments = [tiles(entries.view(-1, entries.shape[2]), page), context]
    return Link(
        "attend_crowd" if crowd and pieces == 1 else f"attend_{pieces}", blocks, GROUP + WARP, memory, arguments
    )


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Chain:
    def __init__(self, model: Model, attention: PagedAttention) -> None:
        self._model, self._attention = model, attention
        self._modules: dict[tuple[int, bool], ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, bool, str], ctypes.c_void_p] = {}
        self._tiles: dict[tuple[int, int], TensorMap] = {}

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(self._model, self._attention)

    def forms(self, rows: int, longest: int) -> list[Form]:
        """Those that may be the fastest for so many sequences of up to so many tokens, if it can decode them at all."""
        config = self._model.config
        possible = fits(config, self._model.dtype, self._attention.page_size, rows)
        return forms_of(rows, config.geometry[2], longest) if possible else []

    @property
    def attends(self) -> bool:
        """Whether its attention can be used without the rest, for any number of rows."""
        return attends(self._model.config, self._model.dtype, self._attention.page_size)

    def compilations(self, most: int) -> list[Callable[[], bytes]]:
        """What compiles the kernels for up to this number of rows."""
        wanted = {(rows, form.parted) for rows in range(1, most + 1) for form in self.forms(rows, 1)}
        sizes = {(rows_of_kernel(rows, parted), parted) for rows, parted in wanted}
        return [partial(self._compiled, *size) for size in [(ANY_ROWS, False)] * self.attends + [*sizes]]

    def decode(
        self,
        given: Tensor,
        last: Tensor,
        positions: Tensor,
        tables: Tensor,
        form: Form = WHOLE,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits of one token of each row: the given one, or for -1 - n the last one of row n."""
        from staleflow.rollout import cuda_kernels as kernels

        model, rows = self._model, len(positions)
        for each in self.links(given, last, positions, tables, form):
            self._launch(rows_of_kernel(rows, form.parted), form.parted, each)
        normed = kernels.add_and_norm(self._buffers.x[:rows], None, model.norm, model.config.epsilon)
        return torch.mm(normed, model.head.t(), out=out)

    def attend(self, layer: Layer, entries: Tensor, qkv: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Attention alone, of one token of each row."""
        model, attention = self._model, self._attention
        _, heads, _, head_dim = model.config.geometry
        to = qkv.new_empty(len(positions), heads * head_dim)
        link = attending(model, attention, self._tiles_of, layer, entries, qkv, to, positions, tables)
        self._launch(ANY_ROWS, False, link)
        return to

    def links(self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor, form: Form) -> list[Link]:
        model, attention, buffers = self._model, self._attention, self._buffers
        return links(model, attention, buffers, self._tiles_of, given, last, positions, tables, form)

    def _launch(self, size: int, parted: bool, link: Link) -> None:
        kernel = self._function(size, parted, link)
        launch(kernel, link.blocks, link.threads, link.shared_memory, link.arguments, CHAINED)

    def _compiled(self, size: int, parted: bool) -> bytes:
        options = macros(self._model.config, self._attention.page_size, size, parted)
        text = text_of(*(ATTENTION if size == ANY_ROWS else PRODUCTS))
        return compiled("chain.cu", text, tuple(sorted(options.items())))

    def _function(self, size: int, parted: bool, link: Link) -> ctypes.c_void_p:
        which = (ANY_ROWS, False) if link.name.startswith("attend") else (size, parted)
        if which not in self._modules:
            self._modules[which] = load(self._compiled(*which))
        if (*which, link.name) not in self._functions:
            self._functions[*which, link.name] = function(self._modules[which], link.name.encode(), SHARED_MEMORY)
        return self._functions[*which, link.name]

    def _tiles_of(self, matrix: Tensor, rows: int) -> TensorMap:
        at = matrix.data_ptr(), rows
        if at not in self._tiles:
            self._tiles[at] = tiles_of(matrix, rows)
        return self._tiles[at]
