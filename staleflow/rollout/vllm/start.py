# pyright: reportMissingImports=false
"""Start vLLM with the options of an engine. ::

engine = make("models/tiny", EngineOptions(kv_tokens=65_536), tensor_parallel_size=2)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from staleflow.errors import line_of
from staleflow.model_json import read_json
from staleflow.rollout.device import DTYPES
from staleflow.rollout.engine import EngineError
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.vllm.engine import VllmEngine
from staleflow.rollout.vllm.scheduler import CountingScheduler
from staleflow.rollout.vllm_plugin import BACKEND, register

BLOCK = 32
"""Blocks of KV memory have a multiple of this many tokens: vLLM's attention on CPUs has no others."""


def start(folder: str | Path, options: EngineOptions, arguments: Mapping[str, Any]) -> LLMEngine:
    """vLLM with a model, its KV memory as given by the options and not by what the device has."""
    register()
    size = -(-options.page_size // BLOCK) * BLOCK
    blocks = options.kv_tokens // size
    if not blocks:
        raise EngineError(f"kv_tokens={options.kv_tokens} is less than one block of {size} tokens: give more")
    on_cpu, longest = options.device == "cpu", min(_positions(Path(folder)), blocks * size)
    settings: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "load_format": "dummy" if options.weights == "random" else "safetensors",
        "max_model_len": longest,
        "max_num_seqs": options.max_running,
        # On a CPU, seeds of requests and prompts in parts together make vLLM fail.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(options.prefill_tokens + options.max_running, longest if on_cpu else 0),
        "block_size": size,
        "num_gpu_blocks_override": blocks + 1,
        # Its own budget would be most of the GPU, and a start beside others is refused if that is not free.
        **({} if on_cpu else {"gpu_memory_utilization": 0.01}),
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduler_cls": CountingScheduler,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    fixed = settings.keys() & arguments.keys()
    if fixed:
        raise EngineError(
            f"rollout.engine_arguments.{min(fixed)} is set by the other settings of rollout: leave it out"
        )
    if on_cpu and arguments.get("enforce_eager") is False:
        raise EngineError(
            "rollout.engine_arguments.enforce_eager=false is not proven on a CPU, where compiled code may keep the "
            "weights that it was compiled with: leave it out"
        )
    settings |= {"enforce_eager": on_cpu, **arguments}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if on_cpu:
        torch.compiler.set_stance("force_eager")  # its sampler would be compiled in the first step, for up to a minute
    try:
        config = EngineArgs(**settings).create_engine_config()
        model, parallel = config.model_config, config.parallel_config
        layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
        entry = 2 * layers * heads * model.get_head_size() * DTYPES[options.dtype].itemsize
        config.cache_config.kv_cache_memory_bytes = (blocks + 1) * size * entry
        llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except Exception as error:  # vLLM raises many kinds
        raise EngineError(f"vLLM cannot run {folder} ({line_of(error)}): change the model or the settings") from error
    if llm.vllm_config.scheduler_config.async_scheduling:
        raise EngineError("vLLM schedules ahead, so that tokens would have the wrong version: use another release")
    return llm


def _positions(folder: Path) -> int:
    """Tokens of the longest sequence that the model was made for."""
    found = read_json(folder / "config.json")
    places = (found, *(each for each in found.values() if isinstance(each, dict)))
    return next((each["max_position_embeddings"] for each in places if "max_position_embeddings" in each), 2**31)


def make(model_folder: str | Path, options: EngineOptions, **arguments: Any) -> VllmEngine:
    """The engine of an instance, which has pulled no version yet. ``arguments``: further ones of vLLM's."""
    return VllmEngine(start(model_folder, options, arguments), model_folder, options, version=-1)
