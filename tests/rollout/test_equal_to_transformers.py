"""The engine's tokens and log-probabilities are those of transformers, whatever happens around a request."""

from collections.abc import Callable

import pytest

from staleflow.rollout import attention
from staleflow.rollout.engine import Request, Sampling
from tests.rollout.conftest import KINDS, Tiny, drain, greedy, prompt, resume

Models = Callable[..., Tiny]


@pytest.fixture(autouse=True, params=["few", "pages"])
def _way_to_the_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models would never leave the way that is best for few entries."""
    if request.param == "pages":
        monkeypatch.setattr(attention, "SMALL", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_of_every_architecture_gives_the_tokens_of_generate(tiny: Models, kind: str) -> None:
    model = tiny(kind)
    prompts = [prompt(length) for length in (1, 2, 7, 8, 9, 16, 33, 70)]
    engine = model.engine(prefill_tokens=25, max_running=6)
    engine.submit([Request(f"t{at}", 1, p, sampling=greedy(12 + at)) for at, p in enumerate(prompts)])
    finished, failed, _ = drain(engine)
    assert not failed
    for at, p in enumerate(prompts):
        result = finished[f"t{at}"]
        assert result.tokens == model.greedy(p, 12 + at)
        assert result.logprobs == pytest.approx(model.logprobs(p, result.tokens), abs=1e-4)
        assert result.reason == "length"
        assert result.spans == ((0, 12 + at),)


def test_tokens_drawn_at_a_temperature_carry_the_log_probability_of_a_full_forward_pass(tiny: Models) -> None:
    model = tiny("qwen3")
    prompts = [prompt(length) for length in (3, 20, 41)]
    for temperature in (0.7, 1.0, 1.5):
        engine = model.engine()
        sampling = Sampling(temperature=temperature, max_tokens=40)
        engine.submit([Request(f"t{at}", 1, p, sampling=sampling) for at, p in enumerate(prompts)])
        finished, _, _ = drain(engine)
        for at, p in enumerate(prompts):
            result = finished[f"t{at}"]
            assert result.logprobs == pytest.approx(model.logprobs(p, result.tokens, temperature), abs=1e-4)


def test_preempted_sequences_go_on_as_if_nothing_had_happened(tiny: Models) -> None:
    model = tiny("llama")
    prompts = [prompt(10, seed) for seed in range(6)]
    engine = model.engine(kv_tokens=160, page_size=8)
    engine.submit([Request(f"t{at}", 1, p, sampling=greedy(50)) for at, p in enumerate(prompts)])
    finished, _, _ = drain(engine)
    assert engine.scheduler.preempted > 3
    for at, p in enumerate(prompts):
        assert finished[f"t{at}"].tokens == model.greedy(p, 50)
        assert finished[f"t{at}"].logprobs == pytest.approx(model.logprobs(p, finished[f"t{at}"].tokens), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_trajectory_resumed_on_another_engine_continues_exactly(tiny: Models, temperature: float) -> None:
    model = tiny("qwen2")
    requests = [
        Request(f"t{at}", 1, prompt(5 + 9 * at), sampling=Sampling(temperature=temperature, max_tokens=40))
        for at in range(4)
    ]
    alone, _, _ = drain_new(model, requests)
    first, second = model.engine(), model.engine(version=0, page_size=16, prefill_tokens=11)
    first.submit(requests)
    for _ in range(13):
        first.step()
    first.interrupt(["t1", "t3", "unknown"])
    output = first.step()
    assert [result.name for result in output.returned] == ["t1", "t3"]
    assert all(result.reason == "interrupted" and 0 < len(result.tokens) < 40 for result in output.returned)
    second.submit([resume(result, requests[int(result.name[1])]) for result in output.returned])
    finished = drain(first)[0] | drain(second)[0]
    for request in requests:
        result = finished[request.name]
        assert result.tokens == alone[request.name].tokens
        assert result.logprobs == pytest.approx(alone[request.name].logprobs, abs=1e-4)
        assert result.spans == ((0, 40),)
        assert result.epoch == (2 if request.name in ("t1", "t3") else 1)


def drain_new(model: Tiny, requests: list[Request]) -> tuple:
    engine = model.engine()
    engine.submit(requests)
    return drain(engine)


def test_bfloat16_stays_near_the_float32_model(tiny: Models) -> None:
    model = tiny("llama")
    engine = model.engine(dtype="bfloat16")
    p = prompt(20)
    engine.submit([Request("t", 1, p, sampling=Sampling(max_tokens=20)), Request("u", 1, p[:3])])
    result = drain(engine)[0]["t"]
    assert result.logprobs == pytest.approx(model.logprobs(p, result.tokens), abs=0.4)


def test_sharded_checkpoint_gives_the_same_tokens(tiny: Models, tmp_path) -> None:
    model = tiny("llama")
    model.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = Tiny(tmp_path, model.model).engine()
    engine.submit([Request("t", 1, prompt(9), sampling=greedy(10))])
    assert drain(engine)[0]["t"].tokens == model.greedy(prompt(9), 10)
