"""New weights between two steps: nothing is lost, every token has its version, and KV entries are of a known age."""

from collections.abc import Callable, Mapping

import pytest
import torch

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import EngineError, Request
from tests.rollout.conftest import Tiny, drain, greedy, prompt, resume

Models = Callable[..., Tiny]


class Source:
    """A parameter server that holds one version."""

    def __init__(self, model: Tiny, version: int) -> None:
        self.tensors, self.version = model.tensors(), version

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int) -> int:
        assert at_least <= self.version
        for name, target in into.items():
            target.copy_(self.tensors[name])
        return self.version


def start(model: Tiny, count: int = 4, steps: int = 10, **options) -> TorchEngine:
    engine = model.engine(version=3, **options)
    engine.submit(
        [Request(f"t{at}", 1, prompt(6 + 5 * at), group=f"g{at}", sampling=greedy(30)) for at in range(count)]
    )
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_pull_with_recomputed_entries_continues_exactly_as_the_new_model(tiny: Models, kind: str) -> None:
    old, new = tiny(kind), tiny(kind, seed=1)
    engine = start(old, max_running=3)
    assert engine.pull(Source(new, 5), 4) == 5
    finished, _, _ = drain(engine)
    for at in range(4):
        result, p = finished[f"t{at}"], prompt(6 + 5 * at)
        made = result.spans[0][1] if result.spans[0][0] == 3 else 0
        assert result.spans in (((3, made), (5, 30 - made)), ((5, 30),))
        assert result.tokens[:made] == old.greedy(p, 30)[:made]
        assert result.tokens[made:] == new.greedy(p + result.tokens[:made], 30 - made)
        assert result.logprobs[made:] == pytest.approx(
            new.logprobs(p + result.tokens[:made], result.tokens[made:]), abs=1e-4
        )
        assert result.kv_version == 5
    assert engine.snapshot().version == 5


def test_pull_that_keeps_entries_mixes_old_context_with_new_weights_and_says_so(tiny: Models) -> None:
    old, new = tiny("llama"), tiny("llama", seed=1)
    engine = start(old, kv_on_pull="keep")
    before = engine.scheduler.prefilled
    engine.pull(Source(new, 4), 4)
    assert engine.snapshot().kv_version == 3
    late = Request("late", 1, prompt(9), sampling=greedy(10))
    engine.submit([late])
    finished, _, _ = drain(engine)
    assert engine.scheduler.prefilled == before + 9, "what was kept is not prefilled again"
    for at in range(4):
        result, p = finished[f"t{at}"], prompt(6 + 5 * at)
        made = result.spans[0][1]
        assert result.spans == ((3, made), (4, 30 - made))
        assert result.kv_version == 3
        expected = mixed(old, new, p, result.tokens, made)
        assert result.logprobs[made:] == pytest.approx(expected, abs=1e-4)
    assert finished["late"].kv_version == 4
    assert finished["late"].tokens == new.greedy(prompt(9), 10)


def mixed(old: Tiny, new: Tiny, p: list[int], tokens: list[int], made: int) -> list[float]:
    """Log-probabilities of the tokens after ``made`` when the KV entries of those before come from the old model."""
    whole = torch.tensor([p + tokens])
    known = len(p) + made - 1
    with torch.no_grad():
        cache = old.model(whole[:, :known], use_cache=True).past_key_values
        logits = new.model(whole[:, known:], past_key_values=cache).logits[0].double()
    every = torch.log_softmax(logits, -1)
    return [every[at, token].item() for at, token in enumerate(tokens[made:])]


def test_entries_kept_from_old_weights_are_never_given_to_a_new_request(tiny: Models) -> None:
    old, new = tiny("llama"), tiny("llama", seed=1)
    engine = start(old, count=2, kv_on_pull="keep")
    engine.pull(Source(new, 4), 4)
    engine.step()
    engine.interrupt(["t0"])
    (back,) = engine.step().returned
    request = Request("t0", 1, prompt(6), sampling=greedy(30))
    engine.submit([resume(back, request), Request("twin", 1, prompt(11), group="g1", sampling=greedy(8))])
    finished, _, _ = drain(engine)
    made = len(back.tokens)
    assert finished["t0"].tokens[made:] == new.greedy(prompt(6) + back.tokens, 30 - made)
    assert finished["t0"].kv_version == 4
    assert finished["twin"].tokens == new.greedy(prompt(11), 8)


def test_cached_prefix_of_old_weights_is_not_used_after_a_pull(tiny: Models) -> None:
    old, new = tiny("llama"), tiny("llama", seed=1)
    engine = old.engine()
    engine.submit([Request("a", 1, prompt(20), sampling=greedy(5))])
    drain(engine)
    engine.pull(Source(new, 1), 1)
    assert engine.pool.cached == 0
    engine.submit([Request("b", 1, prompt(20), sampling=greedy(5))])
    assert drain(engine)[0]["b"].tokens == new.greedy(prompt(20), 5)


def test_group_is_prefilled_once_again_after_a_pull(tiny: Models) -> None:
    old, new = tiny("llama"), tiny("llama", seed=1)
    engine = old.engine()
    engine.submit([Request(f"t{at}", 1, prompt(64), group="g", sampling=greedy(20)) for at in range(5)])
    engine.step()
    engine.pull(Source(new, 1), 1)
    drain(engine)
    assert engine.scheduler.prefilled <= 64 + 64 + 5


def test_pull_accepts_a_function_and_refuses_an_older_version_than_asked(tiny: Models) -> None:
    model = tiny("llama")
    engine = model.engine(version=2)
    assert engine.pull(lambda into: Source(model, 7).pull(into, 0), 7) == 7
    with pytest.raises(EngineError, match="asked for version 9"):
        engine.pull(lambda into: Source(model, 8).pull(into, 0), 9)


def test_pull_of_the_version_that_is_held_keeps_the_entries(tiny: Models) -> None:
    engine = start(tiny("llama"))
    before = engine.scheduler.prefilled
    engine.pull(Source(tiny("llama"), 3), 3)
    assert engine.snapshot().running == 4
    drain(engine)
    assert engine.scheduler.prefilled == before


def test_weights_with_nan_fail_their_requests_and_the_next_pull_heals_the_engine(tiny: Models) -> None:
    model = tiny("llama")
    broken = Source(model, 4)
    name = "model.layers.1.mlp.down_proj.weight"
    broken.tensors[name] = torch.full_like(broken.tensors[name], float("nan"))
    engine = start(model)
    engine.pull(broken, 4)
    finished, failed, _ = drain(engine)
    assert not finished
    assert {failure.name for failure in failed} == {"t0", "t1", "t2", "t3"}
    assert all(name in failure.message and "version 4" in failure.message for failure in failed)
    engine.pull(Source(model, 5), 5)
    engine.submit([Request("t", 1, prompt(30), sampling=greedy(12))])
    assert drain(engine)[0]["t"].tokens == model.greedy(prompt(30), 12)


def test_nan_of_one_request_harms_no_other(tiny: Models) -> None:
    """Token 7's embedding is a NaN: who meets it fails, in a batch with others, and leaves no NaN in its pages."""
    model = tiny("llama")
    source = Source(model, 1)
    source.tensors["model.embed_tokens.weight"] = source.tensors["model.embed_tokens.weight"].clone()
    source.tensors["model.embed_tokens.weight"][7] = float("nan")
    engine = model.engine(kv_tokens=256)
    engine.pull(source, 1)
    healthy = [[token if token != 7 else 8 for token in prompt(5 + 11 * at)] for at in range(4)]
    for turn in range(3):
        requests = [Request(f"h{turn}{at}", 1, p, sampling=greedy(6)) for at, p in enumerate(healthy)]
        engine.submit([*requests[:2], Request(f"n{turn}", 1, [1, 7, 2], sampling=greedy(6)), *requests[2:]])
        finished, failed, _ = drain(engine)
        assert f"n{turn}" in {failure.name for failure in failed}
        for at, p in enumerate(healthy):
            expected = model.greedy(p, 6)
            if 7 not in expected[:-1]:
                assert finished[f"h{turn}{at}"].tokens == expected
