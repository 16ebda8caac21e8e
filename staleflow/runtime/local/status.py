"""A running ``LocalRun`` as the value that the terminal view shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from staleflow.observe.status import InstanceStatus, Status

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

RECENT = 60


def status_of(run: LocalRun) -> Status:
    record, ledger, seconds = run.record, run.server.ledger, run.time.seconds
    counts = ledger.counts()
    ages = record.token_staleness
    trained = max(1, sum(ages.values()))
    return Status(
        step=ledger.version,
        steps=run.config.steps,
        seconds=seconds,
        bound=run.config.staleness,
        reward=record.rewards[-1] if record.rewards else None,
        accuracy=[(version, accuracy) for version, _, accuracy in record.accuracy],
        binary=record.binary,
        rewards=record.rewards[-RECENT:],
        max_staleness=max(ages, default=0),
        mean_staleness=sum(age * count for age, count in ages.items()) / trained,
        staleness_histogram=dict(ages),
        tokens_trained=record.tokens_trained,
        tokens_wasted=record.tokens_wasted,
        trained_tokens_per_s=record.tokens_trained / seconds if seconds else 0.0,
        trainer_idle=record.trainer_idle_s / seconds if seconds and record.rewards else None,
        trainer_doing=_trainer(run),
        doing="" if run.training else _doing(run),
        control_overhead=run.time.control_share if record.rewards else None,
        groups_ready=counts["complete"],
        groups_in_flight=counts["live"] - counts["complete"] - counts["leased"],
        instances=tuple(_instance(run, name) for name in sorted(run.instances, key=lambda name: (len(name), name))),
        waiting_for=run.control.watch.waits_for(),
        loss=run.loss,
        cut=run.signals.cut,
        without_signal=run.signals.without_signal,
        left_out=run.task.left_out / max(1, run.task.left_out + (run.task.size or 0)),
        notes=run.incidents.notes,
    )


def _trainer(run: LocalRun) -> str:
    ledger = run.server.ledger
    if not run.training:
        return ""
    return f"updating to version {ledger.frontier}" if ledger.frontier > ledger.version else "accumulating"


def _doing(run: LocalRun) -> str:
    if run.started:
        return run.doing
    waits = [name for name, child in run.crew.children.items() if not child.ready.is_set()]
    return f"starts its processes: waits for {', '.join(waits)}" if waits else ""


def _instance(run: LocalRun, name: str) -> InstanceStatus:
    port = run.instances[name]
    state = port.state
    member = run.control.members.get(name)
    return InstanceStatus(
        name=name,
        version=state.version if state.version >= 0 else None,
        running=state.running,
        waiting=state.waiting,
        kv_used=state.kv_used,
        kv_total=state.kv_total,
        alive=member is not None and member.alive,
        pulling=member is not None and member.pulling is not None,
        leaving=member is not None and member.leaving,
        tokens_per_s=port.tokens / run.time.seconds if run.time.seconds else 0.0,
        tokens=port.tokens,
    )
