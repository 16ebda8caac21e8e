"""What is wrong with a request or a checkpoint is said in one line, and nothing else is harmed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from staleflow.errors import ConfigError
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import EngineError, Request, Sampling, StepOutput
from tests.rollout.conftest import VOCABULARY, Tiny, drain, greedy, prompt

Models = Callable[..., Tiny]
OK = Sampling(max_tokens=4)
BAD = [
    (Request("x", 1, []), "empty prompt"),
    (Request("x", 1, prompt(129)), "the engine holds 128"),
    (Request("x", 1, [1, VOCABULARY]), f"token {VOCABULARY} is unknown"),
    (Request("x", 1, [-1]), "token -1 is unknown"),
    (Request("good", 1, [1]), "already here"),
    (Request("x", 1, [1], sampling=Sampling(stop_tokens=(VOCABULARY,))), f"stop token {VOCABULARY} is unknown"),
    (Request("x", 1, [1], sampling=Sampling(stop_strings=("a",))), "no tokenizer.json"),
    (Request("x", 1, [1], tokens=[2, 3], logprobs=[0.0], spans=((0, 2),)), "2 tokens, 1 log-probabilities"),
    (Request("x", 1, [1], tokens=[2] * 4, logprobs=[0.0] * 4, spans=((0, 4),), sampling=OK), "already has its 4"),
]


@pytest.mark.parametrize(("request_", "message"), BAD)
def test_bad_request_fails_alone_with_its_reason(tiny: Models, request_: Request, message: str) -> None:
    model = tiny("llama")
    engine = model.engine(kv_tokens=128)
    engine.submit([Request("good", 1, prompt(9), sampling=greedy(8)), request_, Request("late", 1, [3], sampling=OK)])
    finished, failed, _ = drain(engine)
    assert [(failure.name, failure.epoch) for failure in failed] == [(request_.name, 1)]
    assert message in failed[0].message
    assert "\n" not in failed[0].message
    assert finished["good"].tokens == model.greedy(prompt(9), 8)
    assert len(finished["late"].tokens) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is too low"),
        ({"temperature": float("nan")}, "temperature=nan is not finite"),
        ({"top_p": 0.0}, "top_p=0.0 is too low"),
        ({"top_p": 1.1}, "top_p=1.1 is too high"),
        ({"top_k": -1}, "top_k=-1 is too low"),
        ({"min_p": 2.0}, "min_p=2.0 is too high"),
        ({"max_tokens": 0}, "max_tokens=0 is too low"),
        ({"stop_strings": ("",)}, "stop_strings has an empty text: remove it"),
    ],
)
def test_a_way_to_sample_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def edited(tiny: Models, folder: Path, **changes: Any) -> Path:
    shutil.copytree(tiny("llama").folder, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported .* rollout.engine=vllm"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"intermediate_size": 97}, "belong to different models"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors"),
        ({"num_hidden_layers": 1}, "does not provide for"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_at_start(
    tiny: Models, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        TorchEngine(edited(tiny, tmp_path, **changes))


def test_missing_and_damaged_files_are_named(tiny: Models, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        TorchEngine(tmp_path / "nowhere")
    folder = edited(tiny, tmp_path)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(EngineError, match="damaged"):
        TorchEngine(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model\.safetensors is missing"):
        TorchEngine(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        TorchEngine(folder)


def test_checkpoint_with_nan_is_refused_at_start(tiny: Models, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.norm\.weight has values that are not finite"):
        TorchEngine(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tokens": 0}, "kv_tokens=0 is too low"),
        ({"kv_tokens": 8, "page_size": 16}, "less than one page"),
        ({"max_running": 0}, "max_running=0 is too low"),
        ({"dtype": "float16"}, "dtype=float16: write one of float32, bfloat16"),
        ({"kv_on_pull": "drop"}, "kv_on_pull=drop: write one of recompute, keep"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


def test_closed_engine_says_so_and_closing_twice_is_harmless(tiny: Models) -> None:
    engine = tiny("llama").engine()
    engine.submit([Request("t", 1, prompt(9))])
    engine.step()
    engine.close()
    engine.close()
    assert engine.pool.used == 0
    with pytest.raises(EngineError, match="closed"):
        engine.step()


def test_step_with_nothing_to_do_is_harmless(tiny: Models) -> None:
    output = tiny("llama").engine(version=2).step()
    assert output == StepOutput([], [], [])


def test_snapshot_counts_requests_and_memory(tiny: Models) -> None:
    engine = tiny("llama").engine(version=6, kv_tokens=256, page_size=8, max_running=2)
    engine.submit([Request(f"t{at}", 1, prompt(10), group="g", sampling=greedy(20)) for at in range(3)])
    for _ in range(4):
        engine.step()
    now = engine.snapshot()
    assert (now.version, now.running, now.waiting, now.max_running, now.kv_version) == (6, 2, 1, 2, 6)
    assert (now.kv_used, now.kv_total, now.kv_used + now.kv_free) == (24, 256, 256)
    assert now.context == 14 + 13
    assert now.step is not None
    assert now.step[:2] == (2, 13 + 12)
    assert now.step[2] > 0


def test_weights_are_views_of_what_the_engine_computes_with(tiny: Models) -> None:
    engine = tiny("qwen2").engine()
    parameters = engine.model.parameters
    assert set(parameters) == set(tiny("qwen2").tensors())
    engine.model.layers[0].qkv.zero_()
    assert not any(bool(torch.any(parameters[f"model.layers.0.self_attn.{part}_proj.weight"])) for part in "qkv")
