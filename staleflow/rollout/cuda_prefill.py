"""Steps with prefill on a GPU: spans of any lengths in one pass, as one CUDA graph where launches would take longest.

The tokens of a step lie one behind the other, one of each sequence that decodes among them, and a kernel attends over
the pages of all. Graphs are recorded for a few numbers of tokens (``tiles.py``): small ones at the start, larger ones
when they are first needed. Those save little time on a GPU of one's own; but where others use it, too, a process loses
its turn whenever it has nothing queued. ::

    steps = PrefillSteps(model, attention, most_rows=256, most_tokens=8192, most_pages=512)
    flight = steps.launch(tokens, Spans.of(starts, lengths, tables, page), wanted, uniforms, temperatures)
    tokens, logprobs = flight.collect()
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from staleflow.rollout import cuda_kernels as kernels
from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.cuda import Flight, Floats, Recorded, Staging, captured, layers, logits_of, stored
from staleflow.rollout.model import Layer, Model
from staleflow.rollout.rows import Ints
from staleflow.rollout.tiles import GRAPHED, Spans, prepared_for, tiled, tiles_for, tokens_for


class PrefillSteps:
    def __init__(
        self, model: Model, attention: PagedAttention, most_rows: int, most_tokens: int, most_pages: int
    ) -> None:
        """``most_tokens`` of a step, those that decode included."""
        self._model = model
        self._attention = attention
        self._rows = most_rows
        _, heads, kv_heads, _ = model.config.geometry
        self._tile = kernels.tile_tokens(heads, kv_heads, model.dtype)
        self._recorded: dict[int, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._most = most = tokens_for(most_tokens)
        room = 3 * most + 4 * self._tiles_for(most) + most_rows * most_pages + most_rows
        self._ints = torch.zeros(room, dtype=torch.int32, device=attention.device)
        self._floats = torch.zeros(2 * most_rows, dtype=torch.float64, device=attention.device)
        self._staging = Staging(room, most_rows)
        """One is enough: a step with prefill is waited for before the next is launched."""

    def prepare(self) -> None:
        """Record the graphs of small steps. Only the null page is written."""
        for size in prepared_for(self._most):
            self._ints.zero_()
            self._ints[2 * size : 3 * size] = self._attention.null_page * self._attention.page_size
            self._record(size)

    def launch(
        self,
        tokens: Ints,
        spans: Spans,
        wanted: Ints,
        uniforms: Floats,
        temperatures: npt.NDArray[np.float32],
    ) -> Flight:
        """Start a step that draws from the ``wanted`` ones of the tokens' places."""
        size, rows = tokens_for(len(tokens)), len(wanted)
        self._staging.free.synchronize()
        wanted_at = self._fill(size, tokens, spans)
        self._staging.ints.numpy()[wanted_at : wanted_at + rows] = wanted
        floats = self._staging.floats.numpy()
        floats[:rows], floats[rows : 2 * rows] = uniforms, temperatures
        self._staging.bring_in(self._ints[: wanted_at + rows], self._floats[: 2 * rows])
        if size <= GRAPHED:
            recorded = self._recorded.get(size) or self._record(size)
            recorded.graph.replay()
            x, y = recorded.outputs
        else:
            x, y = self._run(size)
        at = self._ints[wanted_at : wanted_at + rows]
        logits = logits_of(self._model, x.index_select(0, at), y.index_select(0, at))
        drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
        logprobs = kernels.pick(logits, self._floats[rows : 2 * rows], self._floats[:rows], drawn)
        return self._staging.bring_back(rows, logits, drawn, logprobs)

    def _fill(self, size: int, tokens: Ints, spans: Spans) -> int:
        """Stage what the step needs of its tokens; returns how much there is."""
        ints, count = self._staging.ints.numpy(), len(tokens)
        null = self._attention.null_page * self._attention.page_size
        for row, (values, rest) in enumerate(((tokens, 0), (spans.positions, 0), (spans.slots, null))):
            ints[row * size : row * size + count] = values
            ints[row * size + count : (row + 1) * size] = rest
        found, most = tiled(spans, self._tile), self._tiles_for(size)
        tiles = ints[3 * size : 3 * size + 4 * most].reshape(4, most)
        tiles[:, : found.shape[1]] = found
        tiles[:, found.shape[1] :] = 0
        begin = 3 * size + 4 * most
        end = begin + len(spans.pages)
        ints[begin:end] = spans.pages
        return end

    def _tiles_for(self, size: int) -> int:
        return tiles_for(size, self._rows, self._tile)

    def _record(self, size: int) -> Recorded:
        self._recorded[size] = captured(lambda: self._run(size), self._pool)
        return self._recorded[size]

    def _run(self, size: int) -> tuple[Tensor, Tensor]:
        tokens, positions, slots = self._ints[: 3 * size].view(3, size)
        end = 3 * size + 4 * self._tiles_for(size)
        tiles, pages = self._ints[3 * size : end].view(4, -1), self._ints[end:]
        page, scale = self._attention.page_size, self._attention.scale

        def attend(layer: Layer, qkv: Tensor, entries: Tensor) -> Tensor:
            query = stored(self._model, layer, qkv, positions, slots, entries, page)
            return kernels.attend_spans(query, entries, tiles, pages, page, scale)

        return layers(self._model, self._attention, tokens, attend)
