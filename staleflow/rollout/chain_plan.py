"""How the work of a step is divided among the blocks of the chain (``chain.py``): pure numbers, for a model and a count
of sequences. The constants are those that were fastest on an H200 (``bench/gpu/stages.py --changes``). ::

    fits(config, torch.bfloat16, page_size=32, rows=96)
    shapes_of(config, rows_of_kernel(96, parted=True), parted=True)["down"].blocks(96)
    pieces_of(rows=96, kv_heads=2, longest=4096)
"""

from typing import NamedTuple

import torch

from staleflow.rollout.model_folder import ModelConfig

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


def forms_of(rows: int, kv_heads: int, longest: int) -> list[Form]:
    """Those that may be the fastest for so many sequences of up to so many tokens."""
    widens = pieces_of(rows, kv_heads, longest, wide=True) > pieces_of(rows, kv_heads, longest)
    return [WHOLE] * (rows <= SIZES[-1]) + [WIDE] * widens + [PARTED] * (rows >= PARTED_FROM)


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
