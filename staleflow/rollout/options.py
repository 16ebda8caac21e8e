"""The options of engines, checked before anything is loaded.

``Rollout`` is the section of the configuration. An engine is made from the part of it that is ``EngineOptions``, and a
request carries the part that is ``Sampling``::

    rollout.to(EngineOptions), rollout.to(Sampling, stop_tokens=(1,))

``rollout.engine`` is the built-in engine, vLLM, or the user's own class, or a function that makes one. It is called as
``engine(model_folder, options, **arguments)`` with ``EngineOptions`` and gives an ``Engine`` (see ``engine.py``) that
holds no version of the weights (-1) until its first pull.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from staleflow.registry import Entry, Registry
from staleflow.settings import Amount, Count, Device, Range, Section, Share, Whole

ENGINES = Registry(
    "rollout.engine",
    {
        "builtin": Entry("staleflow.rollout.builtin:make"),
        "vllm": Entry(
            "staleflow.rollout.vllm.start:make",
            needs="vllm",
            arguments=True,
            install="pip install 'staleflow[vllm]', or as docs/engine.md says for CPUs",
        ),
    },
    takes=("model_folder", "options"),
    own="module:Class",
)


@dataclass(frozen=True)
class Drawing(Section):
    """How tokens are drawn. Truncation works in this order: temperature, top-k, top-p, min-p."""

    temperature: Amount = 1.0
    """0: the most likely token."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Draw from the most likely tokens that have this much probability together; 1: from all."""
    top_k: Whole = 0
    """Draw from this many of the most likely tokens; 0: from all."""
    min_p: Share = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0: none."""


@dataclass(frozen=True)
class Ending(Section):
    max_tokens: Count = 1024
    """Most tokens of a response, those generated before an interruption included."""
    stop_strings: tuple[str, ...] = ()
    """A response ends where it contains one of these. It also ends at the model's own end tokens. The tokens that
    complete a stop string are kept, as is an end token: the trainer must see them."""

    def contradictions(self) -> Iterator[str]:
        if "" in self.stop_strings:
            yield "stop_strings has an empty text: remove it"


@dataclass(frozen=True)
class Sampling(Drawing, Ending):
    """How the response to a request is drawn.

    The log-probability reported with a token is the one it was really drawn with, after temperature, truncation and
    renormalisation; greedy tokens, whose own distribution is a point mass, get the log-probability of the untouched
    model (temperature 1), because that is what a trainer can use.
    """

    stop_tokens: tuple[int, ...] = ()
    seed: Annotated[int, Range(most=2**64)] | None = None
    """None: made from the request's name, so that a trajectory draws the same tokens wherever it runs."""

    def contradictions(self) -> Iterator[str]:
        return Ending.contradictions(self)


@dataclass(frozen=True)
class Engines(Section):
    """The options of every engine that the configuration has."""

    kv_tokens: Count = 65_536
    """KV memory of an instance in tokens: a hard limit."""
    max_running: Count = 64
    """Responses that an instance decodes at once."""
    prefill_tokens: Count = 512
    """Most prompt tokens that a step computes beside decoding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and KV memory in the engines."""
    device: Device = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    kv_on_pull: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV memory of running responses when new weights are pulled."""
    persistent_kernel: bool = True
    """On an H100 or H200, decode by kernels of our own where those are faster than PyTorch's."""


@dataclass(frozen=True)
class EngineOptions(Engines):
    page_size: Count = 32
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """``random`` needs only a config.json: for measurements."""
    threads: Count | None = None
    """Threads of PyTorch in this process; None leaves them as they are."""
    longest: Count = 1
    """Tokens of the longest sequence to come: what steps over so many need is made before the first request."""

    def contradictions(self) -> Iterator[str]:
        if self.kv_tokens < self.page_size:
            yield f"kv_tokens={self.kv_tokens} is less than one page of {self.page_size} tokens: give more"


@dataclass(frozen=True)
class Rollout(Drawing, Ending, Engines):
    instances: Count = 2
    """Engines, each a process."""
    engine: Annotated[str, ENGINES] = "builtin"
    """``builtin``, ``vllm``, or ``module:Class``."""
    engine_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to vLLM, or to ``module:Class``."""

    def contradictions(self) -> Iterator[str]:
        yield from Ending.contradictions(self)
        if self.engine.startswith(("http://", "https://")):
            yield (
                f"engine={self.engine}: a server can only evaluate, because it neither says which version made a token "
                f"nor returns a response that is interrupted: give builtin or vllm, or use staleflow evaluate --server "
                f"{self.engine}"
            )
        if self.engine == "vllm" and self.device == "cpu" and "speculative_config" in self.engine_arguments:
            yield (
                "engine_arguments.speculative_config: vLLM for CPUs speculates with a temperature that it does not "
                "set, so that only greedy tokens are right: leave it out, or give rollout.device=cuda"
            )
        if self.engine == "vllm" and self.device.partition(":")[2].strip("0"):
            yield (
                f"device={self.device}: vLLM always uses the first GPU that it sees: give cuda, and choose the GPU by "
                f"CUDA_VISIBLE_DEVICES={self.device.partition(':')[2]}"
            )
        if self.temperature == 0:
            yield "temperature=0 gives every member of a group the same response: give a number above 0, such as 1"
        for name, all_tokens in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            if getattr(self, name) != all_tokens:
                yield (
                    f"{name}={getattr(self, name)} draws from fewer tokens than the trainer's log-probabilities are "
                    f"over: leave it at {all_tokens}, or give evaluation.{name}"
                )
