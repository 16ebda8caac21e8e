"""All settings of a run. Sections are frozen and refuse bad values; the meaning of each setting is below it.

The sections of the parts are beside the parts: ``Data`` in ``tasks/options.py``, and so on. Rules across sections are
in ``rules.py``.

::

    config = Config(staleness=1, rollout=Rollout(instances=3))
    config.training.learning_rate
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from staleflow.agents.options import Environment
from staleflow.config.cluster import ClusterOptions
from staleflow.config.machine import cache_folder
from staleflow.config.ray import RayOptions
from staleflow.config.tracking import TRACKERS
from staleflow.coordinator.strategies import Strategies
from staleflow.reward.options import Reward
from staleflow.rollout.options import Drawing, EngineOptions, Rollout, Sampling
from staleflow.servers.filters import FILTERS
from staleflow.settings import Amount, Count, Form, Positive, Range, Section, Whole, numbered, several, short_name
from staleflow.tasks.options import ADDER, Data
from staleflow.training.options import TrainerOptions, Training


def passes(samples: int) -> list[int]:
    """The ``k`` for which ``pass@k`` is measured: powers of two, and all."""
    return sorted({2**power for power in range(1, samples.bit_length())} | ({samples} if samples > 1 else set()))


@dataclass(frozen=True)
class Evaluation(Drawing):
    temperature: Amount = 0.0
    """0: the most likely response."""
    every: Whole = 5
    """Steps between two evaluations; 0: only at the beginning and at the end."""
    problems: Annotated[int, Range(1, 1_000_000)] = 256
    """How many held-out problems are evaluated."""
    samples: Annotated[int, Range(1, 1024)] = 1
    """Responses to each problem. With more than one, ``pass@k`` is reported where rewards are 0 or 1."""
    figure: Annotated[str, Form(r"pass@[1-9]\d*|[^@]+", "give reward, pass@K, or the name of a reward")] = "reward"
    """What ``stop_at``, ``evaluation.patience`` and the best checkpoint go by: ``reward`` (the mean), ``pass@K``, or
    one of several rewards by its name."""
    patience: Whole = 0
    """The run ends after this many evaluations in a row without a better figure; 0: it does not."""
    when: Literal["during", "after"] = "during"
    """``after``: versions are kept on the disk and evaluated when training has ended, so that it is not disturbed."""

    def contradictions(self) -> Iterator[str]:
        if self.samples > 1 and self.temperature == 0:
            yield (
                f"samples={self.samples} are all the same with temperature=0: give evaluation.temperature, such as 1"
            )
        if self.figure.startswith("pass@") and int(self.figure.removeprefix("pass@")) not in passes(self.samples):
            yield (
                f"figure={self.figure} is not measured with evaluation.samples={self.samples}: give "
                f"{', '.join(f'pass@{k}' for k in passes(self.samples)) or 'evaluation.samples=2 or more'}"
            )
        if self.patience and (not self.every or self.when == "after"):
            yield (
                f"patience={self.patience}, but nothing is evaluated during the run: give evaluation.every, and "
                "evaluation.when=during"
            )


@dataclass(frozen=True, slots=True)
class Checkpoints(Section):
    every: Whole = 0
    """Steps between two checkpoints; 0: by time only. Whatever ends a run, one is made at its end."""
    minutes: Amount = 10.0
    """Minutes between two checkpoints; 0: by steps only."""
    keep: Whole = 2
    """How many of the latest are kept; 0: all."""
    best: bool = True
    """Keep the version with the best ``evaluation.figure`` too, as a model without the trainer's state: ``best``."""


@dataclass(frozen=True, slots=True)
class Processes(Section):
    threads: Annotated[int, Range(1, 1024)] | None = None
    """Threads of each compute process; null: chosen by the number of cores."""
    pin: bool = True
    """Keep each process on cores of its own where there are enough."""
    trajectory_gib: Positive | None = None
    """Memory for prompts and responses in the trajectory server; where it is full, the next prompt waits. null: a
    quarter of what is free."""
    standby: bool | None = None
    """Publish the optimiser's state with each version, in shared memory, so that a trainer that dies is replaced and
    nothing is lost; it takes twice 12 bytes for each trained parameter. Without it, a trainer that dies ends the run,
    which can be resumed from its newest checkpoint. null: where there is memory for it."""
    hung_s: Positive = 30.0
    """A process that has said nothing for this long, and for ten times what is normal, is killed and replaced."""

    @property
    def with_standby(self) -> bool:
        """``staleflow.config.memory.settled`` decides what was left open."""
        return self.standby is not False


@dataclass(frozen=True, slots=True)
class Config(Section):
    model: str = ADDER
    """``adder`` or ``calculator`` (the embedded small models), ``smollm2-135m``, a folder in Hugging Face format, or
    ``OWNER/NAME`` of a model on the Hugging Face hub."""
    seed: Whole = 0
    """Of the order of the data, of the responses, and of the embedded model."""
    steps: Count = 60
    """Updates of the model."""
    staleness: Whole = 2
    """The bound: no token is trained on more than this many updates after the version that made it. 0: synchronous."""
    groups: Count = 32
    """Prompts of a step."""
    group_size: Count = 8
    """Responses to each prompt."""
    redundancy: Whole = 0
    """Groups of a step that are started beyond those needed; the slowest are dropped."""
    extra_members: Whole = 0
    """Responses of a group that are started beyond those needed; the slowest are dropped."""
    filter: Annotated[str, FILTERS] = "none"
    """``no-signal``: groups whose rewards are all equal are replaced by others (dynamic sampling); ``none``, or
    ``module:function``."""
    filter_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to ``module:function``."""
    stop_at: float | None = None
    """Value of ``evaluation.figure``, by default the mean reward on held-out problems, at which the run ends before its
    last step; null: it does not."""
    track: Annotated[str | tuple[str, ...], TRACKERS] = ()
    """Where else the figures of each step go: ``tensorboard``, ``wandb``, ``trackio``, ``prometheus``,
    ``module:Class``, or a list of these."""
    track_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to the tracker, such as ``{project: mine, mode: offline}``. Of several: by the name of each."""
    samples: Whole = 4
    """Responses of each step that are kept, with prompts and rewards, in ``samples.jsonl``."""
    runs: str = "runs"
    """The folder of run directories."""
    cache: str = field(default_factory=cache_folder)
    """The folder of models that are made or converted once."""
    runtime: Literal["local", "ray"] = "local"
    """Where the processes of a run are: ``local``, on this machine, or ``ray``, on the nodes of a Ray cluster."""
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    environment: Environment = field(default_factory=Environment)
    rollout: Rollout = field(default_factory=Rollout)
    training: Training = field(default_factory=Training)
    strategies: Strategies = field(default_factory=Strategies)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    processes: Processes = field(default_factory=Processes)
    ray: RayOptions = field(default_factory=RayOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)

    @property
    def members(self) -> int:
        """Responses that are started for each prompt."""
        return self.group_size + self.extra_members

    @property
    def trackers(self) -> tuple[str, ...]:
        return (self.track,) if isinstance(self.track, str) else self.track

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have."""
        return self.data.longest_prompt

    @property
    def longest_response(self) -> int:
        """Tokens that can follow a prompt: those made, and those given by an environment."""
        return self.rollout.max_tokens + (self.environment.max_given if self.environment.play else 0)

    @property
    def shares_gpu(self) -> bool:
        """Whether the trainer computes on a GPU on which instances do, too. On Ray each has its own."""
        device = numbered(self.rollout.device)
        return self.runtime == "local" and device != "cpu" and device in self.training.devices

    def contradictions(self) -> Iterator[str]:
        if self.redundancy >= self.groups:
            yield (
                f"redundancy={self.redundancy} drops a whole step for each that is trained: give at most "
                f"{self.groups - 1}, as groups={self.groups}"
            )
        if self.extra_members and self.extra_members >= self.group_size:
            yield (
                f"extra_members={self.extra_members} drops as much as group_size={self.group_size} keeps: give at most "
                f"{self.group_size - 1}"
            )
        if self.stop_at is not None and (not self.evaluation.every or self.evaluation.when == "after"):
            yield (
                f"stop_at={self.stop_at}, but nothing is evaluated during the run: give evaluation.every, and "
                "evaluation.when=during"
            )
        figures = ("reward", *(self.reward.names if len(self.reward.names) > 1 else ()))
        if not self.evaluation.figure.startswith("pass@") and self.evaluation.figure not in figures:
            yield f"evaluation.figure={self.evaluation.figure} is unknown: give {', '.join(figures)} or pass@K"
        trackers = [short_name(each) for each in self.trackers]
        yield from several("track", trackers, self.track_arguments, "track_arguments")
        if self.filter == "no-signal" and self.group_size == 1:
            yield "filter=no-signal drops every group of one: give group_size=2 or more, or filter=none"

    # Options of the parts

    def trainer_options(self) -> TrainerOptions:
        return self.training.to(
            TrainerOptions,
            max_staleness=self.staleness,
            temperature=self.rollout.temperature,
            max_tokens=self.rollout.max_tokens,
            total_steps=self.steps,
            shares_gpu=self.shares_gpu,
        )

    def engine_options(self) -> EngineOptions:
        return self.rollout.to(EngineOptions, longest=self.longest_prompt + self.longest_response)

    def sampling(self, stop_tokens: Sequence[int]) -> Sampling:
        """How responses that are trained on are drawn."""
        return self.rollout.to(Sampling, stop_tokens=tuple(stop_tokens))

    def evaluation_sampling(self, stop_tokens: Sequence[int]) -> Sampling:
        """How responses to held-out problems are drawn."""
        limits = {"max_tokens": self.rollout.max_tokens, "stop_strings": self.rollout.stop_strings}
        return self.evaluation.to(Sampling, stop_tokens=tuple(stop_tokens), **limits)
