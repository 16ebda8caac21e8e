"""Attention over paged KV memory on the CPU: the only part of the built-in engine that knows how entries are stored.

Entries of a layer lie head by head: ``[2 * kv_heads, pages * page_size, head_dim]``, keys first. Decoding treats every
page as one item of a batched matrix product, with the query of the sequence that holds it, and then joins a sequence's
pages: the largest score, the sum and the weighted values are each a reduction over its pages. So nothing is padded to
the longest sequence, and where the pages of the decoding sequences lie close together they are read where they are,
without a copy. Pages that several sequences share, and pages that lie far apart, are gathered first.

Entries that do not count have weight zero, but zero times a NaN is a NaN: the pages of a failed sequence are cleared
before another gets them. ::

    attention = PagedAttention(geometry, pages=128, page_size=16, dtype=torch.float32)
    attention.begin(layout)
    out_TE = attention.attend(layer, q_THD, kv_TKD)
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from staleflow.rollout.rows import Ints


class Geometry(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


class PrefillSpan(NamedTuple):
    """Tokens of one sequence among the step's tokens: ``first`` is their place there, ``start`` in the sequence."""

    first: int
    start: int
    length: int
    pages: list[int]


class Layout(NamedTuple):
    """A step's tokens: first one token of each decoding sequence, longest first, then the spans to prefill."""

    slots: Ints
    """Where each token's entries go: page * page_size + offset."""
    tables: Ints
    """The pages of the decoding sequences; filled up with the null page."""
    lengths: Ints
    """Their tokens, the new one included."""
    prefill: list[PrefillSpan]


class Attention(Protocol):
    """What the model needs. One implementation per kind of device."""

    null_page: int

    def begin(self, layout: Layout) -> None:
        """A new step: do once what all layers share."""
        ...

    def attend(self, layer: int, query: Tensor, entries: Tensor) -> Tensor:
        """Store ``entries [tokens, 2 * kv_heads, head_dim]``, then attend with ``query [tokens, heads, head_dim]``.

        Returns ``[tokens, heads * head_dim]``.
        """
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers, reading all before writing any."""
        ...

    def clear_pages(self, pages: list[int]) -> None: ...


SMALL = 2 << 20
"""Bytes of entries up to which one padded product takes less time than the several steps over separate pages."""


class Pages(NamedTuple):
    """The pages that a step decodes over, as items of a batch: a range read in place, then gathered ones."""

    begin: int
    end: int
    """The range [begin, end) of pages."""
    gathered: Ints
    owner: Ints
    """Of each item: the place of the sequence it serves. Pages in the range that serve none have any."""
    items: Ints
    """The items of each sequence, one sequence after the other."""


def choose(tables: Ints, widths: Ints) -> Pages:
    """Read in place or gather, whichever touches less memory: gathering a page costs about as much as using it."""
    held = np.arange(tables.shape[1]) < widths[:, None]
    pages = tables[held]
    owner = np.repeat(np.arange(len(widths)), widths)
    begin, end = int(pages.min()), int(pages.max()) + 1
    first = np.zeros(end - begin, np.int64)
    first[pages[::-1] - begin] = owner[::-1]
    again = first[pages - begin] != owner
    copies = int(again.sum())
    if end - begin + 2 * copies >= 2 * len(pages):
        return Pages(0, 0, pages, owner, np.arange(len(pages)))
    items = pages - begin
    items[again] = end - begin + np.arange(copies)
    return Pages(begin, end, pages[again], np.concatenate((first, owner[again])), items)


class _Step(NamedTuple):
    """What all layers of a step share in decoding. Items and sequences are counted head by head."""

    sequences: int
    begin: int
    end: int
    gathered: Tensor
    owner: Tensor
    items: Tensor
    offsets: Tensor
    mask: Tensor


class _Few(NamedTuple):
    """The same for few sequences of similar length: their pages, gathered and padded to the longest, and the mask."""

    sequences: int
    gathered: Tensor
    mask: Tensor


class PagedAttention:
    def __init__(
        self,
        geometry: Geometry,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.null_page = pages
        self.scale = geometry.head_dim**-0.5
        _, _, kv_heads, head_dim = geometry
        shape = (2 * kv_heads, (pages + 1) * page_size, head_dim)
        self.entries = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(geometry.layers)]
        self._by_page = [layer.view(2 * kv_heads, pages + 1, page_size * head_dim) for layer in self.entries]
        self._slots = torch.empty(0, dtype=torch.int64)
        self._decode: _Step | _Few | None = None
        self._prefill: list[tuple[PrefillSpan, Tensor | None, Tensor | None]] = []

    @property
    def device(self) -> torch.device:
        return self.entries[0].device

    def begin(self, layout: Layout) -> None:
        self._slots = self._tensor(layout.slots)
        self._decode = self._decoding(layout) if len(layout.lengths) else None
        self._prefill = [(span, *self._context(span)) for span in layout.prefill]

    def attend(self, layer: int, query: Tensor, entries: Tensor) -> Tensor:
        self.entries[layer].index_copy_(1, self._slots, entries.transpose(0, 1))
        step = self._decode
        if step is not None and not self._prefill:
            return self._attend_decoding(layer, step, query)
        out = torch.empty_like(query)
        if step is not None:
            first = out[: step.sequences]
            first.copy_(self._attend_decoding(layer, step, query[: step.sequences]).view_as(first))
        for span, mask, index in self._prefill:
            self._prefill_span(self._by_page[layer], span, mask, index, query, entries, out)
        return out.view(len(query), -1)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(pairs, device=self.device).unbind(1)
        for layer in self._by_page:
            layer.index_copy_(1, target, layer.index_select(1, source))

    def clear_pages(self, pages: list[int]) -> None:
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for layer in self._by_page:
            layer.index_fill_(1, index, 0.0)

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _decoding(self, layout: Layout) -> _Step | _Few:
        kv_heads = self.geometry.kv_heads
        widths = -(-layout.lengths // self.page_size)
        if len(widths) * widths[0] * self._by_page[0][:, 0].nbytes <= SMALL:
            return self._few(layout, int(widths[0]))
        begin, end, gathered, owner, items = choose(layout.tables, widths)
        ends = np.cumsum(widths)
        mask = np.zeros((len(owner), self.page_size), np.float32)
        filled = layout.lengths - (widths - 1) * self.page_size
        mask[items[ends - 1]] = np.where(np.arange(self.page_size) < filled[:, None], 0, -np.inf)
        head = np.arange(kv_heads)[:, None]
        return _Step(
            sequences=len(widths),
            begin=begin,
            end=end,
            gathered=self._tensor(gathered),
            owner=self._tensor((head * len(widths) + owner).reshape(-1)),
            items=self._tensor((head * len(owner) + items).reshape(-1)),
            offsets=self._tensor((head * len(items) + ends - widths).reshape(-1)),
            mask=self._tensor(mask[:, None]).repeat(kv_heads, 1, 1),
        )

    def _few(self, layout: Layout, width: int) -> _Few:
        kv_heads, share = self.geometry.kv_heads, self.geometry.heads // self.geometry.kv_heads
        visible = np.arange(width * self.page_size) < layout.lengths[:, None]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        pages = np.ascontiguousarray(layout.tables[:, :width]).reshape(-1)
        return _Few(len(visible), self._tensor(pages), self._tensor(mask).repeat(kv_heads, share, 1))

    def _attend_decoding(self, layer: int, step: _Step | _Few, query: Tensor) -> Tensor:
        """Of ``query [sequences, heads, head_dim]``; the result is ``[sequences, heads * head_dim]``."""
        _, heads, kv_heads, head_dim = self.geometry
        share = heads // kv_heads
        by_head = query.reshape(-1, kv_heads, share * head_dim).transpose(0, 1).reshape(-1, share, head_dim)
        if isinstance(step, _Few):
            found = self._attend_few(layer, step, by_head)
        else:
            found = self._attend_pages(layer, step, by_head)
        found = found.view(kv_heads, -1, share * head_dim).transpose(0, 1)
        return found.reshape(-1, heads * head_dim).to(query.dtype)

    def _attend_few(self, layer: int, step: _Few, query: Tensor) -> Tensor:
        _, _, kv_heads, head_dim = self.geometry
        copied = self._by_page[layer].index_select(1, step.gathered)
        keys, values = copied.view(2, kv_heads * step.sequences, -1, head_dim)
        scores = torch.baddbmm(step.mask, query.float(), keys.float().transpose(1, 2), alpha=self.scale)
        return torch.bmm(scores.softmax(-1), values.float())

    def _attend_pages(self, layer: int, step: _Step, query: Tensor) -> Tensor:
        share, head_dim = query.shape[1:]
        batch = query.view(len(query), -1).index_select(0, step.owner).view(-1, share, head_dim)
        parts = self._parts(layer, step)
        scores = batch.new_empty(len(batch), share, self.page_size, dtype=torch.float32)
        for here, keys, _ in parts:
            if keys.dtype == torch.float32:
                torch.baddbmm(step.mask[here], batch[here], keys.transpose(1, 2), alpha=self.scale, out=scores[here])
            else:
                products = torch.bmm(batch[here], keys.transpose(1, 2)).float()
                torch.add(step.mask[here], products, alpha=self.scale, out=scores[here])
        # Softmax over all pages of a sequence: its largest score first, so that the exponentials stay in range.
        peaks = _join(scores.amax(-1), step, MAX)
        weights = scores.sub_(peaks.index_select(0, step.owner)[:, :, None]).exp_()
        sums = _join(weights.sum(-1), step, SUM)
        found = batch.new_empty(len(batch), share, head_dim, dtype=torch.float32)
        for here, _, values in parts:
            if values.dtype == torch.float32:
                torch.bmm(weights[here], values, out=found[here])
            else:
                found[here] = torch.bmm(weights[here].to(values.dtype), values)
        return _join(found.view(len(batch), -1), step, SUM).view(-1, share, head_dim).div_(sums[:, :, None])

    def _parts(self, layer: int, step: _Step) -> list[tuple[slice, Tensor, Tensor]]:
        """Which items of the batch go with which keys and values ``[items, page_size, head_dim]``."""
        _, _, kv_heads, head_dim = self.geometry
        form = (-1, self.page_size, head_dim)
        pages = self._by_page[layer]
        copied = pages.index_select(1, step.gathered) if len(step.gathered) else None
        if step.begin == step.end and copied is not None:
            return [(slice(None), copied[:kv_heads].view(form), copied[kv_heads:].view(form))]
        # In place, the pages of two heads do not follow each other: one product for each head.
        inplace, items = step.end - step.begin, len(step.owner) // kv_heads
        parts: list[tuple[slice, Tensor, Tensor]] = []
        for head in range(kv_heads):
            first = head * items
            keys, values = (pages[at, step.begin : step.end].view(form) for at in (head, kv_heads + head))
            parts.append((slice(first, first + inplace), keys, values))
            if copied is not None:
                both = copied[head].view(form), copied[kv_heads + head].view(form)
                parts.append((slice(first + inplace, first + items), *both))
        return parts

    def _context(self, span: PrefillSpan) -> tuple[Tensor | None, Tensor | None]:
        """Mask and pages of a span with something before it; one at the beginning needs neither."""
        if not span.start:
            return None, None
        tokens = span.start + span.length
        position = torch.arange(span.start, tokens)
        mask = torch.arange(tokens) <= position[:, None]
        pages = torch.tensor(span.pages[: -(-tokens // self.page_size)])
        return mask.to(self.device), pages.to(self.device)

    def _prefill_span(
        self,
        pages: Tensor,
        span: PrefillSpan,
        mask: Tensor | None,
        index: Tensor | None,
        query: Tensor,
        entries: Tensor,
        out: Tensor,
    ) -> None:
        _, _, kv_heads, head_dim = self.geometry
        here = slice(span.first, span.first + span.length)
        if index is None:
            known = entries[here].transpose(0, 1)
        else:
            known = pages.index_select(1, index).view(2 * kv_heads, -1, head_dim)[:, : span.start + span.length]
        found = functional.scaled_dot_product_attention(
            query[here].transpose(0, 1)[None],
            known[None, :kv_heads],
            known[None, kv_heads:],
            attn_mask=mask,
            is_causal=mask is None and span.length > 1,
            scale=self.scale,
            enable_gqa=True,
        )
        out[here] = found[0].transpose(0, 1)


SUM, MAX = 0, 2
"""Modes of ``embedding_bag``."""


def _join(items: Tensor, step: _Step, mode: int) -> Tensor:
    """Reduce the items of each sequence to one. An embedding bag does just that, in one call and without padding."""
    return torch.embedding_bag(items, step.items, step.offsets, mode=mode)[0]
