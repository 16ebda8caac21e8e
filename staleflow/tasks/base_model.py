"""The base model of the embedded task: a small Llama, warmed up on a teacher that is wrong on purpose.

``base_model`` gives a folder in Hugging Face format (``config.json``, ``model.safetensors``, ``tokenizer.json``). The
first call trains it, for a fixed number of steps on one thread, so the same recipe gives the same weights on the same
machine; later calls find it. The folder is named after the recipe (``recipes``), and appears by one rename: an
interrupted warm start leaves nothing that could be taken for a model::

    folder = base_model("cache", Recipe(seed=0))
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from staleflow.tasks import adder
from staleflow.tasks.adder import Adder, Shape, respond
from staleflow.tasks.folders import made_once
from staleflow.tasks.recipes import Recipe
from staleflow.tasks.task import Problem

IGNORED = -100
Example = tuple[Problem, list[int]]


def base_model(
    cache: str | Path, recipe: Recipe | None = None, on_step: Callable[[int, float], None] = lambda _step, _loss: None
) -> Path:
    """The folder of the warmed-up model, made now if needed. ``on_step`` is called with every step and its loss."""
    recipe = recipe or Recipe()
    return made_once(recipe.folder(cache), lambda draft: save(draft, warm_start(recipe, on_step), tokenizer(), recipe))


def save(draft: Path, model: LlamaForCausalLM, words: PreTrainedTokenizerFast, recipe: Any) -> None:
    model.config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    save_file(model.state_dict(), draft / "model.safetensors", {"format": "pt"})
    words.save_pretrained(draft)
    (draft / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(adder.VOCABULARY)}
    raw = Tokenizer(WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def new_model(
    shape: Shape, seed: int, vocabulary: int = len(adder.VOCABULARY), pad: int = adder.PAD, end: int = adder.END
) -> LlamaForCausalLM:
    """An untrained model. Large input and small output embeddings are why a minute of training is enough."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=end,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            if "embed_tokens" in name:
                std = 0.4
            elif "lm_head" in name:
                std = 0.05
            else:
                std = weight.shape[1] ** -0.5 * (0.5 if "o_proj" in name or "down_proj" in name else 1.0)
            weight.normal_(0.0, std, generator=random)
    return model


# Warm start


class Pace(Protocol):
    """How a warm start learns."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> int: ...


def warm_start(recipe: Recipe, on_step: Callable[[int, float], None] = lambda _step, _loss: None) -> LlamaForCausalLM:
    """Supervised training on the teacher's responses to problems of the training split."""
    return trained(lambda: new_model(recipe.shape, recipe.seed), _batches(recipe), recipe, on_step)


def trained(
    make: Callable[[], LlamaForCausalLM],
    batches: Iterator[tuple[Tensor, Tensor]],
    pace: Pace,
    on_step: Callable[[int, float], None],
) -> LlamaForCausalLM:
    """Supervised training on batches of tokens and labels."""
    with one_thread():
        model = make().train()
        optimiser = torch.optim.AdamW(
            model.parameters(), lr=pace.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, pace))
        for step, (ids, labels) in zip(range(pace.steps), batches, strict=False):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            on_step(step, loss.item())
    return model.eval()


def _rate(step: int, pace: Pace) -> float:
    if step < pace.warmup:
        return (step + 1) / pace.warmup
    return 1.0 - 0.9 * (step - pace.warmup) / max(1, pace.steps - pace.warmup)


def _batches(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of examples of similar length, in random order; endless."""
    task, random = Adder(recipe.seed), torch.Generator().manual_seed(recipe.seed + 1)
    number = 0
    while True:
        rows: list[Example] = []
        while len(rows) < recipe.batch * recipe.bucket:
            problem = task.problem(number)
            number += 1
            if len(rows) % recipe.near_end == 0 and problem.facts["x"] < adder.MODULUS - len(adder.INCREMENTS):
                continue
            chances = iter(torch.rand(adder.MOST_ADDITIONS, generator=random).tolist())
            rows.append(
                (problem, respond(problem, lambda c, chances=chances: recipe.teacher.forgets(c, next(chances))))
            )
        cuts = _cut(rows, recipe.bucket)
        for at in torch.randperm(len(cuts), generator=random).tolist():
            yield _padded(cuts[at])


def _cut(rows: list[Example], parts: int) -> list[list[Example]]:
    """Sort by length and cut into parts with about equally many tokens: equal noise in every step, little padding."""
    rows = sorted(rows, key=lambda row: len(row[1]))
    ends = list(accumulate(len(response) for _, response in rows))
    cuts: list[list[Example]] = [[] for _ in range(parts)]
    for row, end in zip(rows, ends, strict=True):
        cuts[min(parts - 1, (end - 1) * parts // ends[-1])].append(row)
    return [cut for cut in cuts if cut]


def _padded(rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
    longest = adder.PROMPT_TOKENS + max(len(response) for _, response in rows)
    ids = torch.full((len(rows), longest), adder.PAD)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (problem, response) in enumerate(rows):
        end = adder.PROMPT_TOKENS + len(response)
        ids[row, :end] = torch.tensor([*cast(tuple[int, ...], problem.prompt), *response])
        labels[row, adder.PROMPT_TOKENS : end] = ids[row, adder.PROMPT_TOKENS : end]
    return ids, labels


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of floating-point sums depends on the number of threads, and so would the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
