"""Configurations by name: what each says differently from the plain defaults.

``laptop`` is the embedded default. ``gsm8k-smollm`` needs a path: ``data.source=.../train.jsonl``.
"""

from typing import Any

from staleflow.config.schema import ADDER, SMOLLM

Tree = dict[str, Any]
PLAIN = "plain"
LAPTOP = "laptop"

ARITHMETIC: Tree = {
    "source": "staleflow.tasks.arithmetic:problems",
    "arguments": {"digits": 1, "operations": "+-*"},
    "chat": True,
    "max_prompt_tokens": 64,
    "held_out_count": 32,
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
    },
    PLAIN: {},
}
