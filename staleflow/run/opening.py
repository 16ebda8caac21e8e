"""The state of a run as an attempt at it begins: empty, or where the attempt before it was.

opened = open_state(config, directory, task, checkpoint)
opened.server, opened.record        # where the run is
opened.attempt                      # which start of the control plane this is: its term
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from staleflow.config import Config
from staleflow.config.machine import free_memory
from staleflow.config.memory import trajectory_bytes
from staleflow.protocol import StalenessLedger
from staleflow.run.directory import RunDirectory
from staleflow.run.record import Record
from staleflow.run.state import STATE, unpack_state
from staleflow.servers.durable import DurableJournal
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.tasks.opening import TaskSet

LAZY_S = 0.25
"""How long events may gather. Only the trainer waits for the journal: instances and reward workers end with this
process, so whatever they have heard that was not durable is forgotten on both sides."""


@dataclass(frozen=True, slots=True)
class Opened:
    server: TrajectoryServer
    payloads: Payloads
    journal: DurableJournal
    record: Record
    attempt: int
    resumed: bool
    """Whether there was anything before: then the control plane recovers before it runs."""


def open_state(
    config: Config, directory: RunDirectory, task: TaskSet, checkpoint: Path | None = None, in_place: bool = False
) -> Opened:
    attempt = directory.lives + 1
    journal = DurableJournal(directory.journal(attempt - 1 if in_place else attempt), lazy_s=LAZY_S)
    memory = trajectory_bytes(config, free_memory())
    payloads = Payloads(Limits(config.rollout.max_tokens, task.max_prompt_tokens, task.vocab_size, memory))
    ledger = StalenessLedger(config.groups, config.staleness, config.redundancy)
    server = TrajectoryServer(ledger, config.group_size, config.extra_members, journal, payloads)
    record = Record(config.staleness)
    if in_place:
        recover(server, journal)
        record.version = server.ledger.version
    elif checkpoint is not None:
        record = unpack_state((checkpoint / STATE).read_bytes(), server, journal)
        record.lives = attempt
    return Opened(server, payloads, journal, record, attempt, in_place or checkpoint is not None)
