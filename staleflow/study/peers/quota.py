"""AReaL's rule, which SkyRL and RLinf share: a quota on what is in flight, and whatever is complete is trained.

``running + accepted <= (max_staleness + version + 1) * batch_size``. That limits how far generation runs ahead in
aggregate. One slow group may still be trained arbitrarily late, so no bound is promised and none is kept.
"""

from staleflow.study.peers.ledger import PeerLedger


class QuotaLedger(PeerLedger):
    """The default rule of ``PeerLedger``, and nothing else."""
