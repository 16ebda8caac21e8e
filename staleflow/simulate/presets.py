"""Clusters and workloads to simulate, by name. What a source does not state is an assumption, and is marked so."""

from dataclasses import dataclass, field, replace

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.simulate.trainer import TrainerCost
from staleflow.simulate.workload import Sampled, Trace, Workload, servegen_r1

BLOCK = 16
"""Tokens in a block of KV memory."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a simulated run depends on, but for its seed and its faults."""

    name: str
    workload: Workload
    groups: int
    """Groups for each step."""
    group_size: int
    staleness: int
    instances: int
    gpus_per_instance: int
    training_gpus: int
    rollout: CostModel
    kv_tokens: int
    """KV memory of an instance."""
    weight_bytes: float
    trainer_per_token_gpu_s: float
    """GPU seconds to train one token, prompt or output."""
    max_running: int = 256
    chunk: int = 2048
    redundancy: int = 0
    extra_members: int = 0
    steps: int = 20
    trainer_fixed_s: float = 0.0
    push_s: float = 0.0
    link_bandwidth: float = 40e9
    total_bandwidth: float = 1e15
    reward_s: float = 0.0
    reward_success: float = 0.5
    filter_uniform: bool = False
    """Release groups whose rewards are all equal."""
    speed_spread: float = 0.0
    """Instances run at speeds between 1 - this and 1 + this."""
    prompts: int | None = None
    """Length of the data; None: endless."""
    cycle_s: float = 1.0
    strategies: Strategies = field(default_factory=Strategies)

    @property
    def gpus(self) -> int:
        return self.instances * self.gpus_per_instance + self.training_gpus

    @property
    def trainer(self) -> TrainerCost:
        return TrainerCost(self.trainer_per_token_gpu_s / self.training_gpus, self.trainer_fixed_s, self.push_s)

    def check(self) -> None:
        """Refuse what cannot run, with one line that says what to change."""
        for names, least, instead in LIMITS:
            for name in names:
                if not least <= getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)} is impossible; give {instead}")
        self._check_surplus()
        self._check_rewards()
        self._check_memory()
        if self.prompts is not None and self.prompts < self.groups * self.steps:
            raise ConfigError(
                f"prompts={self.prompts} are too few for {self.steps} steps of {self.groups} groups; "
                f"give {self.groups * self.steps} or more, or fewer steps"
            )

    def _check_surplus(self) -> None:
        if self.redundancy >= self.groups:
            raise ConfigError(
                f"redundancy={self.redundancy} starts and drops a whole step of groups={self.groups} for each that is "
                f"trained; give at most {self.groups - 1}, or staleness={self.staleness + 1} to start a step earlier"
            )
        if self.extra_members and self.extra_members >= self.group_size:
            raise ConfigError(
                f"extra_members={self.extra_members} drops at least as much as group_size={self.group_size} keeps; "
                f"give at most {self.group_size - 1}"
            )

    def _check_rewards(self) -> None:
        if not 0 <= self.speed_spread < 1:
            raise ConfigError(f"speed_spread={self.speed_spread} is impossible; give a share from 0 to below 1")
        if not 0 <= self.reward_success <= 1:
            raise ConfigError(f"reward_success={self.reward_success} is impossible; give a share from 0 to 1")
        if self.filter_uniform and (self.group_size == 1 or self.reward_success in (0, 1)):
            raise ConfigError(
                f"filter_uniform drops every group with group_size={self.group_size} and "
                f"reward_success={self.reward_success:g}; give 2 or more and a share between 0 and 1, or no filter"
            )

    def _check_memory(self) -> None:
        """Any trajectory must fit an empty instance as long as it may get, and be routable until then."""
        longest, headroom = self.longest(), self.strategies.headroom
        blocks = -(-(longest + headroom) // BLOCK)
        if self.kv_tokens // BLOCK < blocks:
            raise ConfigError(
                f"kv_tokens={self.kv_tokens} cannot hold the longest trajectory of {longest} tokens "
                f"and headroom={headroom}; give kv_tokens={blocks * BLOCK} or more, or a smaller max_tokens"
            )

    def longest(self) -> int:
        """Tokens of the longest trajectory, prompt and output: of a trace as recorded, otherwise at the cap."""
        workload, source = self.workload, self.workload.source
        if isinstance(source, Trace):
            last = self.steps if workload.drift > 0 else 0
            return max(
                prompt + workload.length(index, rows.index(max(rows)), version=last)
                for index, (prompt, rows) in enumerate(zip(source.prompts, source.outputs, strict=True))
            )
        return max(workload.prompt_tokens(index) for index in range(256)) + workload.max_tokens


LEAST = 5e-324
"""The least number above 0."""

LIMITS: tuple[tuple[tuple[str, ...], float, str], ...] = (
    (("groups", "group_size", "instances", "gpus_per_instance", "training_gpus"), 1, "1 or more"),
    (("steps", "max_running", "chunk"), 1, "1 or more"),
    (("staleness", "redundancy", "extra_members"), 0, "0 or more"),
    (("weight_bytes", "link_bandwidth", "total_bandwidth"), LEAST, "a number above 0"),
    (("cycle_s", "trainer_per_token_gpu_s"), LEAST, "a number above 0"),
    (("push_s", "trainer_fixed_s", "reward_s"), 0, "0 or more seconds"),
)


PAPER_14B = Setting(
    name="paper-14b",
    workload=servegen_r1(between=0.7, max_tokens=20_000),  # assumed: lengths of R1 serving, 70 % between prompts
    groups=128,
    group_size=16,
    staleness=2,
    instances=24,  # about what serves the peers best at this bound; the authors' scripts have 32
    gpus_per_instance=1,
    training_gpus=40,
    rollout=CostModel(
        floor=0.012303,
        base=0.0049075,
        per_sequence=2.441e-4,
        fixed=0.0019664,
        per_context_token=1.165e-7,
        per_prefill_token=2.441e-4,  # assumed: the slope of decoding
    ),
    kv_tokens=289_000,  # assumed: 96 GB, a tenth in reserve, weights out
    weight_bytes=29.5e9,
    trainer_per_token_gpu_s=1 / 500,  # assumed: 8 FLOP per parameter and token at 40 % of 148 TFLOP/s
)

PAPER_32B = replace(
    PAPER_14B,
    name="paper-32b",
    instances=9,
    gpus_per_instance=2,
    training_gpus=46,
    rollout=CostModel(
        floor=0.0250194,
        base=0.0183826,
        per_sequence=2.446e-4,
        fixed=2e-10,
        per_context_token=6.3e-8,
        per_prefill_token=2.446e-4,  # assumed
    ),
    kv_tokens=409_000,  # assumed: 2 x 96 GB, a tenth in reserve, weights out, 256 KiB a token
    weight_bytes=65.5e9,
    trainer_per_token_gpu_s=1 / 226,  # assumed: as for 14B
)

PAPER_30B_A3B = replace(
    PAPER_14B,
    name="paper-30b-a3b",
    instances=32,
    training_gpus=32,
    rollout=CostModel(
        floor=0.0115108,
        base=0.0097899,
        per_sequence=1.249e-4,
        fixed=0.00086719,
        per_context_token=7.28e-8,
        per_prefill_token=1.249e-4,  # assumed
    ),
    kv_tokens=258_000,  # assumed: 96 GB, a tenth in reserve, weights out, 96 KiB a token
    weight_bytes=61e9,
    trainer_per_token_gpu_s=1 / 1121,  # assumed: 3.3 billion active parameters, at 20 %
)


def doubled(setting: Setting) -> Setting:
    """The same on twice the GPUs, with the same batch and in the same proportion."""
    return replace(
        setting,
        name=f"{setting.name}-{2 * setting.gpus}",
        instances=2 * setting.instances,
        training_gpus=2 * setting.training_gpus,
    )


PAPER = (PAPER_14B, PAPER_32B, PAPER_30B_A3B)
PRESETS = {setting.name: setting for setting in (*PAPER, *map(doubled, PAPER))}
"""On 64 GPUs, and with ``-128`` in the name on 128."""

LONG = 4.0
"""Assumed: the factor that makes lengths of R1 serving (mean 1.5K) those of a mathematics run (mean 5.1K capped)."""

VARIANTS: dict[str, tuple[float, float]] = {"independent": (0.0, 1.0), "correlated": (0.7, 1.0), "long": (0.7, LONG)}
"""Lengths to try a preset with: the share of the variance that lies between prompts, and the factor on all lengths."""


def with_lengths(setting: Setting, variant: str) -> Setting:
    """The preset with lengths that are ``independent``, ``correlated`` within a group, or ``long``."""
    between, scale = VARIANTS[variant]
    source = setting.workload.source
    assert isinstance(source, Sampled), "a trace has lengths of its own"
    return replace(setting, workload=replace(setting.workload, source=replace(source, between=between), scale=scale))


def with_split(setting: Setting, training_gpus: int) -> Setting:
    """The same GPUs, so many of them for training; instances are whole, so a few GPUs may stay unused."""
    instances = (setting.gpus - training_gpus) // setting.gpus_per_instance
    if training_gpus < 1 or instances < 1:
        raise ConfigError(
            f"training_gpus={training_gpus} of {setting.gpus} leaves no instance of {setting.gpus_per_instance} GPUs; "
            f"give 1 to {setting.gpus - setting.gpus_per_instance}"
        )
    return replace(setting, instances=instances, training_gpus=training_gpus)


def preset(name: str) -> Setting:
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def with_strategies(setting: Setting, **changes: object) -> Setting:
    return replace(setting, strategies=replace(setting.strategies, **changes))
