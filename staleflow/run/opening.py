"""The state of a run as an attempt at it begins: empty, or where the attempt before it was.

    opened = open_state(config, directory, task, checkpoint)
    opened.server, opened.kept.record   # where the run is
    opened.attempt                      # which start of the control plane this is: its term
    opened.how                          # what it continues from, for people

A run continues from its journal. The trainer continues from shared memory, or from the newest checkpoint (the base
model, if there is none yet) and the steps since then that the journal can have made again. If the journal cannot be
read, or lacks some of these steps, the run continues from the checkpoint alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from staleflow.config import Config
from staleflow.config.machine import free_memory
from staleflow.config.memory import trajectory_bytes
from staleflow.errors import RunError, line_of
from staleflow.protocol import StalenessLedger
from staleflow.run.directory import RunDirectory
from staleflow.run.journalled import JournalledRecord
from staleflow.run.record import Record
from staleflow.run.shared import left_behind
from staleflow.run.state import STATE, unpack_state, version_in
from staleflow.servers.database import DamagedError, JournalError
from staleflow.servers.durable import DurableJournal
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.tasks.opening import TaskSet

LAZY_S = 1.0
"""How long events may gather. Only the trainer waits for the journal: what others have heard and the journal has not
is dropped when the next control plane asks what they hold."""
KEPT_BYTES = 4 << 30
"""Payload of committed steps that the journal may keep. Beyond it a checkpoint is due; at twice that, the steps are
dropped, and a crash before the next checkpoint costs them."""


@dataclass(frozen=True, slots=True)
class Opened:
    server: TrajectoryServer
    payloads: Payloads
    journal: DurableJournal
    kept: JournalledRecord
    attempt: int = 0
    standby: bool = False
    """Whether the trainer continues from shared memory."""
    how: str = ""
    """What the run continues from and what is made again, for people; empty if it is new."""


def open_state(
    config: Config, directory: RunDirectory, task: TaskSet, checkpoint: Path | None = None, trainer_lives: bool = False
) -> Opened:
    """``RunError`` if there was an attempt before and it left nothing to continue from. ``trainer_lives``: that of the
    attempt before, at the version where the journal ends or at the next."""
    numbers = directory.journals
    if not numbers and checkpoint is None:
        return _begun(_opened(config, directory, task, 1))
    why = "there is no journal"
    if numbers:
        try:
            return _begun(_continued(config, directory, task, numbers[-1], checkpoint, trainer_lives))
        except DamagedError as error:
            why = str(error)
    if checkpoint is None:
        raise RunError(f"{directory.path} has no checkpoint to resume from, and {why}: start a new run")
    return _rewound(config, directory, task, checkpoint, why)


def _continued(
    config: Config, directory: RunDirectory, task: TaskSet, number: int, checkpoint: Path | None, trainer_lives: bool
) -> Opened:
    """From the journal. ``DamagedError`` if no trainer can be brought to where it ends."""
    opened = _opened(config, directory, task, number)
    ledger, path = opened.server.ledger, opened.journal.path
    if trainer_lives:
        how = f"continues at version {ledger.version}, from the journal, with its trainer: no step is made again"
        return replace(opened, standby=True, how=how)
    version, left = ledger.version, left_behind(directory)
    saved = version_in((checkpoint / STATE).read_bytes()) if checkpoint is not None else 0
    base = f"checkpoint {checkpoint.name}" if checkpoint is not None else "the base model"
    missing = [step for step in range(saved, version) if not _has(opened, step)]
    standby = left in (version, ledger.frontier)
    if standby:
        how = f"at version {left}, from shared memory and the journal: no step is made again"
    elif version < saved or missing:
        opened.journal.close()
        lacks = f" and lacks step {missing[0]}" if missing else ""
        raise DamagedError(f"the journal {path} ends at version {version}{lacks}")
    elif version == saved:
        how = f"at version {version}, from {base} and the journal: no step is made again"
    else:
        steps = f"step {saved} is" if version - saved == 1 else f"steps {saved} to {version - 1} are"
        how = f"at version {version}, from the journal: {steps} made again, without decoding, from {base}"
    return replace(opened, standby=standby, how=f"continues {how}")


def _has(opened: Opened, step: int) -> bool:
    """Whether the journal has what the step was made of."""
    made = opened.server.made.get(step)
    return made is not None and all(name in opened.journal for name in made.names() if "/" not in name)


def _rewound(config: Config, directory: RunDirectory, task: TaskSet, checkpoint: Path, why: str) -> Opened:
    """From the checkpoint alone, with a new journal. The ones before it are needed no more."""
    before = directory.journals
    number = 1 + max(before, default=0)
    opened = _opened(config, directory, task, number)
    try:
        record = unpack_state((checkpoint / STATE).read_bytes(), opened.server, opened.journal)
        opened.kept.record = record
        attempt = _begun(opened, max(number, record.lives + 1)).attempt
        opened.journal.commit()
    except BaseException:
        with suppress(JournalError):
            opened.journal.close()
        directory.remove_journal(number)
        raise
    for each in before:
        directory.remove_journal(each)
    how = f"continues from checkpoint {checkpoint.name} alone, and makes the steps after it anew: {why}"
    return replace(opened, attempt=attempt, how=how)


def _opened(config: Config, directory: RunDirectory, task: TaskSet, number: int) -> Opened:
    """The state in the journal of this number; an empty one if it is new."""
    memory = trajectory_bytes(config, free_memory())
    given = config.longest_response - config.rollout.max_tokens
    payloads = Payloads(Limits(config.rollout.max_tokens, task.max_prompt_tokens, task.vocab_size, memory, given))
    ledger = StalenessLedger(config.groups, config.staleness, config.redundancy)
    journal = DurableJournal(directory.journal(number), lazy_s=LAZY_S)
    kind = EpisodeServer if config.environment.play else TrajectoryServer
    server = kind(ledger, config.group_size, config.extra_members, journal, payloads)
    kept = JournalledRecord(Record(config.staleness), server.note)
    server.keeps_steps = True
    server.beside = lambda: kept.record.to_bytes()
    server.on_aborted = kept.aborted
    try:
        recover(server, journal, kept.restore, kept.hear)
    except BaseException as error:
        journal.close()
        if isinstance(error, KeyError | IndexError | TypeError | ValueError | AttributeError | AssertionError) and (
            not isinstance(error, JournalError)
        ):
            raise DamagedError(f"the journal {journal.path} does not fit together ({line_of(error)})") from error
        raise
    return Opened(server, payloads, journal, kept)


def _begun(opened: Opened, first: int = 1) -> Opened:
    """Counted as another attempt."""
    attempt = opened.kept.record.lives = opened.journal.begin(first)
    return replace(opened, attempt=attempt)
