"""Which strategies to use and how they are tuned: typed, frozen, and refused at start when contradictory.

A strategy is a pure function ``strategy(situation, strategies, **arguments)`` that returns commands: routes, pulls,
interrupts, or aborts and truncations. What it must keep to stands in the module of its built-in ones.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from staleflow.registry import Entry, Registry, entries_of
from staleflow.settings import Range, Section, Share

Consume = Literal["stream", "batch"]
TAKES = ("situation", "strategies")
LARGE = 10**9

ROUTING = Registry(
    "strategies.routing",
    entries_of("staleflow.coordinator.routing", "waterfall", "least_loaded", "round_robin"),
    TAKES,
)
SYNCHRONISATION = Registry(
    "strategies.synchronisation",
    entries_of("staleflow.coordinator.synchronisation", "gain", "greedy", "starved"),
    TAKES,
)
MIGRATION = Registry(
    "strategies.migration",
    {
        "gain": Entry("staleflow.coordinator.migration:gain"),
        "blocked": Entry("staleflow.coordinator.migration:gain"),  # it is levelling that makes the difference
        "off": Entry("staleflow.coordinator.migration:off"),
    },
    TAKES,
)
TAIL = Registry("strategies.tail", entries_of("staleflow.coordinator.tail", "wait", "replace", "truncate"), TAKES)


@dataclass(frozen=True, slots=True)
class Strategies(Section):
    consume: Consume = "stream"
    """``stream``: groups are trained as they become complete; ``batch``: a step when all of its groups are."""
    routing: Annotated[str, ROUTING] = "waterfall"
    """``waterfall``, ``least_loaded``, ``round_robin``, or ``module:function``."""
    synchronisation: Annotated[str, SYNCHRONISATION] = "greedy"
    """``greedy``, ``gain``, ``starved``, or ``module:function``."""
    migration: Annotated[str, MIGRATION] = "gain"
    """``blocked`` moves only what is waited for or waits for memory; ``gain`` also evens contexts out at pulls;
    ``off``, or ``module:function``."""
    tail: Annotated[str, TAIL] = "wait"
    """``wait``, ``replace``, ``truncate``, or ``module:function``."""
    routing_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Given to ``module:function``."""
    synchronisation_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    migration_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    tail_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    mu: Share = 0.3
    """Waterfall: the least marginal gain worth having, as a share of what an empty instance would gain."""
    adapt: bool = True
    """Waterfall: derive mu from the run's own lengths as soon as they are known; until then it is the one given."""
    headroom: Annotated[int, Range(0, LARGE)] = 256
    """Tokens of KV memory kept free for each placed trajectory to grow into."""
    horizon: Annotated[float, Range(0, 100)] = 0.1
    """Gain: how far a pull must pay off, as a share of the time between two versions."""
    tail_groups: Annotated[int, Range(0, LARGE)] = 4
    """Tail: act only when the open step waits for at most this many groups."""
    tail_patience: Annotated[float, Range(0, LARGE)] = 0.5
    """Tail and migration: wait for this share of the time between two versions before acting."""
    migration_speedup: Annotated[float, Range(1, LARGE)] = 1.5
    """Migration: move a trajectory only to an instance that decodes it at least this much faster."""
    max_moves: Annotated[int, Range(0, LARGE)] = 2
    """Migration: how often one trajectory may be moved."""
