"""What one decoding step of an instance costs, and what that makes of its throughput.

With ``n`` sequences running and ``c`` tokens of context among them, a step that also prefills ``p`` tokens takes::

    max(floor, base + per_sequence * n) + fixed + per_context_token * c + per_prefill_token * p    seconds

(no sequence running: ``fixed + per_prefill_token * p``). The paper's names are k2 = floor, k3 = per_sequence,
k4 = fixed, k1 = per_context_token; ``base`` is the intercept that its authors' code adds inside the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CostModel:
    floor: float
    base: float
    per_sequence: float
    fixed: float
    per_context_token: float
    per_prefill_token: float

    @classmethod
    def from_geometry(
        cls,
        parameters: float,
        layers: int,
        kv_heads: int,
        head_size: int,
        bandwidth: float,
        flops: float,
        bytes_per_value: int = 2,
        efficiency: float = 0.5,
    ) -> CostModel:
        """A first guess from the model's shape and the device's peaks, to be replaced by measurements.

        A step reads all weights once (the floor) and the KV cache of the context; each sequence, and each token that
        is prefilled, takes two floating-point operations for each parameter. ``efficiency`` is the share of the peaks
        that is reached.
        """
        compute = 2 * parameters / (flops * efficiency)
        kv_bytes = 2 * layers * kv_heads * head_size * bytes_per_value
        return cls(
            floor=parameters * bytes_per_value / (bandwidth * efficiency),
            base=0.0,
            per_sequence=compute,
            fixed=0.001,
            per_context_token=kv_bytes / (bandwidth * efficiency),
            per_prefill_token=compute,
        )

    def scaled(self, factor: float) -> CostModel:
        """The model of a machine on which every step takes ``factor`` times as long."""
        return CostModel(*(factor * getattr(self, name) for name in CostModel.__slots__))

    def step(self, running: int, context: int, prefill: int = 0) -> float:
        """Seconds for one step."""
        seconds = self.fixed + self.per_prefill_token * prefill
        if not running:
            return seconds
        return seconds + max(self.floor, self.base + self.per_sequence * running) + self.per_context_token * context

    def steps(self, count: int, running: int, context: int, prefill: int = 0) -> float:
        """Seconds for ``count`` steps with the same sequences running, each with ``prefill`` prefill tokens.

        Every running sequence grows by one token in each step, so the context grows by ``running``.
        """
        one = self.fixed + self.per_prefill_token * prefill
        if not running:
            return count * one
        one += max(self.floor, self.base + self.per_sequence * running)
        return count * one + self.per_context_token * (count * context + running * (count * (count - 1) // 2))

    def throughput(self, running: int, context: int) -> float:
        """Tokens per second while decoding."""
        return running / self.step(running, context) if running else 0.0

    # The same for many instances at once, while decoding

    def step_times(self, running: NDArray[Any], context: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds for one step of each instance; as if a sequence ran where none does."""
        return (
            self.fixed
            + np.maximum(self.floor, self.base + self.per_sequence * running)
            + self.per_context_token * context
        )

    def throughputs(self, running: NDArray[Any], context: NDArray[Any]) -> NDArray[np.float64]:
        """Tokens per second of each instance."""
        return running / self.step_times(running, context)
