"""What the open step waits for: timed as if all of it were looked at in every cycle, and named where it is little."""

from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from staleflow.protocol import StalenessLedger
from staleflow.runtime.situate import Blocking

FEW = 2


@example(Random(61), 1)  # a group leaves for a later deadline while others wait, and is waited for again in the end
@given(st.randoms(use_true_random=False), st.integers(0, 2))
def test_nothing_that_joins_what_a_step_waits_for_is_missed(chance: Random, max_staleness: int) -> None:
    ledger, blocking = StalenessLedger(3, max_staleness), Blocking()
    flying, before, since = list[str](), list[str](), None
    for now in range(60):
        if chance.random() < 0.6 and ledger.reserve(
            f"g{now}", max(0, ledger.version - chance.randrange(max_staleness + 1))
        ):
            flying.append(f"g{now}")
        elif flying:
            name = flying.pop(chance.randrange(len(flying)))
            if chance.random() < 0.3:
                ledger.renew(name, ledger.version)
                flying.append(name)
            elif chance.random() < 0.8:
                ledger.occupy(name)
            else:
                ledger.release(name, "filtered")
        if chance.random() < 0.5:
            ledger.take()
        if ledger.ready():
            ledger.consume()
        elif ledger.frontier > ledger.version and chance.random() < 0.3:
            ledger.commit(ledger.version)
        groups = [] if ledger.frontier > ledger.version else ledger.blocking()
        if not groups:
            since = None
        elif since is None or not set(groups) <= set(before):
            since = float(now)
        before = groups
        blocking.update(ledger, FEW, float(now))
        assert (blocking.count, blocking.since) == (len(groups), since)
        assert blocking.groups == (groups if len(groups) <= FEW else [])
