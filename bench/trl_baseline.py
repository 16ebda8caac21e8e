"""The embedded task trained with TRL's ``GRPOTrainer``: what ``staleflow train`` is compared with on the same machine.

    python bench/trl_baseline.py                      # a table; some minutes on two cores
    python bench/trl_baseline.py --steps 20 --json    # the same as JSON

TRL is not a dependency of the project. Give it an environment of its own and run this file with that Python::

    python -m venv /tmp/trl-venv
    /tmp/trl-venv/bin/pip install -c constraints.txt -e '.[local]' trl==1.16.0
    /tmp/trl-venv/bin/python bench/trl_baseline.py

**What is equal**: base model, prompts and their order, verifier, 32 prompts with 8 responses per update, GRPO
advantages (within a group, n - 1), PPO clip 0.2 / 0.28, mean over the tokens of the batch, no KL, AdamW and its
warm-up, gradient clip, temperature, length cap, float32. The optimiser and its schedule are handed to TRL, because its
own warm-up begins with a step at rate 0.

**What is TRL's**: generation waits for the longest response of the batch, training waits for all of generation.

**The clock** starts when training does (imports, model and trainer are ready; ``setup_s`` says how long that took) and
stands still while held-out problems are answered. CPU seconds are counted beside it, for machines that are shared.

**What was tried** to make TRL fast, in runs of 2 to 10 steps on a shared machine, compared by CPU seconds. Two
processes of one thread (DDP, the default) need some 15 % less than one process, and each pads to its own longest.
Threads sleep while they wait (``OMP_WAIT_POLICY=passive``): beside other work, spinning cost several times the whole
step. Continuous batching took five times as long, bfloat16 autocast a quarter more; ``torch.compile`` did not win back
its compilation within 10 steps; a static cache and micro-batches of 32, 64 or 128 made no difference. Gradient
checkpointing, logs, saving and progress bars are off.

**Time to the goal** is the first crossing with one seed: run several before reading much into it.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from adder_accuracy import greedy_accuracy, load
from transformers import AutoTokenizer, TrainerCallback

from staleflow.tasks import adder
from staleflow.tasks.adder import Adder
from staleflow.tasks.base_model import base_model
from staleflow.tasks.prompts import TaskPrompts
from staleflow.tasks.recipes import Recipe
from staleflow.tasks.task import TaskError

INSTALL = "python -m venv /tmp/trl-venv && /tmp/trl-venv/bin/pip install -c constraints.txt -e '.[local]' trl==1.16.0"
GOAL = 0.9
RL_SEED = 1000
"""Added to the seed of the base model, so that reinforcement sees other problems than the warm start."""


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    """Updates done; 0 is the base model."""
    seconds: float
    samples: int
    accuracy: float | None
    """Held-out and greedy; None where it was not measured."""
    reward: float | None
    """The mean over the samples of this step."""
    generation_s: float
    """Within all seconds so far, of the first process; the rest is training, scoring and waiting for the others."""
    cpu_s: float
    tokens: int


class Clock:
    """Seconds of the wall, of the CPU and of generation; stands still within ``stopped``."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0
        self._since: tuple[float, float] | None = None
        self.generation_s = 0.0

    def start(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        if self._since is None:
            return self._wall, self._cpu
        wall, cpu = self._since
        return self._wall + time.perf_counter() - wall, self._cpu + time.process_time() - cpu

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._wall, self._cpu = self.read()
        self._since = None
        try:
            yield
        finally:
            self.start()

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            before = time.perf_counter()
            try:
                return generate(*arguments, **named)
            finally:
                self.generation_s += time.perf_counter() - before

        return wrapped


class Scorer:
    """The reward function that TRL calls, and what it has seen."""

    __name__ = "verify"

    def __init__(self, prompts: TaskPrompts) -> None:
        self.prompts = prompts
        self.samples = 0
        self.tokens = 0
        self.reward: float | None = None

    def __call__(self, number: list[int], completion_ids: list[list[int]], **_unused: Any) -> list[float]:
        verify, problem = self.prompts.task.verify, self.prompts.problem
        rewards = [verify(problem(at), tokens) for at, tokens in zip(number, completion_ids, strict=True)]
        self.samples += len(rewards)
        self.tokens += sum(map(len, completion_ids))
        self.reward = sum(rewards) / len(rewards)
        return rewards


class Watch(TrainerCallback):
    """Writes a line per update, and measures accuracy every few."""

    def __init__(self, model: Any, clock: Clock, scorer: Scorer, options: argparse.Namespace) -> None:
        self.model = model
        self.clock = clock
        self.scorer = scorer
        self.options = options
        self.steps: list[Step] = []

    def on_train_begin(self, *_unused: Any, **_named: Any) -> None:
        self.record(0)
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_named: Any) -> None:  # noqa: ARG002
        with self.clock.stopped():
            self.record(state.global_step)

    def record(self, step: int) -> None:
        seconds, cpu = self.clock.read()
        reward = self.scorer.reward
        samples, tokens, cpu, rewards = summed([self.scorer.samples, self.scorer.tokens, cpu, reward or 0.0])
        mean = None if reward is None else rewards / processes()
        accuracy = None
        if first_process():
            if step % self.options.eval_every == 0 or step == self.options.steps:
                accuracy = self.accuracy()
            made = Step(step, seconds, int(samples), accuracy, mean, self.clock.generation_s, cpu, int(tokens))
            self.steps.append(made)
            if not self.options.json:
                print(line(made), flush=True)
        summed([])  # nobody runs ahead while the clock stands still

    def accuracy(self) -> float:
        self.model.eval()
        found = greedy_accuracy(self.model, Adder(self.options.eval_seed), self.options.eval_problems)
        self.model.train()
        return found


# Several processes share an update as torchrun and DDP let them


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def summed(values: list[float]) -> list[float]:
    """Sums over all processes; waits for them."""
    if processes() == 1:
        return values
    total = torch.tensor([*values, 0.0], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.tolist()[:-1]


def start_processes(options: argparse.Namespace, arguments: list[str]) -> NoReturn:
    """Become torchrun, which starts this file once for each process."""
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    os.environ["OMP_NUM_THREADS"] = str(max(1, options.threads // options.processes))
    os.execv(sys.executable, [*runner, str(Path(__file__).resolve()), *arguments])


# Training


def train(trl: Any, options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    folder = base_model(options.cache_folder, Recipe(options.seed))
    began_setup = time.perf_counter()
    datasets = importlib.import_module("datasets")
    model: Any = load(folder).train()
    scorer, clock = Scorer(TaskPrompts(Adder(options.seed + RL_SEED))), Clock()
    numbers = range(options.prompts * options.steps)
    texts = [adder.text(scorer.prompts.problem(number).prompt) for number in numbers]  # pyright: ignore[reportArgumentType]
    model.generate = clock.timed(model.generate)
    model.generate_batch = clock.timed(model.generate_batch)
    watch = Watch(model, clock, scorer, options)
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / max(1, options.warmup)))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl.GRPOTrainer(
            model,
            scorer,
            trl.GRPOConfig(output_dir=scratch, **settings(options)),
            train_dataset=datasets.Dataset.from_dict({"prompt": texts, "number": list(numbers)}),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            optimizers=(optimiser, schedule),
            callbacks=[watch],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        torch.set_num_threads(threads(options))
        setup_s = time.perf_counter() - began_setup
        trainer.train()
    return result(trl, options, watch.steps, setup_s, began_setup - began) if first_process() else {}


def threads(options: argparse.Namespace) -> int:
    """Threads of one process."""
    return max(1, options.threads // options.processes)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings for TRL. Whatever costs time and does not change the update is off."""
    batch = options.prompts * options.responses
    return {
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": batch // options.micro_batch // options.processes,
        "num_generations": options.responses,
        "num_iterations": 1,
        "max_completion_length": options.max_tokens,
        "temperature": options.temperature,
        "epsilon": options.clip_low,
        "epsilon_high": options.clip_high,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": 0.0,
        "max_grad_norm": options.max_grad_norm,
        "shuffle_dataset": False,
        "use_transformers_continuous_batching": options.generation == "continuous",
        "cache_implementation": options.cache,
        "torch_compile": options.compile,
        "bf16": options.bf16,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "ddp_backend": "gloo" if options.processes > 1 else None,
        "ddp_find_unused_parameters": False,
        "seed": options.seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def result(trl: Any, options: argparse.Namespace, steps: list[Step], setup_s: float, base_s: float) -> dict[str, Any]:
    last = steps[-1]
    reached = (step.seconds for step in steps if step.accuracy is not None and step.accuracy >= GOAL)
    return {
        "steps": [asdict(step) for step in steps],
        "seconds_to_90": next(reached, None),
        "samples_per_s": last.samples / last.seconds,
        "tokens_per_s": last.tokens / last.seconds,
        "seconds_per_step": last.seconds / last.step,
        "generation_share": last.generation_s / last.seconds,
        "cpu_seconds_per_step": last.cpu_s / last.step,
        "setup_s": setup_s,
        "base_model_s": base_s,
        "trl_version": trl.__version__,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "settings": vars(options)
        | {"threads_used": torch.get_num_threads() * options.processes, "trl": settings(options)},
    }


# Output

HEADS = ("step", "seconds", "samples", "accuracy", "reward", "generation s", "CPU s", "tokens")


def line(step: Step) -> str:
    accuracy, reward = (f"{value:.3f}" if value is not None else "-" for value in (step.accuracy, step.reward))
    values = (step.step, f"{step.seconds:.1f}", step.samples, accuracy, reward, f"{step.generation_s:.1f}")
    return columns((*values, f"{step.cpu_s:.1f}", step.tokens))


def columns(values: tuple[object, ...]) -> str:
    return "".join(f"{value!s:>{max(9, len(head) + 2)}}" for value, head in zip(values, HEADS, strict=True))


def show(found: dict[str, Any]) -> None:
    to_90 = found["seconds_to_90"]
    print(
        f"\nTRL {found['trl_version']}, {found['settings']['threads']} thread(s): "
        f"{found['seconds_per_step']:.2f} s per step ({found['cpu_seconds_per_step']:.2f} s of CPU), "
        f"{100 * found['generation_share']:.0f} % of it generation; {found['samples_per_s']:.0f} samples/s, "
        f"{found['tokens_per_s']:,.0f} tokens/s"
    )
    print(f"{100 * GOAL:g} % held-out: {'not reached' if to_90 is None else f'{to_90:.1f} s'}")


# Options


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--steps", type=int, default=40, help="updates")
    add("--seed", type=int, default=0, help="of the base model, of the prompts (plus 1000) and of sampling")
    add("--threads", type=int, default=2, help="of all processes together")
    add("--processes", type=int, default=2, help="that share every update (DDP)")
    add("--cache-folder", type=Path, default=Path("/tmp/adder-cache"), help="where base models are kept")
    add("--prompts", type=int, default=32, help="per update")
    add("--responses", type=int, default=8, help="to each prompt")
    add("--learning-rate", type=float, default=5e-4)
    add("--warmup", type=int, default=5, help="steps")
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.95)
    add("--weight-decay", type=float, default=0.0)
    add("--max-grad-norm", type=float, default=1.0)
    add("--temperature", type=float, default=1.0)
    add("--max-tokens", type=int, default=120, help="of a response")
    add("--clip-low", type=float, default=0.2)
    add("--clip-high", type=float, default=0.28)
    add("--eval-every", type=int, default=1, help="steps from one measurement of accuracy to the next")
    add("--eval-problems", type=int, default=512)
    add("--eval-seed", type=int, default=0, help="of the held-out problems")
    add("--micro-batch", type=int, default=64, help="samples in one forward and backward pass")
    add("--generation", choices=("padded", "continuous"), default="padded")
    add("--cache", choices=("dynamic", "static"), default=None, help="KV cache of padded generation")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--compile", action="store_true", help="torch.compile the training pass")
    options = parser.parse_args(arguments)
    batch = options.prompts * options.responses
    for name in (
        "steps",
        "threads",
        "processes",
        "prompts",
        "eval_every",
        "eval_problems",
        "micro_batch",
        "max_tokens",
    ):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    if options.responses < 2:
        parser.error(f"--responses {options.responses}: a group needs 2 or more")
    share = batch // options.processes
    if batch % options.processes or share % options.micro_batch:
        parser.error(f"--micro-batch {options.micro_batch}: give a divisor of {share}, a process's samples per update")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.cache_folder = str(options.cache_folder)
    try:
        trl: Any = importlib.import_module("trl")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "trl":
            raise
        print(f"{sys.executable} has no trl: {INSTALL}, then run this file with its python", file=sys.stderr)
        return 2
    try:
        return run(trl, options, sys.argv[1:] if arguments is None else arguments)
    except TaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(trl: Any, options: argparse.Namespace, arguments: list[str]) -> int:
    if options.processes != processes():
        base_model(options.cache_folder, Recipe(options.seed))  # once, and not in each of them
        start_processes(options, arguments)
    torch.set_num_threads(threads(options))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if first_process() and not options.json:
        print(columns(HEADS))
    found = train(trl, options)
    if first_process() and options.json:
        print(json.dumps(found, indent=2))
    elif first_process():
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
