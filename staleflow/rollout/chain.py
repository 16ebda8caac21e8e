"""A decoding step of at most 256 sequences as a chain of kernels of which each begins before the last has ended.

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

SIZES, PARTED_SIZES = (8, 16, 32, 64, 128), (128, 256)
"""Sequences for which there are kernels: that multiply all of them, and parts of them."""
MOST_ROWS, ANY_ROWS = PARTED_SIZES[-1], 0
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
PARTED_FROM = 65
"""Sequences from which on it may pay to divide them, too."""
ATTENDING, LEAST_PIECE, SHORT = 256, 64, 1024
"""Blocks that are enough for attention; tokens of context that one should have; of a context that is short."""
PIECES, LARGEST = 8, 16
"""Most pieces of a context, which are a cluster; and most in the wide form, which is for few long contexts."""
PRODUCTS, ATTENTION = ("device", "common", "chain"), ("device", "common", "chain_attention")
"""Sources of the two programs."""


def attends(config: ModelConfig, dtype: torch.dtype, page_size: int) -> bool:
    """Whether the chain's attention can be used with this model."""
    _, heads, kv_heads, head_dim = config.geometry
    possible = head_dim in (64, 128) and heads <= 8 * kv_heads and page_size in (16, 32, 64)
    return possible and dtype == torch.bfloat16


def fits(config: ModelConfig, dtype: torch.dtype, page_size: int, rows: int) -> bool:
    """Whether the chain can decode this number of rows of this model."""
    _, heads, kv_heads, head_dim = config.geometry
    sizes = (config.hidden, config.intermediate, heads * head_dim, (heads + 2 * kv_heads) * head_dim)
    divides = rows <= MOST_ROWS and all(size % TILE == 0 for size in sizes)
    return divides and attends(config, dtype, page_size)


def rows_of_kernel(rows: int, parted: bool = False) -> int:
    """For which a kernel is compiled that serves this number of rows."""
    return next(size for size in (PARTED_SIZES if parted else SIZES) if rows <= size)


def pieces_of(rows: int, kv_heads: int, longest: int, wide: bool = False) -> int:
    """Into how many pieces each context of at most ``longest`` tokens is cut.

    The more there are, the longer joining them takes. Where no context is long, two are not worth it if every
    multiprocessor has one; where some may be, everybody waits for the longest. The third and fourth have to be worth
    it, and those after them even more.
    """
    most = LARGEST if wide else PIECES
    enough, for_two = (ATTENDING, MULTIPROCESSORS) if longest <= SHORT else (2 * ATTENDING, 3 * ATTENDING)
    pieces = 1
    while pieces < most and 2 * pieces * LEAST_PIECE <= longest:
        if rows * kv_heads * pieces >= (for_two if pieces == 1 else enough // pieces):
            break
        pieces *= 2
    return pieces


class Form(NamedTuple):
    """Of the chain: which one is the fastest depends on the model and on how many sequences there are."""

    wide: bool = False
    """Contexts may be in more pieces."""
    parted: bool = False
    """Sequences are divided among blocks, too."""


WHOLE, WIDE, PARTED = Form(), Form(wide=True), Form(parted=True)


class Division(NamedTuple):
    """Who multiplies what."""

    each: int
    """Sequences of a part."""
    split: int
    """Blocks that divide the columns of the same outputs; what they send each other takes time, too."""

    @classmethod
    def of(cls, name: str, columns: int, outputs: int, rows: int, parted: bool) -> "Division":
        each, most = PARTS[rows][name] if parted else (rows, CLUSTER)
        split = 1
        while split < most and 2 * split <= columns // DEPTH and (parted or outputs // TILE * split < BLOCKS):
            split *= 2
        return cls(each, split)


PARTS = {
    128: {"qkv": Division(32, 2), "out": Division(32, 2), "up": Division(64, 1), "down": Division(64, 8)},
    256: {"qkv": Division(64, 2), "out": Division(32, 2), "up": Division(128, 1), "down": Division(64, 4)},
}
"""What is best where sequences are divided, by their number."""


class Shape(NamedTuple):
    """How a product is made."""

    division: Division
    tiles: int
    """Of 64 outputs."""
    stages: int

    @classmethod
    def of(cls, name: str, columns: int, outputs: int, rows: int, parted: bool) -> "Shape":
        """With as long a ring as there is room for."""
        division = Division.of(name, columns, outputs, rows, parted)
        each, stage = division.each, 2 * DEPTH * (TILE + division.each)
        blocks = outputs // TILE * division.split * -(-rows // each)
        together = min(max(MEMORY), max(min(MEMORY), -(-blocks // MULTIPROCESSORS)))
        sums = 4 * (TILE + 4) * each
        room = MEMORY[together] - 4 * each - 32 - (sums if division.split > 1 else 16)
        return cls(division, outputs // TILE, max(2, room // (stage + 16), -(-sums // stage)))

    def blocks(self, rows: int) -> int:
        return self.tiles * self.division.split * -(-rows // self.division.each)

    @property
    def shared_memory(self) -> int:
        """The ring, sums of other blocks, two gates for each stage, another, and a factor for each sequence."""
        each, split = self.division
        sums = 4 * (TILE + 4) * each if split > 1 else 16
        return self.stages * (2 * DEPTH * (TILE + each) + 16) + sums + 8 + 4 * each + 16


def shapes_of(config: ModelConfig, rows: int, parted: bool = False) -> dict[str, Shape]:
    """Of the four products of a layer."""
    _, heads, kv_heads, head_dim = config.geometry
    queries, qkv = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    sizes = {
        "qkv": (config.hidden, qkv),
        "out": (queries, config.hidden),
        "up": (config.hidden, 2 * config.intermediate),
        "down": (config.intermediate, config.hidden),
    }
    return {name: Shape.of(name, *each, rows, parted) for name, each in sizes.items()}


def macros(config: ModelConfig, page_size: int, rows: int, parted: bool = False) -> dict[str, str]:
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
        few = attention_stages(config, page_size, few=True)
        sizes |= {"MOST_STAGES": MOST_STAGES, "FEW_STAGES": few, "KEPT": attention_kept(config)}
    else:
        sizes |= {"ROWS": rows, "MANY": MANY}
        for name, shape in shapes_of(config, rows, parted).items():
            made = shape.division._asdict() | {"stages": shape.stages}
            sizes |= {f"{what}_{name}".upper(): size for what, size in made.items()}
    named = {name: str(size) for name, size in sizes.items()}
    return named | {"EPSILON": f"{config.epsilon:e}f", "SCALE": f"{head_dim**-0.5:e}f"}


def crowded(config: ModelConfig, blocks: int, pieces: int) -> bool:
    """Whether so many blocks of attention are done sooner if more of them fit on a multiprocessor, with short rings.
    Of contexts in pieces most have little to do, so there have to be more. With large heads rings are short anyway."""
    return config.geometry[3] == 64 and blocks > MULTIPROCESSORS * (2 if pieces == 1 else 5)


def attention_stages(config: ModelConfig, page_size: int, few: bool) -> int:
    """Pages whose keys and values lie in the ring together; ``few``: so that many blocks fit on a multiprocessor.

    Warps take pages in turn. The one that looks at a page has to be the one that looks at the next in its place, which
    it could not tell from the one before if it had not seen that.
    """
    in_turn = max(1, 16 * (GROUP // WARP) // page_size)
    fit = RING_OF_ATTENTION // (4 * config.geometry[3] * page_size)
    most = min(fit, LEAST_STAGES if few else MOST_STAGES)
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
        if not fits(self._model.config, self._model.dtype, self._attention.page_size, rows):
            return []
        kv_heads = self._model.config.geometry[2]
        widens = pieces_of(rows, kv_heads, longest, wide=True) > pieces_of(rows, kv_heads, longest)
        found = [WHOLE] * (rows <= SIZES[-1]) + [WIDE] * widens
        return found + [PARTED] * (rows >= PARTED_FROM)

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
