"""The engine on a GPU: ways to decode against the plain one, and whole runs against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.rollout import few
from staleflow.rollout.attention import PagedAttention
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import read_config
from staleflow.rollout.nvrtc import supported
from staleflow.rollout.shapes import write
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.rollout.conftest import KINDS, VOCABULARY, Tiny, drain, greedy, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA = torch.device("cuda")

if torch.cuda.is_available():
    from staleflow.rollout import chain, chain_plan, cuda
else:
    chain: Any = None
    chain_plan: Any = None
    cuda: Any = None


class Decoding:
    """Rows with contexts of any length in shuffled pages, which continue with the last token of another row."""

    def __init__(self, folder: Path, rows: int, shape: str = "qwen-0.5b", **changes: Any) -> None:
        if not supported(CUDA):
            pytest.skip("needs compute capability 9.0")
        write(shape, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        torch.manual_seed(rows)
        self.model = Model(read_config(folder), torch.bfloat16, CUDA)
        self.model.randomise()
        for name, view in self.model.parameters.items():
            if "norm" in name or "bias" in name:
                view.add_(0.1 * torch.randn_like(view))
        page, width = 32, 64
        self.attention = PagedAttention(self.model.config.geometry, rows * width, page, torch.bfloat16, CUDA)
        for entries in self.attention.entries:
            entries.normal_()
        self.tables = torch.randperm(rows * width, device=CUDA).int().view(rows, width)
        self.positions = torch.randint(0, page * width, (rows,), dtype=torch.int32, device=CUDA)
        self.positions[0] = 0
        self.last = torch.randint(0, 1000, (rows,), device=CUDA)
        self.moved = torch.randperm(rows, device=CUDA)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (-1 - self.moved).int(), self.last, self.positions, self.tables

    def holds(self, way: Any, **how: Any) -> None:
        """Its logits and entries are those of the plain path, and its sums the same however the kernels run."""
        before = [entries.clone() for entries in self.attention.entries]
        first = way.decode(*self.inputs(), **how).clone()
        for _ in range(20):
            assert torch.equal(way.decode(*self.inputs(), **how), first)
        made = [entries.clone() for entries in self.attention.entries]
        for entries, old in zip(self.attention.entries, before, strict=True):
            entries.copy_(old)
        expected = cuda.decode(self.model, self.attention, self.last[self.moved], self.positions, self.tables).float()
        assert ((first.float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.08
        for entries, other in zip(self.attention.entries, made, strict=True):
            assert (entries.float() - other.float()).norm() < 0.02 * entries.float().norm()


@pytest.mark.parametrize("polled", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 8, 13, 32])
def test_the_kernel_for_few_rows_equals_the_plain_path(tmp_path: Path, rows: int, polled: bool) -> None:
    case = Decoding(tmp_path, rows)
    case.holds(few.FewRows(case.model, case.attention), polled=polled)


@pytest.mark.parametrize(
    ("rows", "shape", "changes"),
    [
        (1, "qwen-0.5b", {}),
        (8, "qwen-1.5b", {"num_hidden_layers": 4}),
        (13, "qwen-0.5b", {}),
        (32, "qwen-0.5b", {}),
        (50, "qwen-0.5b", {}),
        (96, "qwen-0.5b", {}),
        (128, "qwen-0.5b", {}),
        (144, "qwen-0.5b", {"num_hidden_layers": 6}),
        (256, "qwen-0.5b", {"num_hidden_layers": 6}),
        (200, "qwen-1.5b", {"num_hidden_layers": 4}),
        (40, "qwen-1.5b", {"num_hidden_layers": 4}),
        (33, "qwen-1.5b", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3}),
        (17, "qwen-0.5b", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": True,
                           "attention_bias": True, "num_hidden_layers": 3}),
    ],
)  # fmt: skip
def test_a_chain_of_kernels_equals_the_plain_path(
    tmp_path: Path, rows: int, shape: str, changes: dict[str, Any]
) -> None:
    case = Decoding(tmp_path, rows, shape, **changes)
    way = chain.Chain(case.model, case.attention)
    forms = way.forms(rows, longest=1)
    assert forms
    for form in {*forms, chain_plan.WIDE} if rows <= chain_plan.SIZES[-1] else forms:
        case.holds(way, form=form)


@pytest.mark.parametrize(("rows", "shape"), [(48, "qwen-1.5b"), (256, "qwen-0.5b"), (300, "qwen-1.5b")])
def test_the_attention_of_the_chain_alone_equals_the_plain_path(tmp_path: Path, rows: int, shape: str) -> None:
    case = Decoding(tmp_path, rows, shape, num_hidden_layers=4)
    way = chain.Chain(case.model, case.attention)

    class Attended:
        def decode(self, given: Any, last: Any, positions: Any, tables: Any) -> Any:
            tokens = last[-1 - given.long()]
            return cuda.decode(case.model, case.attention, tokens, positions, tables, chain=way)

    case.holds(Attended())


@pytest.mark.filterwarnings("error")
def test_ways_to_decode_are_compared_whatever_a_prefill_left_on_the_null_page(tmp_path: Path) -> None:
    """They were not where that was no number, and the plain way was taken."""
    case = Decoding(tmp_path, 2)
    null = case.attention.null_page * case.attention.page_size
    for entries in case.attention.entries:
        entries[:, null:].fill_(torch.nan)
    graphs = cuda.DecodeGraphs(case.model, case.attention, most_rows=2, most_pages=16)
    graphs.prepare()
    assert torch.isfinite(graphs._out).all()
    assert {recorded.way for recorded in graphs._recorded.values()} != {cuda.PLAIN}


@pytest.mark.filterwarnings("error")
def test_all_ways_agree_on_the_contexts_on_which_they_are_compared(tmp_path: Path) -> None:
    """Rows of different lengths wrote to each other's place on the null page, and every other way was called wrong."""
    case = Decoding(tmp_path, 256, num_hidden_layers=4)
    graphs = cuda.DecodeGraphs(case.model, case.attention, most_rows=256, most_pages=64)
    graphs.prepare(longest=2048)
    assert len(graphs._recorded) == 3 * len({cuda.rows_for(rows) for rows in range(1, 257)})
    assert cuda.PLAIN not in {recorded.way for recorded in graphs._recorded.values()}


@pytest.mark.filterwarnings("error")
def test_steps_of_any_width_up_to_the_longest_are_recorded_before_the_first(tmp_path: Path) -> None:
    """A step of a width that was new took a twentieth of a second, in the middle of a run."""
    case = Decoding(tmp_path, 4)
    graphs = cuda.DecodeGraphs(case.model, case.attention, most_rows=4, most_pages=64)
    graphs.prepare(longest=32 * 64 - 5)
    assert set(graphs._recorded) == {(rows, width) for rows in (1, 2, 4) for width in (16, 32, 64)}
    flight = graphs.launch(*(each.cpu().numpy() for each in launched(case)))
    expected = cuda.decode(case.model, case.attention, case.last, case.positions, case.tables).float()
    assert ((flight.logits.float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.08


def launched(case: Decoding) -> tuple[torch.Tensor, ...]:
    rows = len(case.positions)
    return case.last.int(), case.positions, case.tables, torch.full((rows,), 0.5).double(), torch.ones(rows)


def test_a_way_to_decode_that_fails_leaves_the_last_tokens_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Decoding(tmp_path, 2)
    graphs = cuda.DecodeGraphs(case.model, case.attention, most_rows=2, most_pages=16)

    def fails(*_: Any) -> Any:
        graphs._last.fill_(7)
        raise RuntimeError("it cannot be recorded")

    monkeypatch.setattr(graphs, "_step", fails)
    with pytest.raises(RuntimeError, match="it cannot be recorded"):
        graphs._capture(2, 16, "chain")
    assert not graphs._last.any()


def options(**rest: Any) -> dict[str, Any]:
    return {"device": "cuda", "page_size": 16, "kv_tokens": 4096, "prefill_tokens": 24, **rest}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama-scaled-rope"])
def test_greedy_decoding_equals_transformers(tiny: Callable[..., Tiny], kind: str) -> None:
    model = tiny(kind)
    engine = model.engine(**options())
    lengths = (1, 5, 17, 33, 60)
    engine.submit([Request(f"t{n}", 1, prompt(n), sampling=greedy(30)) for n in lengths])
    finished, failed, _ = drain(engine)
    assert not failed
    for n in lengths:
        result = finished[f"t{n}"]
        assert result.tokens == model.greedy(prompt(n), 30)
        assert result.logprobs == pytest.approx(model.logprobs(prompt(n), result.tokens), abs=1e-4)


def test_samples_are_those_of_the_cpu(tiny: Callable[..., Tiny]) -> None:
    """One uniform number for each token: the device draws the same, but for a rounding error in thousands."""
    model = tiny("llama")
    requests = [
        Request(
            f"t{at}",
            1,
            prompt(5 + at),
            sampling=Sampling(temperature=0.8, max_tokens=20, top_k=5 if at % 4 == 0 else 0),
        )
        for at in range(24)
    ]
    results: list[dict[str, Any]] = []
    for device in ("cpu", "cuda"):
        engine = model.engine(**options(device=device, max_running=24))
        engine.submit(requests)
        results.append(drain(engine)[0])
    same = sum(results[0][each.name].tokens == results[1][each.name].tokens for each in requests)
    assert same >= 22


def test_weights_pulled_from_shared_memory_are_used_at_once(tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    one, other = tiny("llama", 0), tiny("llama", 1)
    with LocalParameterServer.create("cuda", registry=tmp_path) as server:
        server.push(1, other.tensors())
        engine = one.engine(**options())
        engine.submit([Request("t", 1, prompt(9), sampling=greedy(30))])
        for _ in range(12):
            engine.step()
        with LocalParameterServer.attach("cuda", registry=tmp_path) as reader:
            assert engine.pull(reader, 1) == 1
            result = drain(engine)[0]["t"]
    (_, before), (_, after) = result.spans
    assert before + after == 30
    assert result.tokens[:before] == one.greedy(prompt(9), before)
    assert result.tokens[before:] == other.greedy(prompt(9) + result.tokens[:before], after)


def test_weights_that_are_no_numbers_fail_the_request(tiny: Callable[..., Tiny]) -> None:
    engine = tiny("llama").engine(**options())
    engine.submit([Request("t", 1, prompt(9), sampling=greedy(30))])
    for _ in range(5):
        engine.step()
    engine.pull(lambda into: [into["model.norm.weight"].fill_(float("nan")), 1][1], 1)
    _, failed, _ = drain(engine)
    assert "model.norm.weight has some in version 1" in failed[0].message


def test_sampling_is_exact_by_chi_square(tiny: Callable[..., Tiny]) -> None:
    model = tiny("llama")
    engine = model.engine(**options(max_running=512, kv_tokens=40_000))
    count = 4_000
    engine.submit([Request(f"t{at}", 1, prompt(6), sampling=Sampling(max_tokens=2)) for at in range(count)])
    finished, _, _ = drain(engine)
    first: dict[int, list[int]] = {}
    for result in finished.values():
        first.setdefault(result.tokens[0], []).append(result.tokens[1])
    token, drawn = max(first.items(), key=lambda item: len(item[1]))
    expected = torch.softmax(model.logits([*prompt(6), token])[-1], -1).numpy() * len(drawn)
    counts = np.bincount(drawn, minlength=VOCABULARY)
    large = expected >= 5
    statistic = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    freedom = int(large.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
