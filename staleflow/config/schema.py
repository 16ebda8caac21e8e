"""Everything a run can be told. Every section is frozen; what each setting means stands below it.

::

    config = Config(staleness=1, rollout=Rollout(instances=3))
    config.training.learning_rate
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from staleflow.config.machine import cache_folder
from staleflow.coordinator.strategies import Strategies

ADDER = "adder"
"""The embedded task and its model."""
SMOLLM = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Data:
    source: str = ADDER
    """``adder`` (the embedded task), a .jsonl or .parquet file, ``module:function``, or ``reasoning-gym:NAME``."""
    prompt: str = "prompt"
    """The column of the prompt, or a text with columns in braces: ``"{Body} {Question}"``."""
    answer: str | None = "answer"
    """The column of the right answer, which the reward sees as ``facts["answer"]``; null: there is none."""
    template: str = "{prompt}"
    """What the model reads: a text in which ``{prompt}`` stands for the prompt."""
    chat: bool = False
    """Wrap the prompt in the chat template of the model's tokenizer."""
    system: str | None = None
    """The system message of a chat; null: that of the chat template, if it has one."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out."""
    epochs: int | None = None
    """How often a finite data set is read; null: as long as the run goes."""
    shuffle: bool = True
    """In every epoch anew, by the seed."""
    held_out: str | None = None
    """A file with the problems of the evaluation; null: some are split off the source."""
    held_out_count: int | None = None
    """How many are split off, by a hash of their prompts; null: a tenth of the data, at most 1,000."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Given to ``module:function``, or to the reasoning-gym task."""


@dataclass(frozen=True, slots=True)
class Reward:
    function: str = ADDER
    """``adder``, ``exact-match``, ``last-number``, ``math-verify``, ``reasoning-gym``, ``module:function``, or the
    http(s) address of a service."""
    workers: int = 1
    """Processes that score."""
    timeout_s: float = 10.0
    """For one response."""
    tries: int = 3
    """After so many failures the group is released, with the reason, and replaced."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that its workers see, such as a key, beyond what programs need to run."""


@dataclass(frozen=True, slots=True)
class Rollout:
    instances: int = 2
    """Engines, each a process."""
    max_tokens: int = 1024
    """Most tokens of a response."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Draw from the most likely tokens that have this much probability together; 1: from all."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0: none."""
    stop_strings: tuple[str, ...] = ()
    """A response ends where it contains one of these. It also ends at the model's own end tokens."""
    kv_tokens: int = 65_536
    """KV memory of an instance in tokens: a hard limit."""
    max_running: int = 64
    """Responses that an instance decodes at once."""
    prefill_tokens: int = 512
    """Most prompt tokens that a step computes beside decoding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and KV memory in the engines."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    kv_on_pull: Literal["recompute", "keep"] = "recompute"
    """What becomes of the KV memory of running responses when new weights come."""


@dataclass(frozen=True, slots=True)
class Training:
    """The fields of ``staleflow.training.options.TrainerOptions``, but for those that follow from other settings."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae"] = "grpo"
    """``gae`` is PPO with a value head."""
    loss: Literal["ppo", "dapo", "gspo", "cispo"] = "dapo"
    correction: Literal["none", "truncated", "masked", "decoupled"] = "none"
    """For responses of older versions: none beyond the loss's own clipping, importance weights truncated by token,
    masked by sequence, or decoupled PPO."""
    importance_cap: float = 2.0
    """For ``truncated``."""
    sequence_band: tuple[float, float] = (0.5, 2.0)
    """For ``masked``: sequences whose mean ratio leaves it are not trained on."""
    whiten_advantages: bool = False
    """To mean 0 and deviation 1 over all tokens of a step."""
    skip_no_signal: bool = True
    """Leave out groups whose advantages are all 0, also of the mean, unless another term of the loss needs them."""
    overlong_buffer: int = 0
    """Tokens before ``rollout.max_tokens`` over which rewards fall by up to ``overlong_penalty``; 0: they do not."""
    overlong_penalty: float = 1.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    eps_low: float | None = None
    """Ratios are clipped to 1 - eps_low .. 1 + eps_high; null: the loss's own."""
    eps_high: float | None = None
    dual_clip: float | None = None
    """For ppo and dapo: beyond this ratio, tokens of negative advantage have no gradient; null: they all have."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """Of the divergence from the model that the run began with."""
    value_coefficient: float = 0.5
    value_clip: float = 0.2
    """How far from where the step began a value may gain by moving; felt with several updates a step."""
    updates_per_step: int = 1
    """Above 1, the groups of a step are cut into so many mini-batches of one update each."""
    learning_rate: float = 1e-5
    value_learning_rate: float | None = None
    """Of the value head; null: as the model's."""
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does between warm-up and the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    lora_rank: int = 0
    """Above 0, only adapters of this rank are trained."""
    lora_alpha: float = 32.0
    """Adapters are added times this over their rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The last part of the names of the matrices that get adapters."""
    lora_seed: int = 0
    train_only: tuple[str, ...] = ()
    """Patterns of the names of parameters that are trained, such as ``model.layers.3.*``; none: all."""
    activation_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    autocast: Literal["auto", "off"] = "auto"
    """``auto``: matrix products in bfloat16 on a GPU."""
    micro_tokens: int = 1024
    """Tokens of one forward pass, about. The default is best on one CPU core; a GPU takes as many as fit."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    every: int = 5
    """Steps between two evaluations; 0: only at the beginning and at the end."""
    problems: int = 256
    """Held-out problems that are asked."""
    temperature: float = 0.0
    """0: the most likely response."""
    when: Literal["during", "after"] = "during"
    """``after``: versions are kept in memory and evaluated when training has ended, so that it is not disturbed."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    every: int = 0
    """Steps between two checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = 2
    """How many of the latest stay; 0: all."""


@dataclass(frozen=True, slots=True)
class Processes:
    threads: int | None = None
    """Of each compute process; null: chosen by the number of cores."""
    pin: bool = True
    """Keep each process on cores of its own where there are enough."""
    standby: bool = True
    """Publish the optimiser's state with each version, in shared memory, so that a trainer that dies is replaced and
    nothing is lost. Without, its death ends the run, which then goes on from its newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Config:
    model: str = ADDER
    """``adder`` (the embedded small model), ``smollm2-135m``, or a folder in Hugging Face format."""
    seed: int = 0
    steps: int = 60
    """Updates of the model."""
    staleness: int = 2
    """The bound: no token is trained on more than so many updates after the model that made it. 0: synchronous."""
    groups: int = 32
    """Prompts of a step."""
    group_size: int = 8
    """Responses to each prompt."""
    redundancy: int = 0
    """Groups of a step that are started beyond those needed; the slowest are dropped."""
    extra_members: int = 0
    """Responses of a group that are started beyond those needed; the slowest are dropped."""
    filter: Literal["none", "no-signal"] = "none"
    """``no-signal``: groups whose rewards are all equal are replaced by others (dynamic sampling)."""
    stop_at: float | None = None
    """Held-out accuracy at which the run ends before its last step; null: it does not."""
    runs: str = "runs"
    """The folder of run directories."""
    cache: str = field(default_factory=cache_folder)
    """The folder of models that are made or converted once."""
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    rollout: Rollout = field(default_factory=Rollout)
    training: Training = field(default_factory=Training)
    strategies: Strategies = field(default_factory=Strategies)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    processes: Processes = field(default_factory=Processes)

    @property
    def members(self) -> int:
        """Responses that are started for each prompt."""
        return self.group_size + self.extra_members

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have."""
        return 4 if self.data.source == ADDER else self.data.max_prompt_tokens

    def fingerprint(self) -> str:
        """Equal for two configurations of which one can resume the other's run."""
        from staleflow.config.resuming import fingerprint

        return fingerprint(self)
