"""Steps with prefill on a GPU: graphs against launches, and against the CPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from staleflow.rollout.engine import Request, Sampling
from tests.rollout.conftest import Tiny, drain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_an_engine_of_short_steps_is_prepared(tiny: Callable[..., Tiny]) -> None:
    """It recorded graphs of steps that it never has, for which it has no room."""
    engine = tiny("llama").engine(device="cuda", page_size=16, kv_tokens=512, max_running=4, prefill_tokens=24)
    engine.prepare()
    assert not engine.busy


def test_prefill_of_any_length_gives_what_decoding_from_the_start_gives(tiny: Callable[..., Tiny]) -> None:
    """Lengths on both sides of every graph's size and beyond the largest, in one step and in pieces."""
    model = tiny("llama")
    drawn = list[list[list[int]]]()
    for prefill_tokens, device in ((16384, "cuda"), (97, "cuda"), (512, "cpu")):
        options = {"device": device, "page_size": 16, "kv_tokens": 16384, "prefill_tokens": prefill_tokens}
        engine = model.engine(**options, max_running=40)
        random = np.random.default_rng(3)
        sampling = Sampling(max_tokens=6, temperature=0.0)
        lengths = [1, 2, 63, 64, 65, 96, 97, 120, 128, 129, 200]
        prompts = [random.integers(1, 60, length).tolist() for length in [*lengths, *lengths, *lengths[:10]]]
        engine.submit([Request(f"r{at}", 0, each, sampling=sampling) for at, each in enumerate(prompts)])
        results, _, _ = drain(engine)
        drawn.append([list(results[f"r{at}"].tokens) for at in range(len(prompts))])
    assert drawn[0] == drawn[1] == drawn[2]
