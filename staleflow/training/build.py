"""A trainer from a model folder in Hugging Face format, without touching the network.

trainer = build("models/tiny", TrainerOptions(max_staleness=2, lora_rank=16, device="cuda"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from staleflow.errors import line_of
from staleflow.sound_gpu import wrong_products
from staleflow.training.checkpoints import quiet
from staleflow.training.options import TrainerOptions
from staleflow.training.trainer import Trainer


def build(folder: str | Path, options: TrainerOptions) -> Trainer:
    """A trainer at version 0. Weights are kept in float32, whatever precision the folder has.

    To resume a run, build from the folder that it began with, then ``checkpoints.load``: that folder is also the
    reference of a KL term, and what adapters are added to.
    """
    where = torch.device(options.device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {options.device}: torch sees no GPU here, use cpu or install torch with CUDA")
    if where.type == "cuda" and (problem := wrong_products(where)) is not None:
        raise ValueError(problem)
    return Trainer(read_model(folder).to(where), options)


def read_model(folder: str | Path) -> Any:
    """In the memory of the CPU."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path / 'config.json'} is missing: give the folder of a model in Hugging Face format")
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many kinds; all mean that the folder cannot be used
        raise ValueError(
            f"transformers cannot read {path} as a causal language model ({line_of(error)}): give another"
        ) from None
