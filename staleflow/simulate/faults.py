"""Faults: things that go wrong in a simulated run, drawn from its seed.

    arm(cluster, count=8)     # before cluster.run()

Instances crash (and start again), hang, slow down, join late, or are told to leave, and report what cannot be true;
every channel between two parts delays, repeats and reorders, alone or together with others; the trainer dies before its
push, or after it and before it is announced, or hangs; reward workers do not answer, fail, or are away; the disk is
full or slow; the machine of the control plane sleeps; the control plane is killed, at any time or at any event, and
comes back from its journal, which has lost what was not synced or a part of it. Several of these happen at once. What
must hold in spite of all that is in ``invariants.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from staleflow.simulate.cluster import SYNC_S, Cluster
from staleflow.simulate.disk import FAULT
from staleflow.simulate.network import TROUBLES, Route

Fault = Callable[[Cluster, Random], None]


def seconds(random: Random, most: float) -> float:
    """As often in each order of magnitude: as long as a message takes, a pull, a step, or until somebody notices."""
    return most * 10 ** -random.uniform(0, 4)


# Instances


def crash(cluster: Cluster, random: Random) -> None:
    cluster.crash(random.choice(cluster.rollouts), seconds(random, 120), noticed=random.random() < 0.5)


def hang(cluster: Cluster, random: Random) -> None:
    cluster.hang(random.choice(cluster.rollouts), seconds(random, 150))


def slow_down(cluster: Cluster, random: Random) -> None:
    rollout = random.choice(cluster.rollouts)
    rollout.slow_down(random.uniform(0.1, 0.6))
    cluster.loop.call_later(seconds(random, 200), lambda: rollout.slow_down(1.0))


def late_join(cluster: Cluster, random: Random) -> None:
    cluster.add(random.uniform(0.5, 1.5))


def scale(cluster: Cluster, random: Random) -> None:
    """More or fewer instances; those that leave are drained first."""
    wanted, there = random.randint(1, 5), cluster.staying
    for _ in range(len(there), wanted):
        cluster.add()
    for rollout in random.sample(there, max(0, len(there) - wanted)):
        cluster.leave(rollout)


def lie(cluster: Cluster, random: Random) -> None:
    cluster.lies[random.choice(cluster.rollouts).name] = random.randint(1, 4)


# Messages


def trouble(*routes: Route) -> Fault:
    """On these routes, for all instances or for one."""

    def happen(cluster: Cluster, random: Random) -> None:
        kind, lasts = random.choice(list(TROUBLES)), seconds(random, 120)
        chosen = random.choice(cluster.rollouts).name if random.random() < 0.5 else None
        for rollout in cluster.rollouts:
            for route in routes:
                if route not in ("commands", "reports"):
                    cluster.network.channel(route).trouble(kind, lasts)
                elif chosen in (None, rollout.name):
                    cluster.network.channel(route, rollout.name).trouble(kind, lasts)

    return happen


def bad_network(cluster: Cluster, random: Random) -> None:
    """Everywhere, on each channel in its own way."""
    for channel in list(cluster.network.channels()):
        channel.trouble(random.choice(list(TROUBLES)), seconds(random, 100))


# Trainer


def kill_trainer(cluster: Cluster, random: Random) -> None:
    cluster.kill_trainer(seconds(random, 60), after_push=False)


def kill_trainer_after_push(cluster: Cluster, random: Random) -> None:
    cluster.kill_trainer(seconds(random, 60), after_push=True)


def hang_trainer(cluster: Cluster, random: Random) -> None:
    cluster.trainer.hang(seconds(random, 150))


# Control plane


def kill_control(cluster: Cluster, random: Random) -> None:
    cluster.kill_control(seconds(random, 60), random.random(), messages_survive=random.random() < 0.5)


def kill_control_at_an_event(cluster: Cluster, random: Random) -> None:
    """In the middle of a handler as well: the journal may end after any of its events."""
    cluster.journal.at_event(random.randint(1, 60), lambda: kill_control(cluster, random))


def sleep(cluster: Cluster, random: Random) -> None:
    """The machine of the control plane sleeps: the clock jumps, everything that was due is late, and comes at once."""
    cluster.loop.jump(seconds(random, 200))


def full_disk(cluster: Cluster, random: Random) -> None:
    cluster.journal.full(seconds(random, 150))


def slow_disk(cluster: Cluster, random: Random) -> None:
    cluster.journal.sync_s = seconds(random, 5)
    cluster.loop.call_later(seconds(random, 200), lambda: setattr(cluster.journal, "sync_s", SYNC_S))


# Rewards


def silent_rewards(cluster: Cluster, random: Random) -> None:
    cluster.rewards.silent = random.uniform(0.05, 0.6)
    cluster.loop.call_later(seconds(random, 200), lambda: setattr(cluster.rewards, "silent", 0.0))


def failing_rewards(cluster: Cluster, random: Random) -> None:
    cluster.rewards.failing = random.uniform(0.05, 0.4)
    cluster.loop.call_later(seconds(random, 60), lambda: setattr(cluster.rewards, "failing", 0.0))


def absent_rewards(cluster: Cluster, random: Random) -> None:
    """A service is away: responses wait for it, and those that were asked for again are answered more than once."""
    cluster.network.channel("to rewards").trouble("held back", seconds(random, 300))


def together(cluster: Cluster, random: Random) -> None:
    """Several at the same instant."""
    for name in random.sample([each for each in FAULTS if each != "together"], random.randint(2, 4)):
        FAULTS[name](cluster, random)


FAULTS: dict[str, Fault] = {
    **{
        each.__name__: each
        for each in (
            crash,
            hang,
            slow_down,
            late_join,
            scale,
            lie,
            bad_network,
            kill_trainer,
            kill_trainer_after_push,
            hang_trainer,
            kill_control,
            kill_control_at_an_event,
            sleep,
            full_disk,
            slow_disk,
            silent_rewards,
            failing_rewards,
            absent_rewards,
            together,
        )
    },
    "late_commands": trouble("commands"),
    "late_reports": trouble("reports"),
    "late_orders": trouble("to trainer"),
    "late_announcement": trouble("from trainer"),
    "late_questions": trouble("to rewards"),
    "late_scores": trouble("from rewards"),
}
"""A late announcement: instances hold a version before the control plane knows that it exists."""
GIVING_UP = ("silent_rewards", "failing_rewards", "together")
"""Those that may cost a prompt: where there are no more than needed, the data can end before the run."""


def arm(cluster: Cluster, count: int, names: tuple[str, ...] = tuple(FAULTS)) -> Counter[str]:
    """Let up to ``count`` random faults happen, one after the other. Those that have happened, by name."""
    happened: Counter[str] = Counter()
    random = cluster.keyed.generator("faults")
    setting = cluster.setting
    batch_tokens = setting.groups * setting.group_size * cluster.workload.mean_tokens()
    pause = max(1.0, 2.0 * setting.trainer.train_s(batch_tokens) * setting.steps / (count + 1))

    def happen(left: int) -> None:
        if left == 0:
            return
        name = random.choice(names)
        happened[name] += 1
        cluster.journal.append((FAULT, cluster.loop.time(), name))
        FAULTS[name](cluster, random)
        cluster.loop.call_later(random.expovariate(1 / pause), happen, left - 1)

    cluster.journal_faults()
    cluster.on_start.append(lambda: cluster.loop.call_later(random.expovariate(1 / pause), happen, count) and None)
    return happened
