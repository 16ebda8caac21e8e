"""TRL's ``GRPOTrainer`` on the workloads of ``system.py``, with transformers generation or with vLLM: for comparison.

    python bench/gpu/trl_grpo.py --output system.json --workload smollm          # needs trl, in any way Python finds it
    python bench/gpu/trl_grpo.py --output system.json --workload skewed --generating 60
    python bench/gpu/trl_grpo.py --output system.json --vllm                     # TRL generates with vLLM, colocated
    python bench/gpu/trl_grpo.py --output system.json --vllm --workload skewed --steps 3
    python bench/gpu/trl_grpo.py --smoke                                         # a tiny model on the CPU

Equal are model, prompts, 32 prompts with 8 responses, lengths (imposed in the skewed workload, as there), GRPO without
a reference model, AdamW with float32 weights, and bfloat16 for products. Of TRL: generation waits for the longest
response of the batch (with transformers: with all rows), training waits for generation, and all rows are padded to the
longest of the batch. The first step is not counted, unless it is the only one. ``datasets``, if it is not installed, is
replaced by a list: only prompts are in it.

``--generating S``: stop transformers' generation of the first batch after so many seconds, and say how many tokens a
second could have been trained at most, if the rest of it and training took no time.
"""

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from bench import amounts, kept
from bench.gpu import skewed
from bench.gpu.lab import Results
from staleflow.rollout.shapes import SHAPES
from staleflow.tasks.arithmetic import problems
from staleflow.tasks.smollm import smollm

GROUPS, SIZE = 32, 8
PROMPT = 256
"""No prompt has more tokens than this."""


class Rows(list[dict[str, Any]]):
    """What stands for a ``datasets.Dataset``."""

    column_names = ("prompt",)
    cache_files = ()


class Missing(types.ModuleType):
    """A package that is not installed, of which only names are needed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Rows if name == "Dataset" else type(name, (), {})


def rows_of(prompts: list[Any]) -> Any:
    """What TRL takes as a data set."""
    rows = [{"prompt": each} for each in prompts]
    datasets: Any = importlib.import_module("datasets")
    return Rows(rows) if isinstance(datasets, Missing) else datasets.Dataset.from_list(rows)


def without_datasets() -> None:
    """Let TRL import ``datasets`` and what that brings along, where they are not installed."""
    for package, parts in (("datasets", ("fingerprint",)), ("pandas", ()), ("pyarrow", ("compute", "types"))):
        if importlib.util.find_spec(package) is None:
            sys.modules |= {name: Missing(name) for name in (package, *(f"{package}.{part}" for part in parts))}


class Limits:
    """Lengths of the skewed workload in the order in which TRL asks: all responses to a prompt, then the next one's."""

    def __init__(self, mean: int, longest: int) -> None:
        self._mean, self._longest, self._taken = mean, longest, 0
        self.last: list[int] = []
        """Of the batch that was asked for last."""

    def take(self, count: int) -> list[int]:
        names = [f"p{at // SIZE}/{at % SIZE}" for at in range(self._taken, self._taken + count)]
        self._taken += count
        self.last = [skewed.length(name, self._mean, self._longest) for name in names]
        return self.last

    def check(self, responses: list[list[int]]) -> None:
        if (found := [*map(len, responses)]) != self.last:
            raise RuntimeError(f"lengths are not those that were imposed: {found[:8]}, not {self.last[:8]}")


class StoppedError(Exception):
    def __init__(self, made: int) -> None:
        """Generation was ended with this many tokens of the longest response."""
        self.made = made


class Lengths(LogitsProcessor):
    """Each row ends where its trajectory of the skewed workload does, and nowhere else."""

    def __init__(self, limits: list[int], end: int, device: str) -> None:
        self._limits, self._end, self.made = torch.tensor(limits, device=device), end, 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ARG002
        self.made += 1
        over = self._limits[: len(scores)] <= self.made
        column = scores[:, self._end].masked_fill(~over, -torch.inf)
        scores = scores.masked_fill(over[:, None], -torch.inf)
        scores[:, self._end] = torch.where(over, 0.0, column)
        return scores


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_end(self, *_unused: Any, **_named: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter())


def words_of(number: int) -> str:
    """A prompt of the skewed workload, as text of as many tokens."""
    return " ".join(f"w{(number + 7919 * at) % 500}" for at in range(128))


def tokenizer_of(folder: Path, size: int) -> Any:
    """One word for each token; the second id ends a response. It is saved in the folder, where vLLM looks for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "[END]": 1} | {f"w{n}": n + 2 for n in range(size - 2)}
    made = Tokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[attr-defined]
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="[END]", pad_token="[END]", unk_token="[UNK]", padding_side="left"
    )
    found.save_pretrained(folder)
    return found


def in_vllm(longest: int) -> dict[str, Any]:
    """TRL's settings for vLLM in its own process, on the card of the trainer."""
    sizes = {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": PROMPT + longest}
    return {"use_vllm": True, "vllm_mode": "colocate", **sizes}


def impose(llm: Any, limits: Limits) -> None:
    """Each request of vLLM's ends where its trajectory does, and nowhere else.

    TRL asks for all rows of a step at once, a prompt as often as it is to have responses.
    """
    plain = llm.generate

    def generate(prompts: list[Any], sampling_params: Any, **named: Any) -> Any:
        def own(most: int) -> Any:
            found = sampling_params.clone()
            found.max_tokens, found.ignore_eos = most, True
            return found

        return plain(prompts, [own(most) for most in limits.take(len(prompts))], **named)

    llm.generate = generate


def measured(
    workload: str, shape: str, runs: Path, steps: int, longest: int, smoke: bool, vllm: bool, most_s: float | None
) -> dict[str, Any]:
    without_datasets()
    trl: Any = importlib.import_module("trl")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = (2 if smoke else GROUPS) * steps
    limits = Limits(8 if smoke else 256, longest) if workload == "skewed" else None
    if limits is None:
        folder = smollm(runs / "cache")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        asked = problems(digits=1, operations="+-*")
        texts = (asked[at % len(asked)]["prompt"] for at in range(count))
        rows = rows_of([[{"role": "user", "content": text}] for text in texts])
    else:
        folder = skewed.model(shape, runs / f"{shape}-trl")  # its own, for its tokenizer is
        tokenizer = tokenizer_of(folder, SHAPES[shape]["vocab_size"])
        rows = rows_of([words_of(at) for at in range(count)])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    batch = (2 if smoke else GROUPS) * SIZE
    tokens, plain, generating = [0], model.generate, list[float]()

    def generate(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        lengths = None
        if limits is not None and not vllm:
            lengths = Lengths(limits.take(batch), tokenizer.eos_token_id, device)
            named |= {"logits_processor": [lengths], "max_time": most_s}
        found = plain(*given, **named)
        generating.append(time.perf_counter() - began)
        if lengths is not None and limits is not None and lengths.made < max(limits.last):
            raise StoppedError(lengths.made)
        return found

    def reward(completion_ids: list[list[int]], **_unused: Any) -> list[float]:
        if limits is not None:
            limits.check(completion_ids)
        tokens.append(sum(map(len, completion_ids)))
        return [float(sum(each) % 2) for each in completion_ids]

    model.generate = generate
    clock = Clock()
    micro = 16 if smoke else 64 if workload == "smollm" else 4
    with tempfile.TemporaryDirectory() as scratch:
        options = trl.GRPOConfig(
            output_dir=scratch, max_steps=steps, per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro, num_generations=SIZE, max_completion_length=longest,
            temperature=1.0, beta=0.0, loss_type="dapo", learning_rate=1e-9, bf16=device == "cuda",
            use_cpu=device == "cpu", gradient_checkpointing=False, shuffle_dataset=False, save_strategy="no",
            logging_strategy="no", report_to="none", disable_tqdm=True,
            **(in_vllm(longest) if vllm else {}),
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model, reward, options, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]
        )
        if vllm:
            plain = trainer.vllm_generation.generate
            trainer.vllm_generation.generate = generate
            if limits is not None:
                impose(trainer.vllm_generation.llm, limits)
        began = time.perf_counter()
        try:
            trainer.train()
        except StoppedError as stopped:
            assert limits is not None
            took, made, every = generating[-1], stopped.made, limits.last
            rest = {"longest": max(every), "tokens_per_s_at_most": sum(every) / took}
            return {"trl": trl.__version__, "stopped_after_s": round(took, 3), "made_of_longest": made, **rest}
    marks = [began, *clock.steps]
    counted, seconds = sum(tokens[2:]), marks[-1] - marks[1]
    if steps == 1:  # there is no other to count
        counted, seconds = sum(tokens), marks[-1] - marks[0]
    return {
        "trl": trl.__version__,
        "steps": steps,
        "step_s": [round(b - a, 3) for a, b in pairwise(marks)],
        "generation_s": [round(each, 3) for each in generating],
        "tokens": tokens[1:],
        "tokens_per_s": counted / seconds,
        "generation_share": sum(generating) / (marks[-1] - marks[0]),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "staleflow-system")
    parser.add_argument("--workload", choices=("skewed", "smollm"), default="smollm")
    parser.add_argument("--shape", default="qwen-0.5b")
    parser.add_argument("--steps", type=amounts.count, default=6)
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in this process")
    parser.add_argument(
        "--generating", type=amounts.amount, help="seconds after which transformers' generation is stopped (skewed)"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    given = parser.parse_args(arguments)
    results = Results(given.output)
    results.head()
    shape, steps = ("tiny", 2) if given.smoke else (given.shape, given.steps)
    workload = "skewed" if given.smoke else given.workload
    longest = 16 if given.smoke else 256 if workload == "smollm" else 4096
    kind = f"skewed {shape}" if workload == "skewed" else workload
    name = f"{kind}, TRL{' with vLLM' if given.vllm else ''}"
    how = (workload, shape, given.runs, steps, longest, given.smoke, given.vllm, given.generating)
    results.measure(name, lambda: measured(*how))
    print(json.dumps(results.found.get(name)))
    return results.found


if __name__ == "__main__":
    main()
