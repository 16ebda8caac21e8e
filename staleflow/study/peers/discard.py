"""prime-rl's and TRL's rule: start what the window has room for, train what is complete, throw away what is too old.

When a version appears, every group that its step can no longer train is cancelled, in flight or complete, and its
prompt is drawn again. That keeps the bound, at the price of the tokens and of the long responses among them.
"""

from staleflow.protocol.schedule import LiveGroup
from staleflow.runtime.control import ControlPlane
from staleflow.study.peers.quota import QuotaLedger

OVER_AGE = "over age"


class DiscardLedger(QuotaLedger):
    def pick(self) -> list[LiveGroup]:
        return [group for group in super().pick() if group.deadline >= self.frontier]

    def over_age(self) -> list[str]:
        return [
            name for name, group in self.groups.items() if group.deadline < self.version and group.state != "leased"
        ]


class DiscardControl(ControlPlane):
    def _committed(self) -> None:
        assert isinstance(self.ledger, DiscardLedger)
        for name in self.ledger.over_age():
            self._release(self.server.groups[name], OVER_AGE)
        super()._committed()
