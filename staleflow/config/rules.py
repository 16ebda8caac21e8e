"""What the values of a configuration must be, by themselves and together. Pure: nothing of the machine is looked at."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from staleflow.config.schema import ADDER, Config
from staleflow.errors import ConfigError
from staleflow.tasks.adder import VOCABULARY

AT_LEAST: dict[int, tuple[str, ...]] = {
    0: (
        *("staleness", "redundancy", "extra_members", "seed"),
        *("rollout.temperature", "rollout.top_k", "rollout.min_p"),
        *("training.overlong_buffer", "training.overlong_penalty", "training.entropy_coefficient"),
        *("training.kl_coefficient", "training.value_coefficient", "training.value_clip", "training.warmup_steps"),
        *("training.weight_decay", "training.lora_rank", "training.lora_seed", "training.gamma", "training.gae_lambda"),
        *("training.eps_low", "training.eps_high"),
        *("evaluation.every", "evaluation.temperature", "checkpoints.every", "checkpoints.keep"),
    ),
    1: (
        *("steps", "groups", "group_size", "data.max_prompt_tokens", "data.epochs", "reward.workers", "reward.tries"),
        *("rollout.instances", "rollout.max_tokens", "rollout.kv_tokens", "rollout.max_running"),
        *("rollout.prefill_tokens", "training.updates_per_step", "training.micro_tokens", "evaluation.problems"),
        *("processes.threads", "data.held_out_count"),
    ),
}
AT_MOST: dict[str, float] = {
    **{"rollout.top_p": 1, "rollout.min_p": 1, "training.gamma": 1, "training.gae_lambda": 1, "training.eps_low": 1},
    "stop_at": 1,
    **{"evaluation.problems": 1_000_000, "processes.threads": 1024},
}
ABOVE_ZERO = (
    *("reward.timeout_s", "rollout.top_p", "training.learning_rate", "training.value_learning_rate"),
    *("training.clip_norm", "training.importance_cap", "training.lora_alpha", "stop_at"),
)
LARGEST = 2**53
"""Whole numbers above it do not survive every format they pass through."""
UNBOUNDED = ("clip_norm", "importance_cap", "sequence_band", "eps_high")
"""Where .inf turns something off."""
DUAL_CLIPPED = ("ppo", "dapo")
DEVICE = re.compile(r"cpu|cuda(?::\d+)?")
WHITENED = "reinforce++"
EMBEDDINGS = {"embed_tokens", "lm_head"}


def refuse_values(config: Config) -> None:
    """Raise the first thing that is wrong, in one line with the fix."""
    for problem in problems(config):
        raise ConfigError(problem)


def problems(config: Config) -> Iterator[str]:
    yield from _not_finite("", config)
    for least, names in AT_LEAST.items():
        for name in names:
            value = value_of(config, name)
            if value is not None and value < least:
                yield f"{name}={value} is too low: give {least} or more"
    for name, most in AT_MOST.items():
        value = value_of(config, name)
        if value is not None and value > most:
            yield f"{name}={value} is too high: give at most {most}"
    for name in ABOVE_ZERO:
        value = value_of(config, name)
        if value is not None and not value > 0:
            yield f"{name}={value} is too low: give a number above 0"
    yield from _steps(config)
    yield from _data(config)
    yield from _rollout(config)
    yield from _training(config)


def value_of(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def _not_finite(prefix: str, section: Any) -> Iterator[str]:
    for each in fields(section):
        value: Any = getattr(section, each.name)
        if is_dataclass(value):
            yield from _not_finite(f"{each.name}.", value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and (
                math.isnan(number) or (math.isinf(number) and each.name not in UNBOUNDED)
            ):
                yield f"{prefix}{each.name}={number} is not finite: give a number"
            if isinstance(number, int) and abs(number) > LARGEST:
                yield f"{prefix}{each.name}={number} is out of range: give at most {LARGEST}"


def _steps(config: Config) -> Iterator[str]:
    if config.redundancy >= config.groups:
        yield (
            f"redundancy={config.redundancy} drops a whole step for each that is trained: give at most "
            f"{config.groups - 1}, as groups={config.groups}"
        )
    if config.extra_members and config.extra_members >= config.group_size:
        yield (
            f"extra_members={config.extra_members} drops as much as group_size={config.group_size} keeps: give at most "
            f"{config.group_size - 1}"
        )
    if config.filter == "no-signal" and config.group_size == 1:
        yield "filter=no-signal drops every group of one: give group_size=2 or more, or filter=none"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if "{prompt}" not in data.template:
        yield "data.template has no {prompt}: write it where the prompt goes"
    if data.system is not None and not data.chat:
        yield "data.system is given without a chat: write data.chat=true, or put it into data.template"
    if data.chat and data.source == ADDER:
        yield "data.chat=true, but data.source=adder has no text to chat with: leave it out, or give data.source"
    if data.held_out is not None and data.held_out_count is not None:
        yield "data.held_out and data.held_out_count are both given: leave one out"


def mismatches(config: Config, vocabulary: int) -> Iterator[str]:
    """Model, data and reward that do not belong together. Asked once it is known that each exists."""
    data = config.data
    if data.source == ADDER and config.model != ADDER and vocabulary != len(VOCABULARY):
        yield f"data.source=adder has its own tokens, which model={config.model} does not know: give data.source"
    if config.model == ADDER and data.source != ADDER:
        yield f"model=adder knows nothing but its own task, not data.source={data.source}: give a model"
    if config.reward.function == ADDER and data.source != ADDER:
        yield f"reward.function=adder cannot score data.source={data.source}: give a reward such as last-number"
    if config.reward.function == "reasoning-gym" and not data.source.startswith("reasoning-gym:"):
        yield "reward.function=reasoning-gym scores its own tasks: give data.source=reasoning-gym:NAME"


def _rollout(config: Config) -> Iterator[str]:
    rollout, headroom = config.rollout, config.strategies.headroom
    if "" in rollout.stop_strings:
        yield "rollout.stop_strings has an empty text: remove it"
    if rollout.temperature == 0:
        yield "rollout.temperature=0 gives every member of a group the same response: give a number above 0, such as 1"
    longest = config.longest_prompt + rollout.max_tokens
    if rollout.kv_tokens < longest + headroom:
        yield (
            f"rollout.kv_tokens={rollout.kv_tokens} cannot hold a prompt of {config.longest_prompt} tokens, a response "
            f"of rollout.max_tokens={rollout.max_tokens} and strategies.headroom={headroom}: give "
            f"{longest + headroom} or more"
        )
    if rollout.max_running > rollout.kv_tokens:
        yield (
            f"rollout.max_running={rollout.max_running} is more than the tokens of rollout.kv_tokens: give at most "
            f"{rollout.kv_tokens}"
        )
    for name, device in (("rollout.device", rollout.device), ("training.device", config.training.device)):
        if not DEVICE.fullmatch(device):
            yield f"{name}={device} is unknown: give cpu, cuda or cuda:0"


def _training(config: Config) -> Iterator[str]:
    training = config.training
    low, high = training.sequence_band
    if not 0 < low <= 1 <= high:
        yield f"training.sequence_band=[{low:g}, {high:g}]: give 0 < low <= 1 <= high, such as [0.5, 2]"
    if not all(0 <= beta < 1 for beta in training.betas):
        yield f"training.betas={list(training.betas)}: give two numbers from 0 to below 1, such as [0.9, 0.95]"
    if training.dual_clip is not None and not training.dual_clip > 1:
        yield f"training.dual_clip={training.dual_clip}: give a ratio above 1, such as 3"
    if training.dual_clip is not None and training.loss not in DUAL_CLIPPED:
        yield f"training.loss={training.loss} has no dual_clip: leave it out, or give one of {', '.join(DUAL_CLIPPED)}"
    if training.overlong_buffer > config.rollout.max_tokens:
        yield (
            f"training.overlong_buffer={training.overlong_buffer} is longer than a response: give at most "
            f"{config.rollout.max_tokens}, which is rollout.max_tokens"
        )
    if training.lora_rank and training.train_only:
        yield "training.lora_rank and training.train_only are both given: LoRA trains its adapters alone, leave one out"
    if training.lora_rank and not training.lora_targets:
        yield "training.lora_targets is empty: name a matrix such as q_proj, or leave training.lora_rank at 0"
    if embedded := sorted(EMBEDDINGS & set(training.lora_targets)):
        yield f"training.lora_targets has {', '.join(embedded)}: adapt matrices inside the layers, such as q_proj"
    if training.value_learning_rate is not None and training.advantage != "gae":
        yield "training.value_learning_rate is given without a value head: give training.advantage=gae, or leave it out"
    if training.whiten_advantages and training.advantage == WHITENED:
        yield f"training.advantage={WHITENED} is whitened already: leave training.whiten_advantages out"
    if training.updates_per_step > config.groups:
        yield (
            f"training.updates_per_step={training.updates_per_step} is more than the groups of a step: give at most "
            f"{config.groups}"
        )
    if config.group_size == 1 and training.advantage in ("grpo", "dr_grpo", "rloo"):
        yield (
            f"training.advantage={training.advantage} compares members of a group, and group_size=1: give 2 or more, "
            "or training.advantage=reinforce++"
        )
