"""Who decides in a simulated run: a ledger, the strategies it fixes, and a control plane.

StaleFlow's own policy is the production code, unchanged, with whatever strategies the setting has. Policies of other
systems, for comparison, are in ``staleflow.study.peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from staleflow.protocol import Ledger, StalenessLedger
from staleflow.runtime.control import ControlPlane
from staleflow.simulate.setting import Setting, with_strategies


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    summary: str
    promises_bound: bool = True
    ledger: Callable[[int, int, int], Ledger] = StalenessLedger
    control: type[ControlPlane] = ControlPlane
    strategies: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Strategies that it fixes; the others are the setting's."""
    colocated: bool = False
    """All GPUs generate, then all train."""
    most_staleness: int | None = None
    """The largest bound that it uses."""

    def fit(self, setting: Setting) -> Setting:
        """The setting as this policy runs it."""
        setting = with_strategies(setting, **self.strategies)
        if not self.colocated:
            return setting
        gpus = setting.gpus
        return replace(
            setting,
            staleness=0,
            instances=max(1, gpus // setting.gpus_per_instance),
            training_gpus=gpus,
            trainer_fixed_s=setting.trainer_fixed_s + setting.reshard_s,
        )

    @property
    def base(self) -> str:
        """The name without its variant."""
        return self.name.partition("+")[0]

    def variant(self, consume: str) -> Policy:
        return replace(self, name=f"{self.name}+{consume}", strategies={**self.strategies, "consume": consume})


STALEFLOW = Policy("staleflow", "the production control plane, streamed consumption")
