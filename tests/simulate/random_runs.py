"""Random small runs with random faults. A failing seed is a bug report:

python -m tests.simulate.random_runs 139        # the same run again, with the journal's faults printed
"""

import sys
from dataclasses import replace
from random import Random

from staleflow.coordinator.strategies import Strategies
from staleflow.simulate import faults, invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.disk import FAULT
from staleflow.simulate.lengths import Bimodal, Lognormal, PowerLaw, Uniform
from staleflow.simulate.setting import Setting, preset
from staleflow.simulate.workload import Sampled, Workload

BASE = preset("paper-14b")
LENGTHS = (
    Lognormal.from_mean(400, 1.0),
    Uniform(50, 900),
    PowerLaw(60, 1.3),
    Bimodal(100, 2_000, 0.2),
)


def setting_of(seed: int) -> Setting:
    """Sizes, strategies and lengths that depend only on the seed."""
    random = Random(seed)
    groups = random.choice((2, 4))
    filtered = random.random() < 0.3
    prompts = random.choice((None, None, groups * 6 + random.choice((0, 1, 5))))
    return replace(
        BASE,
        name=f"scenario {seed}",
        instances=random.choice((2, 3, 4)),
        groups=groups,
        group_size=random.choice((2, 4)),
        staleness=random.choice((0, 1, 2, 3)),
        steps=6,
        training_gpus=4,
        redundancy=random.choice((0, 0, 1)),
        extra_members=random.choice((0, 0, 1)),
        filter="no-signal" if filtered else "none",
        reward_s=random.choice((0.0, 3.0)),
        prompts=None if filtered else prompts,  # prompts without signal are not drawn again
        workload=Workload(
            Sampled(random.choice(LENGTHS), between=random.choice((0.0, 0.5, 0.9))),
            max_tokens=4_000,
            drift=random.choice((0.0, 0.05)),
        ),
        kv_tokens=random.choice((8_000, 20_000)),
        max_running=random.choice((4, 16)),
        strategies=Strategies(
            consume=random.choice(("stream", "batch")),
            routing=random.choice(("waterfall", "least_loaded", "round_robin")),
            synchronisation=random.choice(("gain", "greedy", "starved")),
            migration=random.choice(("gain", "off")),
            tail=random.choice(("wait", "wait", "replace", "truncate")),
            tail_patience=random.choice((0.1, 0.5)),
            mu=random.choice((0.0, 0.1, 0.5)),
        ),
    )


def run(
    seed: int, count: int = 6, setting: Setting | None = None, names: tuple[str, ...] = tuple(faults.FAULTS)
) -> Cluster:
    """One run with ``count`` faults among those named, checked after every instant and at the end."""
    cluster = Cluster(setting or setting_of(seed), seed, keep_journal=True, shuffle=seed % 2 == 1)
    if cluster.setting.prompts is not None:
        names = tuple(name for name in names if name not in faults.GIVING_UP)
    if count:
        faults.arm(cluster, count, names)
    invariants.watch(cluster, every=1 if seed % 10 == 0 else 16)
    cluster.run()
    assert cluster.control.ledger.version == cluster.setting.steps
    assert len(cluster.recorder.steps) == cluster.setting.steps
    return cluster


if __name__ == "__main__":
    finished = run(int(sys.argv[1]))
    for event in finished.journal.events:
        if event[0] == FAULT:
            print(f"{event[1]:8.1f} s  {event[2]}")
    print(finished.journal.digest())
