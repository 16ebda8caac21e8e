"""Where the time of a decoding step goes on a GPU: by stage, by kernel, and by what a chain takes without one of them.

    python bench/gpu/stages.py --output stages.json         # about 2 minutes on an H200
    python bench/gpu/stages.py --changes                    # the chain with one of its constants changed
    python bench/gpu/stages.py --rows 64 256 --longest 2000   # one context has 2,000 tokens, and most 100 to 300
    python bench/gpu/stages.py --smoke                      # the arithmetic of it, without a GPU

*Few*: the kernel (``few.cu``) compiled with TRACED, in which every block writes down its own clock at the begin of a
stage, when its input is there, and at its end; microseconds of a layer, the mean over blocks and layers. *Plain*: the
kernels of ``cuda.decode`` in a replayed graph, by torch's profiler. Kernels of a chain (``chain.py``) overlap, so there
it is how much less a step takes if one of them is left out of all layers, in microseconds of a layer, in each of the
forms that are tried for so many sequences.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import amounts, kept
from bench.gpu.lab import Results
from bench.gpu.tail import Sizes, engine_of
from staleflow.rollout import chain, chain_plan, ways
from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.few import MARKS, FewRows, fits
from staleflow.rollout.model import Model

KINDS = ("qkv", "out", "up", "down", "head")
ATTENDED, CLEARED, MET, SUMMED_FROM, SUMMED = 15, 16, 17, 18, 19
"""The marks of few.cu after those of the products."""
REPLAYS = 50
LINKS = ("product_qkv", "attend", "product_out", "product_up", "product_down")
CHANGES: tuple[dict[str, Any], ...] = (
    {"MEMORY": {2: 114_000, 3: 114_000}},
    {"MEMORY": {2: 76_000, 3: 76_000}},
    {"LEAST_STAGES": 8},
    {"RING_OF_ATTENTION": 49_152},
    {"ATTENDING": 128},
    {"ATTENDING": 512},
    {"LEAST_PIECE": 128},
    {"PIECES": 16},
    {"PIECES": 16, "ATTENDING": 512},
    {"MANY": 32},
    {"BLOCKS": 80},
    {"BLOCKS": 140},
)


def by_stage(trace: Tensor, hertz: float) -> dict[str, float]:
    """Microseconds of a layer by stage, from ``[blocks, layers + 1, MARKS]`` cycles; 0 where a block had no part."""
    blocks, layers = trace.shape[0], trace.shape[1] - 1
    found: dict[str, float] = {}

    def add(name: str, begin: Tensor, end: Tensor) -> None:
        took = ((end - begin) * ((begin > 0) & (end > begin))).double().sum().item() / (blocks * layers)
        found[name] = found.get(name, 0.0) + 1e6 * took / hertz

    body = trace[:, :-1]
    for at, kind in enumerate(KINDS[:-1]):
        add(f"{kind}, input", body[..., 3 * at], body[..., 3 * at + 1])
        add(kind, body[..., 3 * at + 1], body[..., 3 * at + 2])
    add("attention", body[..., 2], body[..., ATTENDED])
    add("meeting before down", body[..., CLEARED], body[..., MET])
    add("meeting before the sum", body[..., 11], body[..., SUMMED_FROM])
    add("sum", body[..., SUMMED_FROM], body[..., SUMMED])
    first = body[:, 1:, :].clone()
    first[first == 0] = torch.iinfo(torch.int64).max
    begun = first.amin(-1)
    ends = begun[:, 1:] - begun[:, :-1]
    found["a layer"] = 1e6 * ends.double().mean().item() / hertz
    head = trace[:, -1]
    has = head[:, 14] > 0
    found["head, of the step"] = 1e6 * (head[has, 14] - head[has, 12]).double().mean().item() / hertz
    return found


TRIED: dict[str, tuple[tuple[int, int], ...]] = {
    "qkv": ((32, 1), (32, 2), (64, 1), (64, 2)),
    "out": ((32, 1), (32, 2), (64, 1), (64, 2)),
    "up": ((64, 1), (128, 1)),
    "down": ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)),
}
"""Other ways to divide a product where sequences are divided, too."""


class Without(chain.Chain):
    """A form of the chain, or what is left of it without a kind of kernel: its logits mean nothing, its time does."""

    def __init__(self, model: Model, attention: PagedAttention, form: chain_plan.Form, kind: str | None) -> None:
        super().__init__(model, attention)
        self._form, self._left_out = form, kind

    def decode(self, *inputs: Any, **more: Any) -> Tensor:
        return super().decode(*inputs, **more, form=self._form)

    def links(
        self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor, form: chain_plan.Form
    ) -> list[chain.Link]:
        every = super().links(given, last, positions, tables, form)
        return [each for each in every if self._left_out is None or not each.name.startswith(self._left_out)]


class Attended:
    """The plain path with the attention of the chain."""

    def __init__(self, model: Model, attention: PagedAttention) -> None:
        self._model, self._attention, self._chain = model, attention, chain.Chain(model, attention)

    def decode(self, given: Tensor, last: Tensor, positions: Tensor, tables: Tensor) -> Tensor:  # noqa: ARG002
        from staleflow.rollout.cuda import decode

        return decode(self._model, self._attention, given.long(), positions, tables, chain=self._chain)


def skewed(rows: int, longest: int) -> np.ndarray:
    """Lengths of contexts as a run has them: lognormal, 200 on average, one the longest and one half as long."""
    drawn = np.random.default_rng(0).lognormal(np.log(200) - 0.5, 1.0, rows)
    lengths = np.clip(drawn, min(20, longest), longest).astype(int)
    lengths[:2] = [longest, longest // 2][:rows]
    return lengths


class Bench:
    """A model with random weights and contexts of the same length, or of lengths up to that."""

    def __init__(self, shape: str, rows: int, context: int, uneven: bool = False) -> None:
        engine = engine_of(Sizes(), shape, 1, 4096 + rows * (context + 64), "plain")
        self.model, self.attention = engine.model, engine.attention
        page, device = self.attention.page_size, self.attention.device
        pages = -(-context // page)
        self.tables = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        lengths = skewed(rows, context) if uneven else np.full(rows, context)
        self.positions = torch.tensor(lengths - 1, dtype=torch.int32, device=device)
        self.given = torch.arange(rows, dtype=torch.int32, device=device) + 5
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        for entries in self.attention.entries:
            entries.normal_()
        self.rows = rows

    def plain(self) -> Tensor:
        from staleflow.rollout.cuda import decode

        return decode(self.model, self.attention, self.given.long(), self.positions, self.tables)

    def decode(self, way: Any) -> Tensor:
        return self.plain() if way is None else way.decode(self.given, self.last, self.positions, self.tables)

    def graph(self, way: Any) -> torch.cuda.CUDAGraph:
        from staleflow.rollout.cuda import captured

        return captured(lambda: (self.decode(way),), None).graph

    def chained(self, form: chain_plan.Form, without: str | None = None) -> float:
        return milliseconds(self.graph(Without(self.model, self.attention, form, without)))

    @property
    def forms(self) -> dict[str, chain_plan.Form]:
        """Those that are tried for so many sequences."""
        there = chain.Chain(self.model, self.attention).forms(
            self.rows, self.attention.page_size * self.tables.shape[1]
        )
        return {name: form for name, form in ways.CHAINED.items() if form in there}

    def changed(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step by the chain, as it is and with one of its constants changed."""
        found = {name: self._changed(form, CHANGES) for name, form in self.forms.items() if form != chain_plan.PARTED}
        if chain_plan.PARTED in self.forms.values():
            size = chain_plan.rows_of_kernel(self.rows, parted=True)
            parts = chain_plan.PARTS[size]
            changes = [
                {"PARTS": {size: parts | {name: chain_plan.Division(*each)}}}
                for name, all in TRIED.items()
                for each in all
            ]
            found["chain, parted"] = self._changed(chain_plan.PARTED, changes)
        return found

    def _changed(self, form: chain_plan.Form, changes: Sequence[dict[str, Any]]) -> dict[str, float]:
        found = {"as it is": self.chained(form)}
        for change in changes:
            before = {name: getattr(chain_plan, name) for name in change}
            try:
                for name, value in change.items():
                    setattr(chain_plan, name, value)
                found[" ".join(f"{name}={value}" for name, value in change.items())] = self.chained(form)
            finally:
                for name, value in before.items():
                    setattr(chain_plan, name, value)
        return found

    def cell(self) -> dict[str, Any]:
        plain, expected = self.graph(None), self.plain().float()
        found: dict[str, Any] = {"plain_ms": milliseconds(plain), "plain": by_kernel(plain)}

        def difference(way: Any) -> float:
            return ((self.decode(way).float() - expected).norm() / expected.norm()).item()

        each = 1e3 / len(self.model.layers)
        for name, form in self.forms.items():
            way = Without(self.model, self.attention, form, None)
            took = milliseconds(self.graph(way))
            found |= {f"{name}_difference": difference(way), f"{name}_ms": took}
            found[name] = {kind: each * (took - self.chained(form, kind)) for kind in LINKS}
        attended = Attended(self.model, self.attention)
        found |= {f"{ways.ATTENDED}_ms": milliseconds(self.graph(attended))}
        found[f"{ways.ATTENDED}_difference"] = difference(attended)
        if fits(self.model.config, self.model.dtype, self.attention.page_size, self.rows):
            few, traced = FewRows(self.model, self.attention), FewRows(self.model, self.attention, traced=True)
            found["few_difference"], found["few_ms"] = difference(few), milliseconds(self.graph(few))
            self.decode(traced)
            took, marks = milliseconds(self.graph(traced)), traced.trace
            begun = torch.where(marks > 0, marks, marks.amax()).amin((1, 2))
            span = (marks.amax((1, 2)) - begun).double().mean().item()
            found["traced_ms"], found["few"] = took, by_stage(marks.cpu(), span / (took / 1e3))
        return found


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    for _ in range(5):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def by_kernel(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """Milliseconds of a replay and how many there are, by the kernel's name."""
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    rows = {each.key[:60]: [each.self_device_time_total / 3e3, each.count / 3] for each in profiler.key_averages()}
    return dict(sorted(rows.items(), key=lambda item: -item[1][0])[:14])


def smoke() -> dict[str, float]:
    """A trace that was made up: every stage takes one microsecond at 1 GHz."""
    places = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16, 17, 3, 10, 11, 15, 16])
    trace = 1000 * (1 + places + 17 * torch.arange(4)[:, None]).expand(2, 4, MARKS)
    return by_stage(trace, 1e9)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--smoke", action="store_true", help="without a GPU")
    parser.add_argument("--changes", action="store_true", help="only the chain, with one of its constants changed")
    parser.add_argument("--shapes", nargs="+", default=["qwen-1.5b", "qwen-0.5b"])
    parser.add_argument("--rows", type=amounts.count, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--contexts", type=amounts.count, nargs="+", help="all of a length (512)")
    parser.add_argument("--longest", type=amounts.count, nargs="+", default=[], help="of lengths up to this")
    given = parser.parse_args(arguments)
    results = Results(given.output)
    results.head()
    if given.smoke:
        results.measure("smoke", smoke)
        return results.found
    kind = "changed" if given.changes else "cell"
    contexts = [(length, False) for length in given.contexts or ([] if given.longest else [512])]
    contexts += [(length, True) for length in given.longest]
    for shape in given.shapes:
        for rows in given.rows:
            for length, uneven in contexts:
                name = f"{shape} {rows} x {'up to ' * uneven}{length}{', changed' * given.changes}"
                at = (shape, rows, length, uneven)
                results.measure(name, lambda at=at: getattr(Bench(*at), kind)())
    return results.found


if __name__ == "__main__":
    main()
