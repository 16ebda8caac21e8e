"""The interface every rollout engine implements, and the values that cross it.

An engine decodes trajectories under one version of the weights at a time. Its owner calls everything from one thread;
between two calls the engine is at a step boundary, so weights and requests may change there and nowhere else. A
request that cannot be served is reported as ``Failed`` in the next step's output and harms no other request; a fault
of the engine itself raises ``EngineError``. ::

    engine.submit([Request("t1", epoch=1, prompt=tokens, group="g1", sampling=Sampling(max_tokens=256))])
    while engine.busy:
        output = engine.step()
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from staleflow.errors import StaleFlowError
from staleflow.rollout.options import Sampling
from staleflow.types import Failed, InstanceState, Spans

Reason = Literal["stop", "length", "capacity", "interrupted"]
"""Why generation ended: a stop token or string; its token limit; no room in KV memory even with the engine to itself,
or the model's last position; it was interrupted and can be resumed anywhere."""


class EngineError(StaleFlowError, ValueError):
    """The engine cannot start or continue. The message says what to change."""


PLAIN = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory, from its beginning or from where it was interrupted."""

    name: str
    epoch: int
    prompt: Sequence[int]
    tokens: Sequence[int] = ()
    """Tokens generated before, on any engine, or given, with their log-probabilities and version spans. The limit in
    ``sampling`` counts those that were generated."""
    logprobs: Sequence[float] = ()
    spans: Spans = ()
    group: str | None = None
    """Requests of one group have the same prompt, which is then prefilled once."""
    sampling: Sampling = PLAIN


class Part(NamedTuple):
    """The progress of a request that is still in the engine: versions of all its tokens, and some of the tokens."""

    spans: Spans
    tokens: list[int]
    logprobs: list[float]


class Result(NamedTuple):
    """A request that left the engine: all its tokens after the prompt, from this engine or an earlier one. A modelled
    engine has no tokens: ``spans`` says how many there are."""

    name: str
    epoch: int
    reason: Reason
    tokens: list[int]
    logprobs: list[float]
    spans: Spans
    kv_version: int
    """Oldest weights behind any KV entry it attended to; below the tokens' version only with ``kv_on_pull="keep"``."""


class StepOutput(NamedTuple):
    """What happened since the previous step. A request is in at most one of the first three."""

    finished: list[Result]
    returned: list[Result]
    """Interrupted requests."""
    failed: list[Failed]
    made: int = 0
    """Tokens that were drawn."""
    prefilled: int = 0
    """Tokens whose KV entries were computed for sequences that did not decode."""
    context: int = 0
    """Tokens that the decoding sequences attended to."""


@runtime_checkable
class WeightSource(Protocol):
    """The parameter server as an engine sees it."""

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:
        """Copy the newest weights, of version ``at_least`` or later, into these tensors; returns their version."""
        ...


class Lender(Protocol):
    """Has tensors that are read where they are, by an engine that has no tensors of these names."""

    def lend(self, use: Callable[[int, Iterator[tuple[str, Any]]], None], at_least: int) -> int:
        """Call ``use`` with the newest version and its tensors, again if they changed meanwhile; returns the version
        that was read whole."""
        ...


@runtime_checkable
class LendingSource(WeightSource, Lender, Protocol):
    """The parameter server, to an engine of either kind."""


LoadWeights = Callable[[Mapping[str, Any]], int]
"""Fills the engine's tensors, by their Hugging Face names, and returns the version that they now hold."""


class Engine(Protocol):
    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue them in this order. One that cannot be served is reported as failed by the next step."""
        ...

    def interrupt(self, names: Sequence[str]) -> None:
        """Return these at the next step boundary with all their tokens. Unknown names are ignored."""
        ...

    def abort(self, names: Sequence[str]) -> None:
        """Drop these; nothing more is reported about them. Unknown names are ignored."""
        ...

    def step(self) -> StepOutput:
        """Decode one token of every running request, prefill some of the others, report."""
        ...

    def peek(self, name: str, start: int) -> Part | None:
        """The progress of a request, with its tokens from ``start`` on; None if it has no more than ``start``."""
        ...

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        """Replace the weights by ``version`` or later, keeping every request. Returns the version now held."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The tensors that ``pull`` fills, by their Hugging Face names. Who wants their values asks before the first
        pull: an engine that computes with others keeps them from then on."""
        ...

    def snapshot(self) -> InstanceState: ...

    def close(self) -> None:
        """Free what it holds. May be called again."""
        ...
