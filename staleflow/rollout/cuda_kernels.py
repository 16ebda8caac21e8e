"""Triton kernels for a step on a GPU: attention over pages, and the small steps between two matrix products.

Everything here works on shapes that do not depend on data, so that a whole step can be recorded as one CUDA graph:
one token for each sequence, or (``attend_spans``) spans of tokens that are cut into tiles. Entries are laid out as
``attention.py`` says: ``[2 * kv_heads, slots, head_dim]``, keys first, a slot being ``page * page_size + offset``.
"""

# Triton's language is not typed, a kernel's pointers are not tensors, and where it is installed its own types
# are those of the inside of a kernel.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS, STAGES = 64, 4, 3
"""Tokens of context that a program looks at together, its warps, and the loads it has under way."""
VOCABULARY_BLOCK = 2048
MOVED = 1024
"""Elements that a program of ``move`` copies."""
PROGRAMS, LONGEST = 512, 4096
"""Programs that keep a large GPU busy with attention, and the most tokens that one should have: where sequences are
few, or may be long, the context of each is split among several."""
TILE = {torch.float32: 32, torch.bfloat16: 128}
"""Queries (tokens times the heads that share a key head) that a program of ``attend_spans`` looks at together."""


@triton.jit
def _attend(
    query, entries, tables, lengths, parts, maxima, sums, out, scale, slots, width,
    heads: tl.constexpr, kv_heads: tl.constexpr, share: tl.constexpr, padded: tl.constexpr,
    size: tl.constexpr, wide: tl.constexpr, page: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head with the query heads that share it, one part of the context."""
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    chunk = tl.cdiv(tl.cdiv(length, splits), block) * block
    begin = part * chunk
    end = tl.minimum(begin + chunk, length)
    head = tl.arange(0, padded)
    place = tl.arange(0, wide)
    inside = place < size
    asked = (head < share)[:, None] & inside[None, :]
    mine = (row * heads + kv_head * share + head) * splits + part
    if begin >= end:
        tl.store(sums + mine, tl.zeros([padded], tl.float32), mask=head < share)
        tl.store(maxima + mine, tl.full([padded], float("-inf"), tl.float32), mask=head < share)
        return
    at = query + (row * heads + kv_head * share + head)[:, None] * size + place[None, :]
    q = tl.load(at, mask=asked, other=0.0)
    best = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    found = tl.zeros([padded, wide], tl.float32)
    keys = entries + kv_head.to(tl.int64) * slots * size
    values = entries + (kv_heads + kv_head).to(tl.int64) * slots * size
    for first in range(begin, end, block):
        token = first + tl.arange(0, block)
        here = token < end
        number = tl.load(tables + row * width + token // page, mask=here, other=0).to(tl.int64)
        offset = (number * page + token % page)[:, None] * size + place[None, :]
        there = here[:, None] & inside[None, :]
        k = tl.load(keys + offset, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * (scale * 1.4426950408889634)
        scores = tl.where(here[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        v = tl.load(values + offset, mask=there, other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    if splits == 1:
        at = out + (row * heads + kv_head * share + head)[:, None] * size + place[None, :]
        tl.store(at, (found / total[:, None]).to(out.dtype.element_ty), mask=asked)
    else:
        tl.store(parts + mine[:, None] * size + place[None, :], found, mask=asked)
        tl.store(maxima + mine, best, mask=head < share)
        tl.store(sums + mine, total, mask=head < share)


@triton.jit
def _combine(
    parts, maxima, sums, out, size: tl.constexpr, wide: tl.constexpr, splits: tl.constexpr, padded: tl.constexpr
):
    """Join the parts of one query head."""
    head = tl.program_id(0)
    part = tl.arange(0, padded)
    place = tl.arange(0, wide)
    inside = place < size
    there = part < splits
    best = tl.load(maxima + head * splits + part, mask=there, other=float("-inf"))
    total = tl.load(sums + head * splits + part, mask=there, other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))
    at = parts + (head * splits + part)[:, None] * size + place[None, :]
    found = tl.load(at, mask=(total > 0)[:, None] & inside[None, :], other=0.0)
    joined = tl.sum(found * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * size + place, joined.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_spans(
    query, entries, tiles, pages, out, scale, slots, most,
    heads: tl.constexpr, kv_heads: tl.constexpr, share: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr,
    size: tl.constexpr, wide: tl.constexpr, page: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Tokens of one span that follow each other, with the query heads that share a key head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles + most + tile)
    if count == 0:
        return
    first = tl.load(tiles + tile)
    start = tl.load(tiles + 2 * most + tile)
    table = pages + tl.load(tiles + 3 * most + tile)
    place = tl.arange(0, wide)
    inside = place < size
    line = tl.arange(0, tokens * padded)
    step, head = line // padded, line % padded
    at = ((first + step) * heads + kv_head * share + head)[:, None] * size + place[None, :]
    asked = ((step < count) & (head < share))[:, None] & inside[None, :]
    q = tl.load(query + at, mask=asked, other=0.0)
    best = tl.full([tokens * padded], float("-inf"), tl.float32)
    total = tl.zeros([tokens * padded], tl.float32)
    found = tl.zeros([tokens * padded, wide], tl.float32)
    keys = entries + kv_head.to(tl.int64) * slots * size
    values = entries + (kv_heads + kv_head).to(tl.int64) * slots * size
    end = start + count
    for begin in range(0, end, block):
        token = begin + tl.arange(0, block)
        here = token < end
        number = tl.load(table + token // page, mask=here, other=0).to(tl.int64)
        offset = (number * page + token % page)[:, None] * size + place[None, :]
        there = here[:, None] & inside[None, :]
        k = tl.load(keys + offset, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * (scale * 1.4426950408889634)
        scores = tl.where(token[None, :] <= (start + step)[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        v = tl.load(values + offset, mask=there, other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    tl.store(out + at, (found / total[:, None]).to(out.dtype.element_ty), mask=asked)


@triton.jit
def _rotate_and_store(
    qkv, query_norm, key_norm, cos, sin, positions, tables, query, entries, epsilon, slots, width,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, wide: tl.constexpr, page: tl.constexpr,
    normed: tl.constexpr, slotted: tl.constexpr,
):  # fmt: skip
    """One head of one token: norm, rotation, and where it belongs. Values are only stored."""
    row, head = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = 2 * half
    place = tl.arange(0, wide)
    inside = place < half
    source = qkv + (row * (heads + 2 * kv_heads) + head) * size + place
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + row)
    if slotted:
        slot = tl.load(tables + row).to(tl.int64)
    else:
        slot = tl.load(tables + row * width + position // page).to(tl.int64) * page + position % page
    kind = entries.dtype.element_ty
    if head < heads + kv_heads:
        if normed:
            asks, answers = inside & (head < heads), inside & (head >= heads)
            first = tl.load(query_norm + place, mask=asks, other=0.0)
            first += tl.load(key_norm + place, mask=answers, other=0.0)
            second = tl.load(query_norm + half + place, mask=asks, other=0.0)
            second += tl.load(key_norm + half + place, mask=answers, other=0.0)
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / size + epsilon)
            low = (low * scale).to(kind).to(tl.float32) * first.to(tl.float32)
            high = (high * scale).to(kind).to(tl.float32) * second.to(tl.float32)
        angle = position * size + place
        cosine = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sin + half + angle, mask=inside, other=0.0).to(tl.float32)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if head < heads:
        target = query + (row * heads + head) * size + place
        tl.store(target, low.to(kind), mask=inside)
        tl.store(target + half, high.to(kind), mask=inside)
    else:
        target = entries + ((head - heads).to(tl.int64) * slots + slot) * size + place
        tl.store(target, low.to(kind), mask=inside)
        tl.store(target + half, high.to(kind), mask=inside)


@triton.jit
def _add_and_norm(x, y, weight, out, epsilon, size, block: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, block)
    here = place < size
    value = tl.load(x + row * size + place, mask=here, other=0.0)
    if adds:
        value = value + tl.load(y + row * size + place, mask=here, other=0.0)
        tl.store(x + row * size + place, value, mask=here)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    normed = (wide * scale) * tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def _gate(both, out, wide, block: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a long prefill has more than 2**31 values
    place = part * block + tl.arange(0, block)
    here = place < wide
    source = both + row * 2 * wide + place
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + wide, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * wide + place, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def _vocabulary_blocks(logits, temperatures, maxima, sums, vocabulary, blocks, block: tl.constexpr):
    """The largest logit of a block of the vocabulary, and the sum of its weights relative to that."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = part * block + tl.arange(0, block)
    temperature = tl.load(temperatures + row).to(tl.float32)
    heat = tl.where(temperature == 0, 1.0, temperature)
    at = logits + row.to(tl.int64) * vocabulary + place
    value = tl.load(at, mask=place < vocabulary, other=float("-inf")).to(tl.float32) / heat
    best = tl.max(value, 0)
    tl.store(maxima + row * blocks + part, best)
    tl.store(sums + row * blocks + part, tl.sum(tl.exp(value - best), 0))


@triton.jit
def _pick(
    logits, temperatures, uniforms, maxima, sums, tokens, logprobs, vocabulary, blocks,
    block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulated distribution exceeds the row's uniform number; the likeliest if greedy."""
    row = tl.program_id(0)
    part = tl.arange(0, padded)
    there = part < blocks
    highest = tl.load(maxima + row * blocks + part, mask=there, other=float("-inf"))
    best = tl.max(highest, 0)
    mass = tl.load(sums + row * blocks + part, mask=there, other=0.0) * tl.exp(highest - best)
    upto = tl.cumsum(mass.to(tl.float64), 0)
    total = tl.max(upto, 0)
    target = tl.load(uniforms + row) * total
    heat = tl.load(temperatures + row).to(tl.float32)
    greedy = heat == 0
    drawn = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), blocks - 1)
    likeliest = tl.min(tl.where(highest == best, part, padded), 0)
    hit = tl.minimum(tl.where(greedy, likeliest, drawn), blocks - 1)
    before = tl.sum(tl.where(part == hit, upto - mass, 0.0), 0)
    place = hit * block + tl.arange(0, block)
    heat = tl.where(greedy, 1.0, heat)
    at = logits + row.to(tl.int64) * vocabulary + place
    value = tl.load(at, mask=place < vocabulary, other=float("-inf")).to(tl.float32) / heat
    weight = tl.exp(value - best)
    inner = tl.cumsum(weight, 0)
    # The block's sum and its running sum are rounded differently: never step past its last possible token.
    rest = tl.minimum((target - before).to(tl.float32), tl.max(inner, 0) * (1 - 1e-7))
    lane = tl.arange(0, block)
    inside = tl.sum((inner <= rest).to(tl.int32), 0)
    top = tl.min(tl.where(value == tl.max(value, 0), lane, block), 0)
    chosen = tl.minimum(tl.where(greedy, top, inside), block - 1)
    token = tl.minimum(hit * block + chosen, vocabulary - 1)
    logit = tl.sum(tl.where(lane == token - hit * block, value, 0.0), 0)
    tl.store(tokens + row, token)
    # Of the sum and not of the total: what is no number is passed over by a maximum, and has to show.
    whole = tl.sum(mass.to(tl.float64), 0)
    tl.store(logprobs + row, logit - best - tl.log(whole.to(tl.float32)))


@triton.jit(do_not_specialize=["firsts", "seconds"])
def _move(first, to_first, firsts, second, to_second, seconds, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(to_first + at, tl.load(first + at, mask=at < firsts), mask=at < firsts)
    tl.store(to_second + at, tl.load(second + at, mask=at < seconds), mask=at < seconds)


def splits_for(sequences: int, kv_heads: int, tokens: int) -> int:
    """Into how many parts to cut each context of at most ``tokens`` tokens."""
    splits = 1
    while splits < 32 and (sequences * kv_heads * splits < PROGRAMS or tokens > splits * LONGEST):
        splits *= 2
    return splits


def attend(query: Tensor, entries: Tensor, tables: Tensor, lengths: Tensor, page: int, scale: float) -> Tensor:
    """``query [rows, heads, head_dim]`` over the pages of each row. Returns ``[rows, heads * head_dim]``."""
    rows, heads, size = query.shape
    kv_heads, share = entries.shape[0] // 2, heads // (entries.shape[0] // 2)
    splits = splits_for(rows, kv_heads, tables.shape[1] * page)
    out = torch.empty(rows, heads * size, dtype=query.dtype, device=query.device)
    parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query.device)
    maxima, sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    _attend[(rows, kv_heads, splits)](
        query, entries, tables, lengths, parts, maxima, sums, out, scale, entries.shape[1], tables.shape[1],
        heads=heads, kv_heads=kv_heads, share=share, padded=max(16, triton.next_power_of_2(share)),
        size=size, wide=max(16, triton.next_power_of_2(size)), page=page, block=BLOCK, splits=splits,
        num_warps=WARPS, num_stages=STAGES,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        wide = triton.next_power_of_2(size)
        _combine[(rows * heads,)](
            parts, maxima, sums, out, size=size, wide=wide, splits=splits, padded=padded, num_warps=1
        )
    return out


def tile_tokens(heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    """Tokens of a tile of ``attend_spans``."""
    return max(1, TILE[dtype] // triton.next_power_of_2(heads // kv_heads))


def attend_spans(query: Tensor, entries: Tensor, tiles: Tensor, pages: Tensor, page: int, scale: float) -> Tensor:
    """``query [tokens, heads, head_dim]`` in tiles, each token over its context up to itself.

    ``tiles [4, most]``: of each the place of its first token, its tokens (at most ``tile_tokens``; 0: there is none),
    how many tokens of the context are before them, and where in ``pages`` the pages of the context begin. Tokens in no
    tile get any values. Returns ``[tokens, heads * head_dim]``.
    """
    count, heads, size = query.shape
    kv_heads = entries.shape[0] // 2
    share, most = heads // kv_heads, tiles.shape[1]
    out = torch.empty(count, heads * size, dtype=query.dtype, device=query.device)
    wide, exact = max(16, triton.next_power_of_2(size)), query.dtype == torch.float32
    _attend_spans[(most, kv_heads)](
        query, entries, tiles, pages, out, scale, entries.shape[1], most,
        heads=heads, kv_heads=kv_heads, share=share, padded=triton.next_power_of_2(share),
        tokens=tile_tokens(heads, kv_heads, query.dtype), size=size, wide=wide, page=page, block=BLOCK,
        num_warps=8 if wide > 64 else 4, num_stages=1 if exact else 2, precision="ieee" if exact else "tf32",
    )  # fmt: skip
    return out


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    turns: tuple[Tensor, Tensor],
    positions: Tensor,
    tables: Tensor,
    entries: Tensor,
    heads: int,
    page: int,
    epsilon: float,
) -> Tensor:
    """Put the keys and values of ``qkv [rows, heads + 2 * kv_heads, head_dim]`` in their pages; return the queries.

    ``tables``: the pages of each row, or, of one dimension, the slot of each row.
    """
    rows, every, size = qkv.shape
    query = torch.empty(rows, heads, size, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = norms
    normed = query_norm is not None
    _rotate_and_store[(rows, every)](
        qkv, query_norm if normed else qkv, key_norm if normed else qkv, *turns, positions, tables, query, entries,
        epsilon, entries.shape[1], tables.shape[-1], heads=heads, kv_heads=(every - heads) // 2, half=size // 2,
        wide=triton.next_power_of_2(size // 2), page=page, normed=normed, slotted=tables.dim() == 1, num_warps=1,
    )  # fmt: skip
    return query


def add_and_norm(x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """``x += y`` in place, and its norm."""
    rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](x, x if y is None else y, weight, out, epsilon, size, block=block, adds=y is not None)
    return out


def gate(both: Tensor) -> Tensor:
    """``silu(first half) * second half``."""
    rows, wide = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, wide, dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(wide))
    _gate[(rows, triton.cdiv(wide, block))](both, out, wide, block=block)
    return out


def pick(logits: Tensor, temperatures: Tensor, uniforms: Tensor, tokens: Tensor) -> Tensor:
    """Draw ``tokens``, one for each row of ``logits [rows, vocabulary]``. Returns their log-probabilities."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    maxima, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    _vocabulary_blocks[(rows, blocks)](
        logits, temperatures, maxima, sums, vocabulary, blocks, block=VOCABULARY_BLOCK, num_warps=4
    )
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(blocks)
    _pick[(rows,)](
        logits, temperatures, uniforms, maxima, sums, tokens, logprobs, vocabulary, blocks,
        block=VOCABULARY_BLOCK, padded=padded, num_warps=4,
    )  # fmt: skip
    return logprobs


def move(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Copy one array into another of its type, twice; each may be pinned memory of the host.

    By a kernel and not by the copy engine: where several processes have work for a GPU, one whose kernels wait for a
    copy loses its turn, and the next step waits until the others have had theirs.
    """
    sizes = first[0].numel(), second[0].numel()
    _move[(triton.cdiv(max(sizes), MOVED),)](*first, sizes[0], *second, sizes[1], block=MOVED)
