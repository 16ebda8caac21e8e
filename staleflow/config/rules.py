"""Rules across the sections of a configuration. Pure: the machine is not looked at.

Rules within a section are the section's own, checked when it is made.
"""

from collections.abc import Iterator

from staleflow.config import cluster
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.tasks.adder import VOCABULARY
from staleflow.tasks.options import ADDER, CALCULATOR, GYM
from staleflow.training.options import ADVANTAGES


def refuse_values(config: Config) -> None:
    """``ConfigError`` for the first rule that is broken, in one line with the fix."""
    for problem in problems(config):
        raise ConfigError(problem)


def problems(config: Config) -> Iterator[str]:
    yield from cluster.problems(config)
    rollout, training, headroom = config.rollout, config.training, config.strategies.headroom
    longest = config.longest_prompt + config.longest_response
    given = f", environment.max_given={config.environment.max_given}" if config.environment.play else ""
    if rollout.kv_tokens < longest + headroom:
        yield (
            f"rollout.kv_tokens={rollout.kv_tokens} cannot hold a prompt of {config.longest_prompt} tokens, a response "
            f"of rollout.max_tokens={rollout.max_tokens}{given} and strategies.headroom={headroom}: give "
            f"{longest + headroom} or more"
        )
    if rollout.max_running > rollout.kv_tokens:
        yield (
            f"rollout.max_running={rollout.max_running} is more than the tokens of rollout.kv_tokens: give at most "
            f"{rollout.kv_tokens}"
        )
    if training.overlong_buffer > rollout.max_tokens:
        yield (
            f"training.overlong_buffer={training.overlong_buffer} is longer than a response: give at most "
            f"{rollout.max_tokens}, which is rollout.max_tokens"
        )
    if training.updates_per_step > config.groups:
        yield (
            f"training.updates_per_step={training.updates_per_step} is more than the groups of a step: give at most "
            f"{config.groups}"
        )
    advantage = ADVANTAGES.entries.get(training.advantage)
    if config.group_size == 1 and advantage is not None and advantage.scope == "group":
        yield (
            f"training.advantage={training.advantage} compares members of a group, and group_size=1: give 2 or more, "
            "or training.advantage=reinforce++"
        )


def mismatches(config: Config, vocabulary: int) -> Iterator[str]:
    """Model, data and reward that do not belong together. To be asked once each is known to exist."""
    data = config.data
    if data.source == ADDER and config.model != ADDER and vocabulary != len(VOCABULARY):
        yield f"data.source=adder has its own tokens, which model={config.model} does not know: give data.source"
    if data.chat and data.source == ADDER:
        yield "data.chat=true, but data.source=adder has no text to chat with: leave it out, or give data.source"
    if config.model == ADDER and data.source != ADDER:
        yield f"model=adder knows nothing but its own task, not data.source={data.source}: give a model"
    if config.model == CALCULATOR and data.source != CALCULATOR:
        yield f"model=calculator knows nothing but its own task, not data.source={data.source}: give a model"
    if config.environment.play == CALCULATOR and data.source != CALCULATOR:
        yield f"environment.play=calculator plays its own task, not data.source={data.source}: give another"
    if config.environment.play is not None:
        if not data.chat:
            yield "environment.play is given, and its conversations need a chat template: give data.chat=true"
        return
    if data.source == CALCULATOR:
        yield "data.source=calculator is played, and not only answered: give environment.play=calculator"
    if ADDER in config.reward.functions and data.source != ADDER:
        yield f"reward.function=adder cannot score data.source={data.source}: give a reward such as last-number"
    if "reasoning-gym" in config.reward.functions and not data.source.startswith(GYM):
        yield f"reward.function=reasoning-gym scores its own tasks: give data.source={GYM}NAME"
