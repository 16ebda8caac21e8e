"""The base model of the embedded task of several turns: a small Llama, warmed up on a teacher that stops too early.

Made once and found again, as that of the adder (``base_model.py``)::

    folder = calculator_model("cache", CalculatorRecipe(seed=0))
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from staleflow.tasks import calculator
from staleflow.tasks.base_model import IGNORED, new_model, save, trained
from staleflow.tasks.calculator import Calculator, encoded, prompt_text, transcript
from staleflow.tasks.folders import made_once
from staleflow.tasks.recipes import CalculatorRecipe


def calculator_model(
    cache: str | Path,
    recipe: CalculatorRecipe | None = None,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Path:
    """The folder of the warmed-up model, made now if needed. ``on_step`` is called with every step and its loss."""
    recipe = recipe or CalculatorRecipe()

    def make(draft: Path) -> None:
        size, pad, end = len(calculator.VOCABULARY), calculator.PAD, calculator.END
        fresh = partial(new_model, recipe.shape, recipe.seed, size, pad, end)
        save(draft, trained(fresh, _batches(recipe), recipe, on_step), tokenizer(), recipe)

    return made_once(recipe.folder(cache), make)


def tokenizer() -> PreTrainedTokenizerFast:
    """Every text of the task is its tokens, one after the other, with nothing between them."""
    words = {word: number for number, word in enumerate(calculator.VOCABULARY)}
    raw = Tokenizer(WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = Split(Regex(calculator.WORD), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=[calculator.BEGIN, *calculator.ROLES],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = calculator.TEMPLATE
    return made


def _batches(recipe: CalculatorRecipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole episodes of the teacher; what the model makes is learned, what it is given is not. Endless."""
    task, random = Calculator(recipe.seed), torch.Generator().manual_seed(recipe.seed + 1)
    number = 0
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(recipe.batch):
            numbers = task.problem(number).facts["numbers"]
            number += 1
            chances = torch.rand(calculator.MOST_NUMBERS, generator=random).tolist()
            ids = encoded(prompt_text(numbers))
            labels = [IGNORED] * len(ids)
            for turn in transcript(numbers, lambda call, chances=chances: recipe.teacher.step(call, chances[call])):
                made, given = encoded(turn.made), encoded(turn.given)
                ids += made + given
                labels += made + [IGNORED] * len(given)
            rows.append((ids, labels))
        longest = max(len(ids) for ids, _ in rows)
        padded = [(ids + [calculator.PAD] * (longest - len(ids)), labels) for ids, labels in rows]
        yield (
            torch.tensor([ids for ids, _ in padded]),
            torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in padded]),
        )
