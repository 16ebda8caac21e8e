"""Decoding on a GPU: one CUDA graph for a whole step, launched before the tokens of the step before it are looked at.

There are four ways to decode: plainly (``decode``, everywhere), the same with the attention of the chain, up to 256
rows by a chain of kernels that overlap (``chain.py``), and up to 32 by one persistent kernel (``few.py``). When a graph
is recorded, all that can are run on its first step, and the fastest is taken of those whose logits are the same up to
rounding.

A graph is recorded once for each size of batch (rounded up) and width of page tables, before an instance is ready if
its longest sequence is known, and then replayed: a step costs the CPU one launch. Rows that are only there to fill the
batch up write to the null page. The last tokens stay on the device, so the next step can be launched before anyone has
read them, with all its rows or some. ::

    graphs = DecodeGraphs(model, attention)
    flight = graphs.launch(tokens, positions, tables, uniforms, temperatures)
    following = graphs.launch(drawn_in(places), positions + 1, tables, uniforms, temperatures)
    tokens, logprobs = flight.collect()
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from staleflow.rollout import cuda_kernels as kernels
from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.chain import Chain
from staleflow.rollout.few import FewRows
from staleflow.rollout.model import Layer, Model
from staleflow.rollout.nvrtc import supported
from staleflow.rollout.rows import Ints
from staleflow.rollout.ways import ATTENDED, CHAINED, FEW, PLAIN, Ways, spread

Floats = npt.NDArray[np.float64]
TRIALS, DIFFERENCE = 8, 0.15
"""Replays that are timed; the distance of logits, relative to their size, above which one of two ways is wrong.
Rounding to bfloat16 in another order makes 0.03 to 0.05 on 24 to 28 layers with random weights."""


Attend = Callable[[Layer, Tensor, Tensor], Tensor]
"""What attention makes of queries, keys and values that are neither normed nor rotated, and of a layer's entries, to
which it adds these keys and values."""


def layers(model: Model, attention: PagedAttention, tokens: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """The residual before the last addition and what is to be added."""
    epsilon = model.config.epsilon
    x = functional.embedding(tokens, model.embedding)
    y: Tensor | None = None
    for layer, entries in zip(model.layers, attention.entries, strict=True):
        normed = kernels.add_and_norm(x, y, layer.attention_norm, epsilon)
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        y = functional.linear(attend(layer, qkv, entries), layer.out, layer.out_bias)
        normed = kernels.add_and_norm(x, y, layer.mlp_norm, epsilon)
        gated = kernels.gate(functional.linear(normed, layer.gate_up, layer.gate_up_bias))
        y = functional.linear(gated, layer.down, layer.down_bias)
    assert y is not None
    return x, y


def stored(
    model: Model, layer: Layer, qkv: Tensor, positions: Tensor, where: Tensor, entries: Tensor, page: int
) -> Tensor:
    """Queries, normed and rotated; keys and values are put in their pages. ``where``: see ``rotate_and_store``."""
    _, heads, kv_heads, head_dim = model.config.geometry
    qkv, norms = qkv.view(-1, heads + 2 * kv_heads, head_dim), (layer.query_norm, layer.key_norm)
    return kernels.rotate_and_store(
        qkv, norms, model.turns, positions, where, entries, heads, page, model.config.epsilon
    )


def logits_of(model: Model, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Of what ``layers`` returns; ``x`` is overwritten."""
    return torch.mm(kernels.add_and_norm(x, y, model.norm, model.config.epsilon), model.head.t(), out=out)


def decode(
    model: Model,
    attention: PagedAttention,
    tokens: Tensor,
    positions: Tensor,
    tables: Tensor,
    out: Tensor | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """Logits of one token of each row. ``chain``: with its attention."""
    lengths, page = positions + 1, attention.page_size

    def attend(layer: Layer, qkv: Tensor, entries: Tensor) -> Tensor:
        if chain is not None:
            return chain.attend(layer, entries, qkv, positions, tables)
        query = stored(model, layer, qkv, positions, tables, entries, page)
        return kernels.attend(query, entries, tables, lengths, page, attention.scale)

    return logits_of(model, *layers(model, attention, tokens, attend), out=out)


class Flight(NamedTuple):
    """A step on its way."""

    rows: int
    logits: Tensor
    """Good until the next launch."""
    tokens: Tensor
    logprobs: Tensor
    done: torch.cuda.Event

    def collect(self) -> tuple[list[int], list[float]]:
        """Wait for it. Tokens and log-probabilities; the latter are not finite where the logits were not."""
        self.done.synchronize()
        return self.tokens[: self.rows].tolist(), self.logprobs[: self.rows].tolist()


class Staging:
    """Pinned memory for what goes to the device and what comes back, both by kernels (``kernels.move``)."""

    def __init__(self, ints: int, rows: int) -> None:
        self.ints = torch.zeros(ints, dtype=torch.int32, pin_memory=True)
        self.floats = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=True)
        self._tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=True)
        self._logprobs = torch.zeros(rows, dtype=torch.float32, pin_memory=True)
        self.free = torch.cuda.Event()

    def bring_in(self, ints: Tensor, floats: Tensor) -> None:
        """Fill these of the device with the first of what is staged."""
        kernels.move((self.ints[: len(ints)], ints), (self.floats[: len(floats)], floats))

    def bring_back(self, count: int, logits: Tensor, tokens: Tensor, logprobs: Tensor) -> Flight:
        """What the first ``count`` rows drew, when they have."""
        kernels.move((tokens, self._tokens), (logprobs, self._logprobs))
        self.free.record()
        return Flight(count, logits[:count], self._tokens, self._logprobs, self.free)


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    way: str = PLAIN


def captured(call: Callable[[], tuple[Tensor, ...]], pool: Any) -> Recorded:
    """A graph of what the call does. It is run once before: kernels are compiled, libraries make their work space."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        outputs = call()
    return Recorded(graph, outputs)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs: libraries keep 32 MiB of work space for each stream that they were called on."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    def __init__(
        self, model: Model, attention: PagedAttention, most_rows: int, most_pages: int, persistent: bool = True
    ) -> None:
        """``persistent``: try the kernels for few rows, too."""
        self._model = model
        self._attention = attention
        own = persistent and supported(attention.device)
        self._few = FewRows(model, attention) if own else None
        self._chain = Chain(model, attention) if own else None
        self._ways = Ways(self._few, self._chain)
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        device = attention.device
        rows, width = rows_for(most_rows), width_for(most_pages)
        self._ints = torch.zeros(rows * (2 + width), dtype=torch.int32, device=device)
        self._floats = torch.zeros(2 * rows, dtype=torch.float64, device=device)
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._out = torch.empty(rows, model.config.vocabulary, dtype=model.dtype, device=device)
        """Logits of the last step. A hundred graphs with logits of their own would keep gigabytes."""
        self._staged = [Staging(self._ints.numel(), rows) for _ in range(2)]
        """One is filled while the device may still read the other."""
        self._turn = 0

    def prepare(self, longest: int = 1) -> None:
        """Record all sizes of batches with contexts up to so many tokens. Only the null page is written; it is cleared
        before, because a prefill leaves anything there, also what is no number and cannot be compared."""
        self._attention.clear_pages([self._attention.null_page])
        page, pages, most = self._attention.page_size, self._attention.null_page, len(self._last)
        calls = [call for own in (self._chain, self._few) if own is not None for call in own.compilations(most)]
        with suppress(OSError, RuntimeError), ThreadPoolExecutor() as pool:  # told when a graph is recorded without it
            list(pool.map(lambda call: call(), calls))
        narrow, wide = width_for(1), width_for(-(-longest // page))
        between = [narrow << n for n in range(1, wide.bit_length() - narrow.bit_length())]
        for rows in sorted({rows_for(count) for count in range(1, most + 1)}):
            for width in dict.fromkeys((narrow, wide, *between)):  # what is best for both ends is so between them
                last = min(width * page, 2 * pages * page // rows, len(self._model.turns[0])) - 1
                # logits are compared on contexts that are alike: rows write to the same page
                self._fill(rows, width, np.full(rows, last // 2))
                self._record(rows, width, partial(self._fill, rows, width, spread(rows, last)))

    def _fill(self, rows: int, width: int, positions: Ints) -> None:
        """Inputs of a step that writes to the null page alone."""
        page, pages = self._attention.page_size, self._attention.null_page
        self._ints.zero_()
        self._ints[rows : 2 * rows] = torch.from_numpy(positions)
        tables = self._ints[2 * rows : 2 * rows + rows * width]
        torch.arange(len(tables), out=tables).remainder_(pages)
        tables.view(rows, width).scatter_(1, self._ints[rows : 2 * rows].long()[:, None] // page, pages)

    def launch(
        self,
        tokens: Ints,
        positions: Ints,
        tables: Ints,
        uniforms: Floats,
        temperatures: npt.NDArray[np.float32],
    ) -> Flight:
        """Start a step. Tokens made by ``rows.drawn_in`` are those that the last step drew."""
        count = len(positions)
        rows, width = rows_for(count), width_for(tables.shape[1])
        staging = self._staged[self._turn]
        self._turn = 1 - self._turn
        staging.free.synchronize()  # the step before the last has read it
        ints, floats = staging.ints.numpy(), staging.floats.numpy()
        ints[:count] = tokens
        ints[count:rows] = 0
        ints[rows : rows + count] = positions
        ints[rows + count : 2 * rows] = 0
        pages = ints[2 * rows : 2 * rows + rows * width].reshape(rows, width)
        pages[:count, : tables.shape[1]] = tables
        pages[count:] = self._attention.null_page
        floats[:count], floats[rows : rows + count] = uniforms, temperatures
        floats[count:rows] = floats[rows + count : 2 * rows] = 0
        staging.bring_in(self._ints[: rows * (2 + width)], self._floats[: 2 * rows])
        recorded = self._recorded.get((rows, width)) or self._record(rows, width)
        recorded.graph.replay()
        logits, drawn, logprobs = recorded.outputs
        return staging.bring_back(count, logits, drawn, logprobs)

    def _record(self, rows: int, width: int, lengthen: Callable[[], None] = lambda: None) -> Recorded:
        """The step as a graph, decoded in the fastest way. Its inputs are there already: the ways are tried on them,
        unless one was the fastest with contexts of two other widths. ``lengthen``: puts those there on which they are
        timed."""
        plain = self._capture(rows, width, PLAIN)
        known = [recorded.way for (size, _), recorded in self._recorded.items() if size == rows]
        settled = known[0] if len(known) > 1 and len(set(known)) == 1 else None
        ways = [*self._others(rows, width, plain, settled)]
        if settled is None or not ways:
            ways.append(plain)
        lengthen()
        best = ways[0] if len(ways) == 1 else min(ways, key=self._milliseconds)
        self._recorded[rows, width] = best
        return best

    def _others(self, rows: int, width: int, plain: Recorded, settled: str | None) -> Iterator[Recorded]:
        """The step decoded in the other ways that are worth it, if they give the logits of the plain one."""
        expected: Tensor | None = None
        for way in self._ways.worth(rows, width * self._attention.page_size, settled):
            expected = self._logits(plain) if expected is None else expected
            if not torch.isfinite(expected).all():
                return
            kind = "few.cu" if way in FEW else "chain.cu"
            try:
                other = self._capture(rows, width, way)
            except (OSError, RuntimeError) as error:
                self._ways.failed(way)
                warnings.warn(f"{kind} cannot be used, decoding without it: {error}", stacklevel=2)
                continue
            if (self._logits(other) - expected).norm() <= DIFFERENCE * expected.norm():
                yield other
            else:
                self._ways.failed(way)
                warnings.warn(f"{kind} is wrong on this GPU ({way}), decoding without it", stacklevel=2)

    def _capture(self, rows: int, width: int, way: str) -> Recorded:
        before = self._last.clone()
        try:
            return captured(lambda: self._step(rows, width, way), self._pool)._replace(way=way)
        finally:
            self._last.copy_(before)

    def _logits(self, recorded: Recorded) -> Tensor:
        last = self._last.clone()
        recorded.graph.replay()
        self._last.copy_(last)
        return recorded.outputs[0].float()

    def _milliseconds(self, recorded: Recorded) -> float:
        """The shortest of several: another process on the same GPU makes some of them longer."""
        last, took = self._last.clone(), list[float]()
        for _ in range(TRIALS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            recorded.graph.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
        self._last.copy_(last)
        return min(took)

    def _step(self, rows: int, width: int, way: str) -> tuple[Tensor, Tensor, Tensor]:
        given, positions = self._ints[:rows], self._ints[rows : 2 * rows]
        tables = self._ints[2 * rows : 2 * rows + rows * width].view(rows, width)
        last = self._last[:rows]
        if way in CHAINED and self._chain is not None:
            logits = self._chain.decode(given, self._last, positions, tables, CHAINED[way], self._out[:rows])
        elif way in FEW and self._few is not None:
            logits = self._few.decode(given, self._last, positions, tables, polled=way == FEW[0])
        else:
            tokens = torch.where(given < 0, self._last[(-1 - given).clamp_min(0)], given.long())
            chain = self._chain if way == ATTENDED else None
            logits = decode(self._model, self._attention, tokens, positions, tables, self._out[:rows], chain)
        uniforms, temperatures = self._floats[:rows], self._floats[rows : 2 * rows]
        logprobs = kernels.pick(logits, temperatures, uniforms, last)
        return logits, last, logprobs


def rows_for(count: int) -> int:
    """Rows of the graph that serves ``count``: powers of two, and from 32 on four sizes between two of them."""
    if count <= 32:
        return 1 << max(0, count - 1).bit_length()
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step


def width_for(pages: int) -> int:
    """Width of the page tables of the graph that serves this many pages for each sequence."""
    width = 16
    while width < pages:
        width *= 2
    return width
