"""From the section ``data`` to the prompts of a run and their decoder: model folder, tokenizer, data and splits.

    folder = model_folder("adder", cache)   # made or converted now if it is not in the cache
    task = open_task(data, open_source(data, seed=0), folder, seed=0, evaluated=256)
    task.prompts.ids(0), task.prompts.problem(0)
    task.decode(tokens)

The embedded task needs no tokenizer. Other data is encoded by the ``tokenizers`` library; transformers is loaded only
for chat templates. A hash of the prompt decides what is held out of training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.errors import StaleFlowError, line_of
from staleflow.model_json import read_json
from staleflow.tasks import adder
from staleflow.tasks.adder import Adder
from staleflow.tasks.calculator import Calculator
from staleflow.tasks.hub import hub_folder
from staleflow.tasks.options import ADDER, CALCULATOR, GYM, HUB, SMOLLM, SOURCES, Data, is_file, is_hub_name
from staleflow.tasks.prompts import DataPrompts, Encode, TaskPrompts
from staleflow.tasks.recipes import CalculatorRecipe, Recipe
from staleflow.tasks.smollm import converted, smollm
from staleflow.tasks.sources import from_function, read_file, read_hub, reasoning_gym
from staleflow.tasks.task import Messages, Problem, Prompt, Task, TaskError, digest
from staleflow.types import TOKEN

AWAY_FROM_WARM_START = 1000
"""Added to the seed of the training problems, so that they are not those that the warm start has seen."""
MOST_HELD_OUT = 1000
TOKENS_BEFORE = 8
"""Tokens that are decoded before those that may hold a stop string, each of which is a byte of it or more."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    prompts: DataPrompts | TaskPrompts
    """The training prompts, by number."""
    held_out: list[tuple[tuple[int, ...], Problem]]
    """The problems of the evaluation, each with the tokens of its prompt."""
    decode: Callable[[Sequence[int]], str]
    """The text of a response, as the reward sees it."""
    stop_tokens: tuple[int, ...]
    vocab_size: int
    max_prompt_tokens: int
    said: Callable[[Prompt], Messages] = lambda _prompt: []
    """A prompt as the messages of a chat, the system's among them."""

    def conversation(self, problem: Problem) -> Problem:
        """With its messages as they were rendered."""
        return Problem(self.said(problem.prompt), problem.facts)

    @property
    def size(self) -> int | None:
        """Problems to train on; None: endless."""
        return self.prompts.order.size if isinstance(self.prompts, DataPrompts) else None

    @property
    def left_out(self) -> int:
        """Problems whose prompts are too long, or empty."""
        return self.prompts.too_long + self.prompts.empty if isinstance(self.prompts, DataPrompts) else 0

    def about(self) -> str:
        """In one line."""
        size = "endless problems" if self.size is None else f"{self.size:,} problems"
        why: list[str] = []
        if isinstance(self.prompts, DataPrompts):
            long, empty, longest = self.prompts.too_long, self.prompts.empty, self.prompts.longest
            if long:
                limit = f"data.max_prompt_tokens={self.max_prompt_tokens}"
                why.append(f"{long:,} longer than {limit} (the longest has {longest:,})")
            if empty:
                why.append(f"{empty:,} empty")
        out = f"; left out: {', '.join(why)}" if why else ""
        return f"{size} to train on, {len(self.held_out):,} held out{out}"

    def facts(self) -> dict[str, int | None]:
        """The same as plain values."""
        return {"problems": self.size, "problems_left_out": self.left_out, "held_out": len(self.held_out)}

    @property
    def fingerprint(self) -> str:
        """Equal for two sets in which every number stands for the same prompt."""
        return self.prompts.fingerprint


def model_folder(
    model: str, cache: str, seed: int = 0, on_step: Callable[[int, float], None] = lambda _step, _loss: None
) -> Path:
    """The folder of the model. ``on_step`` is called with each step of a warm start, if there is one."""
    if model in (ADDER, CALCULATOR):
        return _warmed(Recipe(seed=seed) if model == ADDER else CalculatorRecipe(seed=seed), cache, on_step)
    return smollm(cache) if model == SMOLLM else hub_folder(model) if is_hub_name(model) else Path(model)


def text_folder(model: str, cache: str) -> Path | None:
    """A folder with the model's tokenizer, without loading or making anything; None if that would be needed."""
    if model == CALCULATOR:
        return None
    if is_hub_name(model):
        return hub_folder(model, weights=False)
    folder = converted(cache) if model == SMOLLM else Path(model)
    return folder if model == ADDER or folder.is_dir() else None


def decoder_of(data: Data, folder: Path) -> str:
    """What reward workers make text of tokens with."""
    return ADDER if data.source == ADDER else str(folder / "tokenizer.json")


def open_source(data: Data, seed: int) -> Task | list[Problem]:
    """The problems, before any model: a file is read here, and a function of the user's called."""
    if data.source == ADDER:
        return Adder(seed + AWAY_FROM_WARM_START)
    if data.source == CALCULATOR:
        return Calculator(seed + AWAY_FROM_WARM_START)
    if is_file(data.source):
        return read_file(data.source, data.prompt, data.answer)
    if SOURCES.key(data.source) == HUB:
        return read_hub(data.source, data.prompt, data.answer, **data.arguments)
    try:
        if data.source.startswith(GYM):
            return reasoning_gym(data.source.removeprefix(GYM), **data.arguments)
        return from_function(data.source, data.prompt, data.answer, **data.arguments)
    except StaleFlowError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise TaskError(
            f"data.source={data.source} failed ({line_of(error)}): correct data.arguments, or the function"
        ) from None


def open_task(data: Data, source: Task | list[Problem], folder: Path, seed: int, evaluated: int) -> TaskSet:
    """Prompts and tokenizer for the problems of ``open_source``. ``evaluated``: the most that are held out."""
    if data.source == ADDER and isinstance(source, Task):
        return _embedded(source, evaluated)
    encode, decode = _text(data, folder)
    if isinstance(source, Task):
        prompts: DataPrompts | TaskPrompts = TaskPrompts(source, "train", encode)
        held = [source.problem(index, "held-out") for index in range(evaluated)]
    else:
        train, held = _split(data, source)
        prompts = DataPrompts(train, encode, seed, data.max_prompt_tokens, data.epochs, data.shuffle)
    return TaskSet(
        prompts=prompts,
        held_out=_encoded(held, encode, data.max_prompt_tokens, evaluated),
        decode=decode,
        stop_tokens=stop_tokens(folder),
        vocab_size=int(_json(folder / "config.json")["vocab_size"]),
        max_prompt_tokens=data.max_prompt_tokens,
        said=partial(_said, data),
    )


def was_cut(task: TaskSet, stop_strings: Sequence[str]) -> Callable[[bytes], bool]:
    """Whether a response, as little-endian int32, was ended by a limit: neither an end token nor a stop string did."""
    ends = {token.to_bytes(4, "little") for token in task.stop_tokens}
    tail = 4 * (max((len(each.encode()) for each in stop_strings), default=0) + TOKENS_BEFORE)

    def cut(ids: bytes) -> bool:
        if ids[-4:] in ends:
            return False
        if not stop_strings:
            return True
        text = task.decode(np.frombuffer(ids[-tail:], TOKEN).tolist())
        return not any(each in text for each in stop_strings)

    return cut


def first_problem(source: Task | list[Problem]) -> Problem:
    """A problem to try the reward with."""
    return source.problem(0) if isinstance(source, Task) else source[0]


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The end tokens of the model: those of its generation settings, its configuration and its tokenizer."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    end: Any = _json(folder / "tokenizer_config.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if text is not None:
        added = _json(folder / "tokenizer.json").get("added_tokens", [])
        found += [each["id"] for each in added if each["content"] == text]
    return tuple(dict.fromkeys(found))


# Within


def _warmed(recipe: Recipe | CalculatorRecipe, cache: str, on_step: Callable[[int, float], None]) -> Path:
    """The folder of an embedded model. PyTorch is loaded only to make one."""
    if (folder := recipe.folder(cache)).is_dir():
        return folder
    if isinstance(recipe, Recipe):
        from staleflow.tasks.base_model import base_model

        return base_model(cache, recipe, on_step)
    from staleflow.tasks.calculator_model import calculator_model

    return calculator_model(cache, recipe, on_step)


def _embedded(source: Task, evaluated: int) -> TaskSet:
    held = [Adder(0).problem(index, "held-out") for index in range(evaluated)]
    return TaskSet(
        prompts=TaskPrompts(source),
        held_out=_encoded(held, _no_text, adder.PROMPT_TOKENS, len(held)),
        decode=adder.text,
        stop_tokens=(adder.END,),
        vocab_size=len(adder.VOCABULARY),
        max_prompt_tokens=adder.PROMPT_TOKENS,
    )


def _split(data: Data, problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """The training problems and the held-out ones; no prompt is in both."""
    if data.held_out is not None:
        held = _different(_held_out(data, data.held_out))
    else:
        ranked = sorted(_different(problems), key=_rank)
        count = data.held_out_count or max(1, min(MOST_HELD_OUT, len(ranked) // 10))
        if count >= len(ranked):
            has = f"{len(ranked)} different prompts" if len(ranked) > 1 else "one prompt only"
            lower = ", or a lower data.held_out_count" if len(ranked) > 1 else ""
            raise TaskError(
                f"data.source={data.source} has {has}, too few to hold out {count}: give data.held_out{lower}"
            )
        held = ranked[:count]
    kept_out = {_asked(problem) for problem in held}
    train = [problem for problem in problems if _asked(problem) not in kept_out]
    if not train:
        raise TaskError(f"all prompts of data.source={data.source} are in data.held_out: give other data")
    return train, held


def _held_out(data: Data, source: str) -> list[Problem]:
    if is_file(source):
        return read_file(source, data.prompt, data.answer)
    return read_hub(source, data.prompt, data.answer, **data.arguments | {"split": "test"})


def _different(problems: list[Problem]) -> list[Problem]:
    """Without those that ask the same."""
    return list({_asked(problem): problem for problem in problems}.values())


def _asked(problem: Problem) -> object:
    """What is equal for two problems that ask the same."""
    return problem.prompt if isinstance(problem.prompt, str | tuple) else repr(problem.prompt)


def _rank(problem: Problem) -> int:
    return digest("held-out", "prompt", problem.prompt)


def _encoded(problems: list[Problem], encode: Encode, longest: int, most: int) -> list[tuple[tuple[int, ...], Problem]]:
    """The first ``most`` problems whose prompts are not too long, with their tokens."""
    found: list[tuple[tuple[int, ...], Problem]] = []
    for problem in problems:
        tokens = tuple(problem.prompt if isinstance(problem.prompt, tuple) else encode(problem.prompt))
        if 0 < len(tokens) <= longest:
            found.append((tokens, problem))
        if len(found) == most:
            break
    if not found:
        raise TaskError(f"all held-out prompts are longer than {longest} tokens: raise data.max_prompt_tokens")
    return found


def _no_text(text: str | Messages) -> Sequence[int]:
    raise TaskError(f"the embedded task has no text prompts, such as {text[:20]!r}")


def _text(data: Data, folder: Path) -> tuple[Encode, Callable[[Sequence[int]], str]]:
    """How prompts become tokens and responses become text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise TaskError(
            f"{folder / 'tokenizer.json'} cannot be read ({error}): save a fast tokenizer with the model"
        ) from None

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    if data.chat:
        return _chat(data, folder), decode

    def encode(prompt: str | Messages) -> Sequence[int]:
        if not isinstance(prompt, str):
            raise TaskError(f"data.source={data.source} has messages as prompts: give data.chat=true")
        return tokenizer.encode(data.template.replace("{prompt}", prompt)).ids

    return encode, decode


def _chat(data: Data, folder: Path) -> Encode:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; all mean that the tokenizer cannot be used
        raise TaskError(
            f"the tokenizer of {folder} cannot be read by transformers ({line_of(error)}): save a fast tokenizer there"
        ) from None
    if not tokenizer.chat_template:
        raise TaskError(f"{folder} has no chat template: give data.chat=false and a data.template")

    def encode(prompt: str | Messages) -> Sequence[int]:
        try:
            return tokenizer.apply_chat_template(_said(data, prompt), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # whatever the template does
            raise TaskError(
                f"the chat template of {folder} failed ({line_of(error)}): correct it, or give data.chat=false"
            ) from None

    return encode


def _said(data: Data, prompt: Prompt) -> Messages:
    """The messages of a chat."""
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": data.template.replace("{prompt}", prompt)}]
    assert isinstance(prompt, list)
    return [*([] if prompt[0]["role"] == "system" else system), *prompt]


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    return read_json(path) if path.is_file() else {}
