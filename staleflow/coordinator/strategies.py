"""Which strategies to use and how they are tuned: typed, frozen, and refused at start when contradictory."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from staleflow.errors import ConfigError

Consume = Literal["stream", "batch"]
Routing = Literal["waterfall", "least_loaded", "round_robin"]
Synchronisation = Literal["gain", "greedy", "starved"]
Migration = Literal["gain", "blocked", "off"]
Tail = Literal["wait", "replace", "truncate"]


@dataclass(frozen=True, slots=True)
class Strategies:
    consume: Consume = "stream"
    routing: Routing = "waterfall"
    synchronisation: Synchronisation = "greedy"
    migration: Migration = "gain"
    """``blocked`` moves only what is waited for or waits for memory; ``gain`` also evens contexts out at pulls."""
    tail: Tail = "wait"
    mu: float = 0.3
    """Waterfall: the least marginal gain worth having, as a share of what an empty instance would gain."""
    adapt: bool = True
    """Waterfall: derive mu from the run's own lengths as soon as they are known; until then it is the one given."""
    headroom: int = 256
    """Tokens of KV memory kept free for each placed trajectory to grow into."""
    horizon: float = 0.1
    """Gain: how far a pull must pay off, as a share of the time between two versions."""
    tail_groups: int = 4
    """Tail: act only when the open step waits for at most so many groups."""
    tail_patience: float = 0.5
    """Tail and migration: wait for so much of the time between two versions before acting."""
    migration_speedup: float = 1.5
    """Migration: move a trajectory only to an instance that decodes it at least so much faster."""
    max_moves: int = 2
    """Migration: how often one trajectory may be moved."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for entry in fields(self):
            value, choices = getattr(self, entry.name), get_args(hints[entry.name])
            if choices and value not in choices:
                raise ConfigError(f"{entry.name}={value} is unknown; choose one of {', '.join(choices)}")
        for name, least, most in (
            ("mu", 0.0, 1.0),
            ("headroom", 0, 10**9),
            ("horizon", 0.0, 100.0),
            ("tail_groups", 0, 10**9),
            ("tail_patience", 0.0, 1e9),
            ("migration_speedup", 1.0, 1e9),
            ("max_moves", 0, 10**9),
        ):
            value: Any = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name}={value} is out of range; give a number from {least:g} to {most:g}")
