"""A small run of the ledger on random lengths, as text: what ``staleflow train`` shows until training exists."""

import random

from staleflow.protocol.ledger import StalenessLedger

BATCH_SIZE = 4
MAX_STALENESS = 2
STEPS = 12


def run_demo(seed: int = 0) -> str:
    """Groups of very unequal length run at once; a step trains as soon as the ledger allows."""
    chance = random.Random(seed)
    ledger = StalenessLedger(BATCH_SIZE, MAX_STALENESS)
    finish: dict[str, float] = {}
    version_of: dict[str, int] = {}
    clock = 0.0
    lines = [
        f"{BATCH_SIZE} groups to a step, bound {MAX_STALENESS}",
        " step   time  staleness of its groups  waits before it",
    ]
    waits = 0
    while ledger.version < STEPS:
        while ledger.can_reserve(ledger.version):
            group = f"g{ledger.counts()['admitted']}"
            ledger.reserve(group, ledger.version)
            version_of[group] = ledger.version
            finish[group] = clock + chance.lognormvariate(0, 1)
        if not ledger.ready():
            waits += bool(ledger.blocking())
            group = min(finish, key=lambda name: finish[name])
            clock = finish.pop(group)
            ledger.occupy(group)
            continue
        batch = ledger.consume()
        ages = sorted(batch.step - version_of[group] for group in batch.groups)
        lines.append(f"{batch.step:5}  {clock:5.1f}  {' '.join(map(str, ages)):23}  {waits}")
        ledger.commit(batch.step)
        waits = 0
    counts = ledger.counts()
    lines.append(f"{counts['admitted']} groups admitted, {counts['committed']} trained, {counts['live']} still live")
    return "\n".join(lines)
