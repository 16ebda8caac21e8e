"""What vLLM computes after a pull is what transformers computes with the same weights: checksums would not show it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from staleflow.rollout.engine import EngineError, Request, Result, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.conformance.engines import VLLM_DEVICE, VLLM_ROUNDING, count, drained
from tests.vllm.conftest import KINDS, model_of, weights_of

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

VERSIONS, TEMPERATURE = 4, 0.7


def ask(name: str, prompt: int, most: int) -> Request:
    ids = [2 + (sum(map(ord, name)) + at * at) % 90 for at in range(prompt)]
    return Request(name, 1, ids, sampling=Sampling(max_tokens=most, temperature=TEMPERATURE))


@torch.no_grad()
def recomputed(models: list[Any], asked: Request, result: Result) -> list[float]:
    """Every token by the version of its span, over a context computed by the same version."""
    tokens = torch.tensor([[*asked.prompt, *result.tokens]])
    found: list[float] = []
    for version, made in result.spans:
        first = len(asked.prompt) + len(found)
        logits = models[version](tokens).logits[0, first - 1 : first - 1 + made] / TEMPERATURE
        found += logits.log_softmax(-1).gather(1, tokens[0, first : first + made, None])[:, 0].tolist()
    return found


@torch.no_grad()
def kept(models: list[Any], asked: Request, result: Result) -> list[float]:
    """Every token by the version of its span, over entries computed by whatever version was there then."""
    tokens = torch.tensor([[*asked.prompt, *result.tokens]])
    cache, done, found = DynamicCache(), 0, list[float]()
    for version, made in result.spans:
        last = len(asked.prompt) + len(found) + made - 1
        logits = models[version](tokens[:, done:last], past_key_values=cache).logits[0, -made:] / TEMPERATURE
        found += logits.log_softmax(-1).gather(1, tokens[0, last - made + 1 : last + 1, None])[:, 0].tolist()
        done = last
    return found


@pytest.fixture(params=["unpacked", "packed"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU small models are unpacked; a large one stays as vLLM packs it."""
    if request.param == "packed":
        if VLLM_DEVICE != "cpu":
            pytest.skip("only on a CPU weights are packed")
        monkeypatch.setattr("staleflow.rollout.vllm.cpu.SMALL", 0)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_pull", ["recompute", "keep"])
def test_log_probabilities_after_each_pull_are_those_of_the_weights_that_were_pulled(
    kind: str, on_pull: str, packing: str, tmp_path: Path, store: LocalParameterServer
) -> None:
    from tests.conformance.pooled_vllm import pooled

    models = [model_of(kind, seed) for seed in range(VERSIONS)]
    models[0].save_pretrained(tmp_path / "model")
    options = EngineOptions(kv_tokens=1024, max_running=4, prefill_tokens=64, threads=1, kv_on_pull=on_pull)  # pyright: ignore[reportArgumentType]
    engine = pooled(tmp_path / "model", options, version=0)
    asked = [ask(f"r{at}", 9 + 23 * at, 24 + 3 * at) for at in range(6)]  # two of them wait at first
    engine.submit(asked)
    ended: dict[str, Result] = {}
    for version in range(1, VERSIONS):
        for _ in range(7):
            ended |= {result.name: result for result in engine.step().finished}
        store.push(version, weights_of(models[version]))
        assert engine.pull(store, version) == version
    ended |= drained(engine)
    assert ended.keys() == {each.name for each in asked}
    assert any(len(result.spans) == VERSIONS for result in ended.values())
    for each in asked:
        result = ended[each.name]
        assert count(result.spans) == len(result.tokens) == each.sampling.max_tokens
        expected = (recomputed if on_pull == "recompute" else kept)(models, each, result)
        assert result.logprobs == pytest.approx(expected, abs=VLLM_ROUNDING)
        oldest = result.spans[0][0] if on_pull == "keep" else result.spans[-1][0]
        assert result.kv_version == oldest
    (copies,) = engine._llm.collective_rpc(copied)  # pyright: ignore[reportPrivateUsage]
    assert copies == (None if packing == "packed" or kind == "experts" else "in parts" if kind == "phi3" else "whole")


def copied(worker: Any) -> str | None:
    """In a worker: how a pull copies, or that vLLM loads."""
    transfer = worker.weight_transfer_engine
    return None if transfer._places is None else "in parts" if transfer._whole is None else "whole"


def test_what_is_asked_after_a_pull_finds_no_entries_of_the_old_weights(tmp_path: Path, store: Any) -> None:
    """With the KV memory kept, blocks of the same prompt are still in vLLM's cache."""
    from tests.conformance.pooled_vllm import pooled

    models = [model_of("llama", seed) for seed in range(2)]
    models[0].save_pretrained(tmp_path / "model")
    options = EngineOptions(kv_tokens=1024, max_running=2, threads=1, kv_on_pull="keep")
    engine = pooled(tmp_path / "model", options, version=0)
    asked = ask("a", 100, 8)
    again, waiting = (Request(name, 1, asked.prompt, sampling=asked.sampling) for name in ("again", "waiting"))
    engine.submit([asked, Request("b", 1, asked.prompt, sampling=Sampling(max_tokens=64)), waiting])
    engine.step()
    store.push(1, weights_of(models[1]))
    engine.pull(store, 1)
    engine.submit([again])
    ended = drained(engine)
    for each in (again, waiting):
        result = ended[each.name]
        assert (result.spans, result.kv_version) == (((1, 8),), 1)
        assert result.logprobs == pytest.approx(recomputed(models, each, result), abs=VLLM_ROUNDING)


def test_values_are_kept_for_who_asks_before_the_first_pull(tmp_path: Path, store: LocalParameterServer) -> None:
    from tests.conformance.pooled_vllm import Pooled, pooled

    model = model_of("qwen3, tied", 1)
    model_of("qwen3, tied", 0).save_pretrained(tmp_path / "model")
    options = EngineOptions(kv_tokens=256, max_running=2, threads=1)
    store.push(5, weights_of(model))
    engine = pooled(tmp_path / "model", options, version=0)
    assert engine.pull(store, 0) == 5
    assert engine.weights().keys() == weights_of(model).keys()
    for name, tensor in weights_of(model).items():
        assert torch.equal(engine.weights()[name], tensor), name
    late = Pooled(engine._llm, tmp_path / "model", options, version=0)  # pyright: ignore[reportPrivateUsage]
    late.pull(store, 0)
    with pytest.raises(EngineError, match="before the first pull"):
        late.weights()


def test_weights_that_are_not_finite_fail_the_requests_that_meet_them(tmp_path: Path, store: Any) -> None:
    from tests.conformance.pooled_vllm import pooled

    model = model_of("llama", 0)
    model.save_pretrained(tmp_path / "model")
    engine = pooled(tmp_path / "model", EngineOptions(kv_tokens=256, max_running=2, threads=1), version=0)
    engine.submit([ask("a", 5, 20)])
    engine.step()
    broken = weights_of(model) | {"model.norm.weight": torch.full((64,), torch.nan)}
    store.push(1, broken)
    engine.pull(store, 1)
    (failed,) = engine.step().failed
    assert failed.name == "a"
    assert "not finite numbers in version 1" in failed.message
    store.push(2, weights_of(model))
    engine.pull(store, 2)
    engine.submit([ask("b", 5, 20)])
    assert drained(engine)["b"].spans == ((2, 20),)
