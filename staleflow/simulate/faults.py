"""Faults: things that go wrong in a simulated run, drawn from its seed.

    arm(cluster, count=8)     # before cluster.run()

Instances crash (and start again), hang, slow down, join late, or are told to leave; the network delays, repeats and
reorders; the trainer dies before its push, or after it and before it is announced, or announces it late; reward workers
do not answer; instances report what cannot be true; the control plane is killed and comes back from its journal, which
has lost what was not synced. What must hold in spite of all that is in ``invariants.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from staleflow.simulate.cluster import Cluster
from staleflow.simulate.disk import FAULT

Fault = Callable[[Cluster, Random], None]


def crash(cluster: Cluster, random: Random) -> None:
    rollout = random.choice(cluster.rollouts)
    if rollout.up:
        rollout.crash()
        cluster.loop.call_later(random.uniform(1, 120), rollout.restart)


def hang(cluster: Cluster, random: Random) -> None:
    random.choice(cluster.rollouts).hang(random.uniform(1, 150))


def slow_down(cluster: Cluster, random: Random) -> None:
    rollout = random.choice(cluster.rollouts)
    rollout.slow_down(random.uniform(0.1, 0.6))
    cluster.loop.call_later(random.uniform(10, 200), lambda: rollout.slow_down(1.0))


def late_join(cluster: Cluster, random: Random) -> None:
    cluster.add(random.uniform(0.5, 1.5))


def scale(cluster: Cluster, random: Random) -> None:
    """More or fewer instances; those that leave are drained first."""
    wanted, there = random.randint(1, 5), cluster.staying
    for _ in range(len(there), wanted):
        cluster.add()
    for rollout in random.sample(there, max(0, len(there) - wanted)):
        cluster.leave(rollout)


def bad_network(cluster: Cluster, random: Random) -> None:
    cluster.network.trouble(random.uniform(5, 100))


def kill_trainer(cluster: Cluster, random: Random) -> None:
    cluster.kill_trainer(random.uniform(1, 60), after_push=False)


def kill_trainer_after_push(cluster: Cluster, random: Random) -> None:
    cluster.kill_trainer(random.uniform(1, 60), after_push=True)


def late_announcement(cluster: Cluster, random: Random) -> None:
    """Instances may hold a version before the control plane knows that it exists."""
    cluster.trainer.announce_s = random.uniform(0.01, 30)
    cluster.loop.call_later(random.uniform(20, 200), lambda: setattr(cluster.trainer, "announce_s", 0.0))


def kill_control(cluster: Cluster, random: Random) -> None:
    cluster.kill_control(random.uniform(0.1, 30))


def silent_rewards(cluster: Cluster, random: Random) -> None:
    cluster.rewards.silent = random.uniform(0.05, 0.6)
    cluster.loop.call_later(random.uniform(20, 200), lambda: setattr(cluster.rewards, "silent", 0.0))


def lie(cluster: Cluster, random: Random) -> None:
    cluster.lies[random.choice(cluster.rollouts).name] = random.randint(1, 4)


FAULTS: dict[str, Fault] = {
    each.__name__: each
    for each in (
        crash,
        hang,
        slow_down,
        late_join,
        scale,
        bad_network,
        kill_trainer,
        kill_trainer_after_push,
        late_announcement,
        kill_control,
        silent_rewards,
        lie,
    )
}


def arm(cluster: Cluster, count: int, names: tuple[str, ...] = tuple(FAULTS)) -> None:
    """Let ``count`` random faults happen, one after the other."""
    random = cluster.keyed.generator("faults")
    setting = cluster.setting
    batch_tokens = setting.groups * setting.group_size * cluster.workload.mean_tokens()
    pause = max(1.0, 2.0 * setting.trainer.train_s(batch_tokens) * setting.steps / (count + 1))

    def happen(left: int) -> None:
        if left == 0:
            return
        name = random.choice(names)
        cluster.journal.append((FAULT, cluster.loop.time(), name))
        FAULTS[name](cluster, random)
        cluster.loop.call_later(random.expovariate(1 / pause), happen, left - 1)

    cluster.journal_faults()
    cluster.on_start.append(lambda: cluster.loop.call_later(random.expovariate(1 / pause), happen, count) and None)
