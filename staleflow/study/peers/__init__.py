"""Policies: who decides in a simulated run, StaleFlow or a peer for comparison.

A policy is a ledger (which groups start, which are trained), the strategies it fixes, and a control plane. StaleFlow's
own is the production one, unchanged, with whatever strategies the setting has. Peers differ from it in nothing but the
rule that is theirs, and train whole batches as they ship. ``name+stream`` is the peer with streamed consumption, and
``staleflow+batch`` is ours without it::

    policy = named("window_wait+stream")
    cluster = Cluster(policy.fit(setting), seed=1, policy=policy)
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial

from staleflow.errors import ConfigError
from staleflow.simulate.policy import STALEFLOW, Policy
from staleflow.study.peers.chunked import ChunkedLedger
from staleflow.study.peers.discard import DiscardControl, DiscardLedger
from staleflow.study.peers.ordered import OneStepLedger, WindowLedger
from staleflow.study.peers.quota import QuotaLedger
from staleflow.study.peers.slots import LiteralSlotLedger, SlotLedger

SHIPPED = {"consume": "batch", "routing": "least_loaded", "synchronisation": "greedy", "migration": "off"}
"""A whole step at once, the instance with the fewest requests, everybody pulls when there is something new."""
DRAINING = SHIPPED | {"synchronisation": "starved"}
"""Without interruption: an instance that is behind gets nothing new, and pulls once it is empty."""


PEERS = (
    Policy("synchronous", "all GPUs generate, then all train", strategies=SHIPPED, colocated=True, most_staleness=0),
    Policy("one_step", "one-step-off pipeline", ledger=OneStepLedger, strategies=DRAINING, most_staleness=1),
    Policy("quota", "in-flight quota, no interruption", False, QuotaLedger, strategies=DRAINING),
    Policy("quota_interrupt", "in-flight quota with interruption (AReaL)", False, QuotaLedger, strategies=SHIPPED),
    Policy("window_wait", "window and wait, in order (verl V1)", ledger=WindowLedger, strategies=SHIPPED),
    Policy("discard", "discard over age (prime-rl, TRL)", True, DiscardLedger, DiscardControl, SHIPPED),
    Policy("psrl_default", "slots, request balance, greedy sync (PSRL)", ledger=SlotLedger, strategies=SHIPPED),
)

POLICIES = {policy.name: policy for policy in (STALEFLOW, *PEERS)}

VARIANTS = {
    policy.name: policy
    for policy in (
        STALEFLOW.variant("batch"),
        *(peer.variant("stream") for peer in PEERS if not peer.colocated),
    )
}

SLOTS_WITHOUT_EXCHANGE = replace(STALEFLOW, name="staleflow, literal slots", ledger=LiteralSlotLedger)
SLOTS_WITH_EXCHANGE = replace(STALEFLOW, name="staleflow, slots with exchange", ledger=SlotLedger)


def chunked(chunk: int) -> Policy:
    """Ours, feeding the trainer no fewer than ``chunk`` groups at once."""
    return replace(STALEFLOW, name=f"staleflow, chunks of {chunk}", ledger=partial(ChunkedLedger, chunk=chunk))


SYSTEMS = {
    "verl": "synchronous, or window_wait when it is asynchronous",
    "trl": "discard",
    "prime-rl": "discard",
    "areal": "quota_interrupt",
    "skyrl": "quota",
    "psrl": "psrl_default",
}
"""Names of systems, and the policies that stand for them (docs/simulator.md)."""


def named(name: str) -> Policy:
    known = POLICIES | VARIANTS
    if (policy := SYSTEMS.get(name.lower().replace("_", "-"))) is not None:
        raise ConfigError(f"policy {name!r} is a system: what it does by default is like {policy}; give that")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        instead = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}, or all, or every"
        raise ConfigError(f"policy {name!r} is unknown; {instead}")
    return known[name]


def chosen(text: str) -> list[Policy]:
    """Policies by name, with commas. ``all``: each as it ships; ``every``: the other kind of consumption too."""
    found: dict[str, Policy] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        found |= POLICIES if name == "all" else POLICIES | VARIANTS if name == "every" else {name: named(name)}
    if not found:
        raise ConfigError("--policies is empty; give names with commas, or all")
    return list(found.values())
