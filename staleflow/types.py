"""The vocabulary of StaleFlow: the values its parts hand to each other, each once, and their form on the wire.

A *group* is one prompt with all its trajectories. *Version* ``t`` is the model after ``t`` updates; *step* ``t``
trains on version ``t`` and makes ``t + 1``. A group's *deadline* is the last step that may still train on it.

Tokens of a trajectory are *made* (sampled) or *given* (prompt extensions, tool results, templates). An *episode* is one
member of a group as an environment plays it, in *turns*: given tokens go in, made ones come out. It has one or more
*branches*, each of them a trajectory: ``p7/3``, and where its history was edited ``p7/3~1``, ``p7/3~2``.

What can start again counts how often: a process its *incarnation*, the control plane its *term*, a run its *attempt*.
A trajectory's *epoch* counts how often it was sent to an instance. What carries an older number comes too late.

Arrays of tokens and log-probabilities travel as little-endian bytes (``TOKEN``, ``LOGPROB``). Weights do not travel in
messages: they go through the parameter server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")

GIVEN = -1
"""In place of a version: these tokens were not sampled. They are not trained, and their log-probabilities are 0."""
Spans = tuple[tuple[int, int], ...]
"""Runs of tokens made under one version, ``(version, count)``, or given, ``(GIVEN, count)``, in their order."""

StepState = Literal["open", "ready", "stuck"]


def token_count(spans: Spans) -> int:
    total = 0
    for _, count in spans:
        total += count
    return total


def made_count(spans: Spans) -> int:
    """Tokens that were sampled."""
    return sum(count for version, count in spans if version >= 0)


def oldest(spans: Spans) -> int | None:
    """The lowest version that made any of the tokens; None if none was made."""
    return min((version for version, _ in spans if version >= 0), default=None)


def episode_of(trajectory: str) -> str:
    """The episode that a branch belongs to: the name of its first branch."""
    return trajectory.partition("~")[0]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on: its groups, earliest deadline first and then in the order they were completed.

    ``aborted`` names the groups that were given up so that the step could be trained now. It is empty unless the
    ledger works with redundancy. They are no longer tracked: cancel whatever still runs for them.
    """

    step: int
    groups: list[str]
    aborted: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as the paper draws it: a buffer with places for groups. Derived for people, never stored.

    ``open``: there is a place left. ``ready``: enough complete groups to train. ``stuck``: every place is taken,
    and the step waits for the groups in ``waiting_for``.
    """

    step: int
    state: StepState
    groups: list[str]
    waiting_for: list[str]


class LedgerCounts(TypedDict):
    """``admitted = live + committed + sum(released.values())``; ``live`` includes ``complete`` and ``leased``."""

    admitted: int
    live: int
    complete: int
    leased: int
    committed: int
    released: dict[str, int]


# A trajectory, on its way to an instance, back, and to the trainer.


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """Tokens ``start``, ``start + 1``, ... of a trajectory. A prompt is a chunk too, without log-probabilities."""

    start: int
    tokens: bytes
    logprobs: bytes = b""

    @classmethod
    def of(cls, start: int, tokens: npt.ArrayLike, logprobs: npt.ArrayLike = ()) -> Chunk:
        return cls(start, np.asarray(tokens, TOKEN).tobytes(), np.asarray(logprobs, LOGPROB).tobytes())

    def after(self, known: int) -> Chunk:
        """The chunk without the tokens before ``known``."""
        skip = known - self.start
        if skip <= 0:
            return self
        return Chunk(known, self.tokens[skip * TOKEN.itemsize :], self.logprobs[skip * LOGPROB.itemsize :])


class Work(msgspec.Struct, array_like=True, frozen=True):
    """One trajectory for an instance, with what was generated so far."""

    trajectory: str
    epoch: int
    group: str
    prompt_tokens: int
    spans: Spans
    prompt: bytes = b""
    """This and the next two are empty where engines are only modelled."""
    tokens: bytes = b""
    logprobs: bytes = b""
    limit: int = 0
    """Made tokens of the whole trajectory at which this turn ends; 0: where the run's setting says."""


class TrajectoryNews(msgspec.Struct, array_like=True, frozen=True):
    """News of one trajectory from an instance: the versions of all its tokens, and the tokens not yet reported."""

    trajectory: str
    epoch: int
    spans: Spans
    chunk: Chunk | None = None
    """None without new tokens, or where engines are only modelled."""
    reason: str = ""
    """Why a turn ended: ``stop``, ``length`` or ``capacity``. Empty if it did not, or where there are no turns."""


class Failed(NamedTuple):
    """A trajectory that an engine cannot serve."""

    name: str
    epoch: int
    message: str


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One finished and scored trajectory, for the trainer. The arrays share the memory of the bytes."""

    name: str
    prompt_bytes: bytes
    token_bytes: bytes
    logprob_bytes: bytes
    spans: Spans
    reward: float
    episode: str = ""
    """The episode it is a branch of; rows of one episode follow each other. Empty: it is one of its own."""
    masked: bool = False
    """Whether its reward counts for the others of its group and its tokens are not trained."""

    @classmethod
    def of(
        cls,
        name: str,
        prompt: npt.ArrayLike,
        tokens: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        spans: Sequence[tuple[int, int]],
        reward: float,
        episode: str = "",
        masked: bool = False,
    ) -> Row:
        ids = np.asarray(prompt, TOKEN).tobytes(), np.asarray(tokens, TOKEN).tobytes()
        return cls(name, *ids, np.asarray(logprobs, LOGPROB).tobytes(), tuple(spans), reward, episode, masked)

    @property
    def made(self) -> int:
        """Tokens that were sampled: those that it can be trained on."""
        return self.tokens.size - sum(count for version, count in self.spans if version < 0)

    @property
    def made_at(self) -> npt.NDArray[np.bool_]:
        """Which of its tokens these are."""
        if not self.spans:
            return np.ones(self.tokens.size, np.bool_)
        return np.repeat([version >= 0 for version, _ in self.spans], [count for _, count in self.spans])

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt_bytes, TOKEN)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.token_bytes, TOKEN)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.logprob_bytes, LOGPROB)


# Commands of the control plane to an instance.


class Fence(NamedTuple):
    """Identity of a command: the control plane's term, the instance's incarnation, and its number, from 1.

    An instance applies the commands to its own incarnation in order and without gaps, and none of an earlier term once
    it knows of a later one.
    """

    term: int
    incarnation: int
    number: int


class Command(msgspec.Struct, tag=True, array_like=True, frozen=True):
    fence: Fence


class Submit(Command, frozen=True):
    """Generate these trajectories."""

    work: list[Work]


class Return(Command, frozen=True):
    """Interrupt these trajectories (name, epoch) at the next step boundary. Unknown ones are ignored."""

    names: list[tuple[str, int]]


class Drop(Command, frozen=True):
    """Abort these trajectories (name, epoch); nothing more is reported of them."""

    names: list[tuple[str, int]]


class PullWeights(Command, frozen=True):
    """Load ``version`` or a later one between two steps; every trajectory is kept."""

    version: int


# What an instance reports.


class InstanceState(msgspec.Struct, array_like=True, frozen=True):
    """The state of an engine at a step boundary."""

    version: int
    """Version of its weights; -1 before the first pull."""
    running: int = 0
    """Sequences that decode, are prefilled, or will be as soon as prefill comes to them."""
    waiting: int = 0
    """Sequences it holds that have no memory or no place until others leave."""
    context: int = 0
    """Tokens of the running sequences, a shared prompt counted for each."""
    kv_free: int = 0
    """Free KV memory, in tokens. Memory that only caches a prefix counts as free."""
    kv_total: int = 0
    max_running: int = 0
    kv_version: int = -1
    """Oldest weights behind any KV entry of a running sequence."""
    step: tuple[int, int, float] | None = None
    """The latest step that only decoded: sequences, tokens of context, seconds."""

    @property
    def kv_used(self) -> int:
        return self.kv_total - self.kv_free


class Cell(msgspec.Struct, array_like=True, frozen=True):
    """Sums over similar steps of an engine."""

    mixed: bool
    """Whether the steps prefilled as well."""
    count: int
    running: int
    context: int
    prefilled: int
    seconds: float
    cpu_s: float


class Costs(msgspec.Struct, array_like=True, frozen=True):
    """What an instance has measured since its last report."""

    cells: list[Cell] = []
    pulls: int = 0
    pull_s: float = 0.0
    reported: int = 0
    """Finished trajectories in the report."""
    reported_s: float = 0.0
    """Seconds that they had waited for it, in total."""

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(cell.running for cell in self.cells)

    @property
    def busy_s(self) -> float:
        """Seconds of decoding and prefill."""
        return sum(cell.seconds for cell in self.cells)


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """News from an instance: its state after the command ``applied``, trajectories that ended or came back, tokens so
    far, a finished pull."""

    instance: str
    incarnation: int
    """A new one has forgotten everything."""
    applied: Fence
    state: InstanceState
    finished: list[TrajectoryNews] = []
    returned: list[TrajectoryNews] = []
    progress: list[TrajectoryNews] = []
    failed: list[Failed] = []
    pulled: int | None = None
    costs: Costs = Costs()
    held: list[tuple[str, int]] | None = None
    """All trajectories (name, epoch) that it holds: the answer to ``TakeOver``."""


# Other messages between the control plane and the processes of a run.

Role = Literal["instance", "trainer", "evaluator"]


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message over each connection of a process; what may not have been heard before is said again after it.

    A process that loses its connection continues and connects again: the control plane may be back."""

    name: str
    incarnation: int
    pid: int
    set_up: bool
    """Whether it has its ``Setup``."""
    first: int
    """Number of the message behind this one; a process counts all that it has ever sent, this one not, from 1."""


class Kept(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Whatever came of the process's messages up to this number is durable: they need not be said again."""

    number: int


class TakeOver(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A control plane of this term has taken the place of the one before: say what you are and hold (an instance by a
    report, the others by ``Ready``)."""

    term: int


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to ``Hello``: what the process is to be."""

    role: Role
    name: str
    incarnation: int
    run: str
    """The run's directory."""
    model: str
    """A folder in Hugging Face format."""
    store: str
    """The parameter server's name, in the run's registry."""
    cores: list[int]
    threads: int
    nice: int
    checkpoint: str = ""
    """Folder that the trainer resumes from; empty: the model."""
    standby: bool = False
    """A trainer of this attempt of the run died: resume from what it published, if it had published anything."""
    source: str = ""
    """File that says where the trainer's weights are, if that may be on another machine."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The process has loaded everything and holds this version."""

    version: int


class Broken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The process cannot continue, and starting it again would not help."""

    why: str
    first: bool = False
    """An engine of the user's own raised it before its first token: if others have worked, another one may, too."""


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End in good order."""


class Feed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Accumulate the gradients of these groups."""

    step: int
    groups: list[list[Row]]
    missing: int = 0
    """How many groups of the step are still to come."""


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Every group of the step has been fed: update and publish."""

    step: int
    groups: int = 0
    """How many, if it is said: a trainer that was fed fewer must not make a version of them."""


class Reset(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget what was fed since the last update."""


class Save(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write a checkpoint of the present version into this folder, and the files ``also`` beside it."""

    folder: str
    also: dict[str, bytes]


class Saved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    folder: str
    version: int
    why: str = ""
    """It could not be written; the trainer is as it was."""


class Moved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A sign of progress, from time to time while the process works, and once when it has nothing left to do."""

    handled: int = 0
    """Messages that it has done everything about, since its start."""
    why: str = ""
    """What keeps it from continuing and somebody could put right, such as a full disk."""
    saves: bool = False
    """Whether it writes a checkpoint from now on."""


class Trained(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Facts about a step: sent when its version can be pulled, right before ``Pushed``."""

    step: int
    facts: dict[str, float]
    token_staleness: dict[int, int]
    trajectory_staleness: dict[int, int]
    busy_s: float
    """Seconds of work on this step."""
    idle_s: float
    """Seconds of waiting for its groups."""


class Pushed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The version can be pulled."""

    version: int


class Evaluate(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Score the newest version on the held-out problems, or keep it until the next message that says ``now``."""

    now: bool = True


class Evaluated(msgspec.Struct, tag=True, array_like=True, frozen=True):
    version: int
    accuracy: float | None
    """Mean reward of the responses that could be scored; None if none could."""
    seconds: float
    failed: int
    """Responses that could not be scored."""
    why: str
    """Message of the last of these failures."""
    binary: bool = False
    """Whether all rewards are 0 or 1, so that their mean is the accuracy."""
    figures: dict[str, float] = {}
    """By name: ``reward``, the mean; of several rewards each by its own name; ``pass@k`` where rewards are binary."""
    trouble: str = ""
    """Why the best version could not be kept."""


ToProcess = (
    Setup | TakeOver | Kept | Submit | Return | Drop | PullWeights | Feed | Finish | Reset | Save | Evaluate | Stop
)
FromProcess = Hello | Ready | Moved | Report | Pushed | Trained | Saved | Evaluated | Broken
