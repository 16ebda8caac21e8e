"""A simulated run as a run directory: the same files as a real one, for ``staleflow dash``, ``why`` and ``report``.

    recording = Recording(cluster, directory)       # before the run
    cluster.run()
    recording.close(result)

It only looks, so a run that is recorded is the same run. Events are those of the journal with the virtual time; prompts
and responses have no text, so there are no samples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from staleflow.coordinator.decide import Decision
from staleflow.observe.metrics import MetricsLog
from staleflow.run.decisions import DecisionLog
from staleflow.run.directory import RunDirectory
from staleflow.run.fleet import Doing, FleetLog, InstanceMoment, Moment
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import STAMP_S, Event
from staleflow.servers.lifecycle import Group
from staleflow.simulate.cluster import DECISION, Cluster
from staleflow.simulate.rollout import SimRollout
from staleflow.types import GIVEN

COMMIT_EVENTS = 4096


class Recording:
    def __init__(self, cluster: Cluster, directory: RunDirectory) -> None:
        self._cluster = cluster
        self._directory = directory
        self._journal = DurableJournal(directory.journal(), threaded=False)
        setting = cluster.setting
        self._journal.belongs_to(
            {
                "batch_size": setting.groups,
                "max_staleness": setting.staleness,
                "redundancy": setting.redundancy,
                "group_size": setting.group_size,
                "extra_members": setting.extra_members,
            }
        )
        self._decisions = DecisionLog(directory.decisions, on_trouble=_refuse)
        self._fleet = FleetLog(directory.fleet, on_trouble=_refuse)
        self._metrics = MetricsLog(directory.metrics)
        self._stamped = float("-inf")
        self._written = 0
        self._last_step = self._idle = 0.0
        """When the last step was committed, and how long the trainer had been idle by then."""
        cluster.journal.sink = self._append
        cluster.on_step.append(self._committed)
        cluster.on_decision = self._decided
        cluster.on_start.append(self._attach)

    def close(self, result: dict[str, Any]) -> None:
        """``result``: what the run is summed up by."""
        self._look(now := self._cluster.loop.time())
        self._journal.close()
        self._decisions.flush()
        self._metrics.close()
        self._directory.write(
            self._directory.summary, {"steps": len(self._cluster.recorder.steps), "wall_s": now} | result
        )

    def _attach(self) -> None:
        loop = self._cluster.loop
        before = loop.on_instant

        def look() -> None:
            if before is not None:
                before()
            if self._fleet.due(loop.now, len(self._cluster.rollouts)):
                self._look(loop.now)

        loop.on_instant = look

    def _append(self, event: Event) -> None:
        if event[0] == DECISION:
            return
        if (now := self._cluster.loop.now) - self._stamped >= STAMP_S:
            self._journal.stamp(now)
            self._stamped = now
        self._journal.append(event)
        self._written += 1
        if self._written % COMMIT_EVENTS == 0:
            self._journal.commit()

    def _decided(self, now: float, decision: Decision) -> None:
        self._decisions.write(now, decision)

    def _committed(self, step: int, groups: list[Group]) -> None:
        now, idle = self._cluster.loop.now, sum(self._cluster.trainer.idle.values())
        members = [each for group in groups for each in group.members if each.state == "consumed"]
        tokens, trajectories = Counter[int](), Counter[int]()
        for each in members:
            made = [span for span in each.spans if span[0] != GIVEN]
            trajectories[step - min(made)[0]] += 1
            for version, count in made:
                tokens[step - version] += count
        rewards = [each.reward or 0.0 for each in members]
        self._metrics.write(
            {
                "step": step,
                "time": now,
                "reward": sum(rewards) / max(1, len(rewards)),
                "token_staleness": tokens,
                "trajectory_staleness": trajectories,
                "train_s": max(0.0, now - self._last_step - (idle - self._idle)),
                "idle_s": idle - self._idle,
                "prompt_tokens": sum(each.group.prompt_tokens for each in members),
                "tokens": sum(each.generated for each in members),
                "lengths": [each.generated for each in members],
                "response_tokens": sum(each.generated for each in members) / max(1, len(members)),
            }
        )
        self._last_step, self._idle = now, idle

    def _look(self, now: float) -> None:
        control = self._cluster.control
        trainer = "accumulating" if control.ledger.frontier == control.ledger.version else "updating"
        waits = "" if self._cluster.down else control.watch.waits_for()
        instances = tuple(self._instance(each, now) for each in self._cluster.rollouts if not each.gone)
        self._fleet.write(Moment(round(now, 3), 0.0, "", trainer, waits, (), instances))

    def _instance(self, each: SimRollout, now: float) -> InstanceMoment:
        model = each.engine.instance
        doing: Doing = "down" if not each.up or each.hung else "pulling" if model.paused else ""
        if doing == "down":
            return InstanceMoment(each.name, each.version, 0, 0, 0, 0, model.generated_tokens, doing)
        load = model.load_at_last_step() if model.next_event() <= now else model.load(now)
        used, total = load.kv_used, load.kv_used + load.kv_free
        return InstanceMoment(
            each.name,
            each.version,
            load.running + load.prefilling,
            load.waiting,
            used,
            total,
            load.generated_tokens,
            doing,
        )


def _refuse(why: str) -> None:
    raise OSError(why)
