"""One check for everything that ledger and oracle can both be asked."""

import json

from staleflow.protocol import StalenessLedger
from tests.protocol.oracle import Oracle


def check(ledger: StalenessLedger, oracle: Oracle) -> None:
    assert (ledger.version, ledger.frontier, ledger.taken) == (oracle.version, oracle.frontier, len(oracle.leased))
    for version in range(oracle.version + 1):
        room = oracle.room(version)
        assert ledger.room(version) == room, f"room of version {version}"
        assert ledger.can_reserve(version) == (room > 0)
    assert ledger.ready() == oracle.ready()
    assert set(ledger.blocking()) == oracle.blocking()
    assert ledger.blocked()[0] == len(ledger.blocking())
    check_counts(ledger, oracle)
    check_view(ledger, oracle)
    state = json.loads(json.dumps(ledger.to_state()))
    assert StalenessLedger.from_state(state).to_state() == state


def check_counts(ledger: StalenessLedger, oracle: Oracle) -> None:
    counts = ledger.counts()
    assert counts == {
        "admitted": oracle.admitted,
        "live": len(oracle.groups),
        "complete": len(oracle.named("complete")),
        "leased": len(oracle.leased),
        "committed": oracle.committed,
        "released": oracle.released,
    }
    assert counts["admitted"] == counts["live"] + counts["committed"] + sum(counts["released"].values())


def check_view(ledger: StalenessLedger, oracle: Oracle) -> None:
    """Every live group has one place, in a step that it may be trained in, and the states mean what they say."""
    view = ledger.view()
    shown = [group for step in view for group in step.groups]
    open_groups = oracle.live() + ([] if oracle.full else oracle.leased)
    assert sorted(shown) == sorted(open_groups)
    assert [step.step for step in view] == list(range(oracle.frontier, oracle.frontier + oracle.max_staleness + 1))
    for step in view:
        in_flight = [group for group in step.groups if oracle.groups[group].state == "in flight"]
        enough = len(step.groups) - len(in_flight) >= oracle.batch_size
        full = len(step.groups) == oracle.places
        assert all(oracle.deadline(group) >= step.step for group in step.groups)
        assert len(step.groups) <= oracle.places
        assert step.state == ("ready" if enough else "stuck" if full else "open")
        assert step.waiting_for == (in_flight if step.state == "stuck" else [])
    if not oracle.full:
        assert (view[0].state == "ready") == ledger.ready()
