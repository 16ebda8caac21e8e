"""Accuracy of a model of the embedded task, by plain decoding with transformers.

greedy_accuracy(load(folder), Adder(), count=256)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.tasks import adder
from staleflow.tasks.adder import Adder
from staleflow.tasks.task import Problem


def load(folder: str | Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, local_files_only=True))
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()


def greedy_accuracy(model: Any, task: Adder, count: int = 256) -> float:
    """The share of the first ``count`` held-out problems that the model's most likely response solves."""
    problems = [task.problem(index, "held-out") for index in range(count)]
    responses = generate(model, problems, temperature=0.0)
    return sum(task.verify(*each) for each in zip(problems, responses, strict=True)) / count


@torch.inference_mode()
def generate(model: Any, problems: Sequence[Problem], temperature: float, seed: int = 0) -> list[list[int]]:
    """One response per problem, in one batch; temperature 0 is greedy."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.tensor([problem.prompt for problem in problems])
    done = torch.zeros(len(problems), dtype=torch.bool)
    past: Any = None
    made: list[Tensor] = []
    for _ in range(adder.MAX_RESPONSE_TOKENS + 8):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[:, -1]
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        else:
            ids = logits.argmax(-1, keepdim=True)
        made.append(ids[:, 0].masked_fill(done, adder.PAD))
        done |= ids[:, 0] == adder.END
        if bool(done.all()):
            break
    return [_until_end(row) for row in torch.stack(made, 1).tolist()]


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(adder.END) + 1] if adder.END in tokens else tokens
