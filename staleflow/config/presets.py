"""Configurations by name: how each differs from the plain defaults.

``laptop`` is the default of ``train``, ``agent`` its twin of several turns; ``paper-14b`` is the default of
``simulate``, ``compare`` and ``plan``. The paper's settings are for 64 GPUs, or 128 with ``-128`` in the name; to train
with them takes such a cluster and model folders of these names. ``gsm8k-smollm`` needs a path:
``data.source=.../train.jsonl``.
"""

from typing import Any

from staleflow.config.cluster import COEFFICIENTS
from staleflow.tasks.options import ADDER, CALCULATOR, SMOLLM

Tree = dict[str, Any]
PLAIN = "plain"
LAPTOP = "laptop"
PAPER = "paper-14b"

ONE_MACHINE: Tree = {"reshard_s": 0.0}
ARITHMETIC: Tree = {
    "source": "staleflow.tasks.arithmetic:problems",
    "arguments": {"digits": 1, "operations": "+-*"},
    "chat": True,
    "max_prompt_tokens": 64,
    "held_out_count": 32,
}


def _paper(model: str, instances: int, kv_tokens: int, **cluster: Any) -> Tree:
    """A setting of the paper. What neither the paper nor its authors' code says is marked as assumed."""
    return {
        "model": model,
        "steps": 20,
        "staleness": 2,
        "groups": 128,
        "group_size": 16,
        "data": {"source": "", "max_prompt_tokens": 512},  # assumed: the paper allows up to 2,000
        "reward": {"function": "math-verify"},
        "rollout": {
            "instances": instances,
            "device": "cuda",
            "dtype": "bfloat16",
            "max_tokens": 20_000,
            "max_running": 256,
            "prefill_tokens": 2048,  # assumed
            "kv_tokens": kv_tokens,  # assumed: 96 GB a GPU, a tenth in reserve, weights out
        },
        "training": {"device": "cuda"},
        "cluster": {
            "lengths": "correlated",  # assumed: lengths of R1 serving, 70 % of the variance between prompts
            "cycle_s": 1.0,  # assumed
            **cluster,
        },
    }


def _costs(*values: float) -> Tree:
    """The coefficients in their order; prefill is assumed to cost per token what decoding costs per sequence."""
    return dict(zip(COEFFICIENTS, (*values, values[2]), strict=True))


def _doubled(preset: Tree) -> Tree:
    """The same on twice the GPUs, with the same batch and in the same proportion."""
    rollout, cluster = preset["rollout"], preset["cluster"]
    return {
        **preset,
        "rollout": {**rollout, "instances": 2 * rollout["instances"]},
        "cluster": {**cluster, "training_gpus": 2 * cluster["training_gpus"]},
    }


# The splits are about what serves the peers best at this bound; the authors' scripts have half for training. Training:
# assumed, 8 FLOP per parameter and token at 40 % of 148 TFLOP/s; of 3.3 billion active parameters, at 20 %.
PAPERS: dict[str, Tree] = {
    PAPER: _paper(
        "Qwen2.5-14B",
        instances=24,
        kv_tokens=289_000,
        training_gpus=40,
        costs=_costs(0.012303, 0.0049075, 2.441e-4, 0.0019664, 1.165e-7),
        weight_bytes=29.5e9,
        trainer_per_token_gpu_s=1 / 500,
    ),
    "paper-32b": _paper(
        "Qwen2.5-32B",
        instances=9,
        kv_tokens=409_000,
        gpus_per_instance=2,
        training_gpus=46,
        costs=_costs(0.0250194, 0.0183826, 2.446e-4, 2e-10, 6.3e-8),
        weight_bytes=65.5e9,
        trainer_per_token_gpu_s=1 / 226,
    ),
    "paper-30b-a3b": _paper(
        "Qwen3-30B-A3B",
        instances=32,
        kv_tokens=258_000,
        training_gpus=32,
        costs=_costs(0.0115108, 0.0097899, 1.249e-4, 0.00086719, 7.28e-8),
        weight_bytes=61e9,
        trainer_per_token_gpu_s=1 / 1121,
    ),
}

PRESETS: dict[str, Tree] = {
    LAPTOP: {
        "model": ADDER,
        "steps": 60,
        "staleness": 2,
        "groups": 32,
        "group_size": 8,
        "rollout": {"instances": 2, "max_tokens": 120, "max_running": 128, "kv_tokens": 20_480},
        "strategies": {"headroom": 120},
        "training": {"loss": "dapo", "learning_rate": 5e-4, "warmup_steps": 5},
        "evaluation": {"every": 5, "problems": 512},
        # About as measured on two cores (docs/results).
        "cluster": {
            "mean_tokens": 23,
            "trainer_fixed_s": 0.17,
            "trainer_per_token_gpu_s": 5e-5,
            "reward_s": 0.03,
            **ONE_MACHINE,
        },
    },
    "agent": {
        "model": CALCULATOR,
        "steps": 40,
        "staleness": 2,
        "groups": 32,
        "group_size": 8,
        "data": {"source": CALCULATOR, "chat": True, "max_prompt_tokens": 16},
        "environment": {"play": CALCULATOR, "max_turns": 8, "max_given": 48},
        "rollout": {"instances": 2, "max_tokens": 72, "max_running": 128, "kv_tokens": 20_480},
        "strategies": {"headroom": 120},
        "training": {"loss": "dapo", "learning_rate": 5e-4, "warmup_steps": 5},
        "evaluation": {"every": 5, "problems": 256},
        "cluster": ONE_MACHINE,
    },
    "arithmetic-smollm": {
        "model": SMOLLM,
        "steps": 40,
        "staleness": 2,
        "groups": 8,
        "group_size": 8,
        "data": ARITHMETIC,
        "reward": {"function": "last-number"},
        "rollout": {"instances": 2, "max_tokens": 48, "max_running": 32, "kv_tokens": 8_192},
        "strategies": {"headroom": 48},
        "training": {"learning_rate": 2e-5, "warmup_steps": 2, "micro_tokens": 512},
        "evaluation": {"every": 10, "problems": 32},
        "cluster": ONE_MACHINE,
    },
    "gsm8k-smollm": {
        "model": SMOLLM,
        "steps": 200,
        "staleness": 2,
        "groups": 16,
        "group_size": 8,
        "data": {"source": "", "prompt": "question", "answer": "answer", "chat": True, "max_prompt_tokens": 320},
        "reward": {"function": "last-number"},
        "rollout": {"instances": 2, "max_tokens": 256, "max_running": 32, "kv_tokens": 20_480},
        "training": {"learning_rate": 1e-5, "warmup_steps": 5, "micro_tokens": 1024},
        "evaluation": {"every": 20, "problems": 128},
        "cluster": ONE_MACHINE,
    },
    "one-gpu": {
        "model": SMOLLM,
        "steps": 200,
        "staleness": 2,
        "groups": 32,
        "group_size": 8,
        "data": ARITHMETIC,
        "reward": {"function": "last-number", "workers": 2},
        "rollout": {
            "instances": 2,
            "device": "cuda",
            "dtype": "bfloat16",
            "max_tokens": 256,
            "max_running": 256,
            "kv_tokens": 131_072,
            "prefill_tokens": 8_192,
        },
        "training": {
            "device": "cuda",
            "learning_rate": 1e-5,
            "warmup_steps": 5,
            "correction": "truncated",
            "micro_tokens": 16_384,
        },
        "evaluation": {"every": 10, "problems": 32},
        "cluster": ONE_MACHINE,
    },
    PLAIN: {},
    **PAPERS,
    **{f"{name}-128": _doubled(preset) for name, preset in PAPERS.items()},
}
