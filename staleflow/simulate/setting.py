"""What is simulated: a flat, frozen value made from the configuration, easy to vary from trial to trial.

setting = setting_of(load("run.yaml"), "run.yaml")
preset("paper-14b", "lengths=long")                 # the same of a preset, with changes
replace(setting, staleness=1), with_split(setting, training_gpus=16)
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, fields, replace

from staleflow.config import Config, load
from staleflow.config.costs import engine_costs, least_training_gpus, training_cost, weight_bytes
from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.simulate.lengths import (
    Bimodal,
    Constant,
    Distribution,
    Lognormal,
    PowerLaw,
    Uniform,
    servegen_r1_output,
)
from staleflow.simulate.trace import Trace, read_trace
from staleflow.simulate.trainer import TrainerCost
from staleflow.simulate.workload import Sampled, Source, Workload

BLOCK = 16
"""Tokens in a block of KV memory."""
BETWEEN = 0.7
"""Assumed: the share of the variance of lengths between prompts."""
R1 = {"independent": 1.0, "correlated": 1.0, "long": 4.0}
"""Lengths of R1 serving (mean 1.5K), and a factor on them. Assumed: 4 makes them those of a mathematics run (5.1K)."""
R1_MEAN = 1527.4
DISTRIBUTIONS: dict[str, Callable[[float], Distribution]] = {
    "lognormal": lambda mean: Lognormal.from_mean(mean, 1.0),
    "powerlaw": lambda mean: PowerLaw(mean / 3, 1.5),
    "bimodal": lambda mean: Bimodal(mean / 2, 3 * mean, 0.2),
    "uniform": lambda mean: Uniform(1, max(1.0, 2 * mean - 1)),
    "constant": Constant,
}
"""Distributions of a given mean."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a simulated run depends on, but for its seed and its faults.

    A field means what the setting of that name means at the top of the configuration, or in ``rollout`` or ``cluster``.
    """

    name: str
    workload: Workload
    groups: int
    group_size: int
    staleness: int
    steps: int
    redundancy: int
    extra_members: int
    filter: str
    instances: int
    gpus_per_instance: int
    training_gpus: int
    rollout: CostModel
    """Cost of engine steps."""
    kv_tokens: int
    max_running: int
    prefill_tokens: int
    weight_bytes: float
    link_bandwidth: float
    total_bandwidth: float
    trainer_per_token_gpu_s: float
    trainer_fixed_s: float
    push_s: float
    reshard_s: float
    """In each step, where GPUs generate and train in turn."""
    reward_s: float
    reward_success: float
    speed_spread: float
    prompts: int | None
    cycle_s: float
    strategies: Strategies
    turns: int = 1
    tool_s: float = 0.0
    tool_tokens: int = 0
    believed: CostModel | None = None
    """What the coordinator believes engine steps to cost; None: what they do cost."""
    least_training_gpus: int = field(default=1, repr=False)
    """That hold the trainer's state."""

    @property
    def gpus(self) -> int:
        return self.instances * self.gpus_per_instance + self.training_gpus

    @property
    def trainer(self) -> TrainerCost:
        return TrainerCost(self.trainer_per_token_gpu_s / self.training_gpus, self.trainer_fixed_s, self.push_s)

    @property
    def given_tokens(self) -> int:
        """Tokens that environments give to a trajectory, in all turns."""
        return (self.turns - 1) * self.tool_tokens

    def check(self) -> None:
        """Refuse a setting whose longest trajectory does not fit an empty instance, or could not be routed there."""
        longest, headroom = self.longest(), self.strategies.headroom
        blocks = -(-(longest + headroom) // BLOCK)
        if self.kv_tokens // BLOCK < blocks:
            raise ConfigError(
                f"rollout.kv_tokens={self.kv_tokens} cannot hold the longest trajectory of {longest} tokens and "
                f"strategies.headroom={headroom}: give {blocks * BLOCK} or more, or a lower rollout.max_tokens"
            )

    def longest(self) -> int:
        """Tokens of the longest trajectory, prompt and output: of a trace as recorded, otherwise at the cap."""
        return self._longest() + self.given_tokens

    def _longest(self) -> int:
        workload, source = self.workload, self.workload.source
        if isinstance(source, Trace):
            last = self.steps if workload.drift > 0 else 0
            return max(
                prompt + workload.length(index, rows.index(max(rows)), version=last)
                for index, (prompt, rows) in enumerate(zip(source.prompts, source.outputs, strict=True))
            )
        return max(workload.prompt_tokens(index) for index in range(256)) + workload.max_tokens


# From the configuration


def setting_of(config: Config, name: str, source: Source | None = None) -> Setting:
    """The setting that the configuration describes. ``source``: lengths that are known otherwise."""
    if config.filter not in ("none", "no-signal"):
        raise ConfigError(f"filter={config.filter} cannot be simulated: give none or no-signal")
    sections = (config, config.rollout, config.cluster)
    same = {
        each.name: getattr(section, each.name)
        for section in sections
        for each in fields(Setting)
        if hasattr(section, each.name)
    }
    made = {
        "name": name,
        "workload": _workload(config, source),
        "rollout": engine_costs(config),
        "weight_bytes": weight_bytes(config),
        "trainer_per_token_gpu_s": training_cost(config),
        "least_training_gpus": least_training_gpus(config),
    }
    return Setting(**same | made)


def preset(name: str, *overrides: str) -> Setting:
    return setting_of(load(name, overrides), name)


def assumptions(config: Config, setting: Setting) -> list[str]:
    """What the configuration leaves open and is assumed, and what it cuts off; each with what to write instead."""
    cluster, found, workload = config.cluster, list[str](), setting.workload
    if isinstance(workload.source, Trace):
        uncut = replace(workload, max_tokens=10**9)
        if cut := sum(share for share, tokens in uncut.spread() if tokens > workload.max_tokens):
            found.append(f"rollout.max_tokens={workload.max_tokens} cuts off {cut:.1%} of the recorded responses: give "
                         "a higher one to keep them whole")  # fmt: skip
        if not workload.source.has_prompts and cluster.prompt_tokens is None:
            found.append(f"{cluster.trace} has no prompt_tokens, so prompts have the {config.longest_prompt} tokens "
                         "that they may have: give cluster.prompt_tokens")  # fmt: skip
    elif cluster.lengths not in R1:
        spread = f"{cluster.lengths} lengths with a mean of {_mean(config):,.0f} tokens"
        found.append(f"{spread} are assumed: give cluster.lengths and cluster.mean_tokens, or --trace")
    if cluster.profile is None and not cluster.costs:
        where = "" if cluster.gpu is None else f" on {cluster.gpu}"
        found.append(f"engine steps cost what the model's geometry suggests{where}: measure them with staleflow "
                     "profile, and give --profile")  # fmt: skip
    if cluster.trainer_per_token_gpu_s is None:
        found.append("training costs what the model's geometry suggests: give cluster.trainer_per_token_gpu_s")
    return found


def _workload(config: Config, source: Source | None) -> Workload:
    cluster, factor = config.cluster, 1.0
    prompt_tokens = cluster.prompt_tokens or config.longest_prompt
    if source is None and cluster.trace is not None:
        source = read_trace(cluster.trace, config.group_size, prompt_tokens)
    elif source is None:
        default = 0.0 if cluster.lengths == "independent" else BETWEEN
        source = Sampled(
            servegen_r1_output() if cluster.lengths in R1 else DISTRIBUTIONS[cluster.lengths](_mean(config)),
            prompt=Constant(prompt_tokens),
            between=default if cluster.between is None else cluster.between,
        )
        if cluster.lengths in R1:
            factor = cluster.mean_tokens / R1_MEAN if cluster.mean_tokens else R1[cluster.lengths]
    return Workload(source, config.rollout.max_tokens, factor * cluster.scale, cluster.drift)


def _mean(config: Config) -> float:
    return config.cluster.mean_tokens or config.rollout.max_tokens / 4


# Changes


def with_split(setting: Setting, training_gpus: int) -> Setting:
    """The same GPUs with this many of them for training; instances are whole, so a few GPUs may stay unused."""
    instances = (setting.gpus - training_gpus) // setting.gpus_per_instance
    if training_gpus < 1 or instances < 1:
        raise ConfigError(
            f"cluster.training_gpus={training_gpus} of {setting.gpus} leaves no instance of "
            f"{setting.gpus_per_instance} GPUs: give 1 to {setting.gpus - setting.gpus_per_instance}"
        )
    return replace(setting, instances=instances, training_gpus=training_gpus)


def with_gpus(setting: Setting, gpus: int, given: Set[str]) -> Setting:
    """The setting on another number of GPUs. Parts in ``given`` keep their size; otherwise the proportion stays."""
    size, least = setting.gpus_per_instance, setting.least_training_gpus
    if gpus < size + least:
        trainer = "a trainer" if least == 1 else f"a trainer of {least}"
        raise ConfigError(
            f"--gpus {gpus} are too few for an instance of {size} and {trainer}: give {size + least} or more"
        )
    fixed = given & {"rollout.instances", "cluster.training_gpus"}
    if len(fixed) == 2 and setting.gpus != gpus:
        raise ConfigError(
            f"rollout.instances={setting.instances} of {size} and cluster.training_gpus={setting.training_gpus} are "
            f"{setting.gpus} GPUs, not --gpus {gpus}: leave one of the three out"
        )
    training = setting.training_gpus
    if "rollout.instances" in fixed:
        training = gpus - setting.instances * size
    elif not fixed:
        instances = round(gpus * setting.instances * size / setting.gpus / size)
        training = gpus - min(max(1, instances), (gpus - least) // size) * size
    return with_split(replace(setting, instances=1, training_gpus=gpus - size), training)


def with_strategies(setting: Setting, **changes: object) -> Setting:
    return replace(setting, strategies=replace(setting.strategies, **changes))
