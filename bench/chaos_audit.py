"""What a run has left, read by somebody who trusts nobody: was anything lost, repeated, too old, or left behind?

    findings = audit(run, summary)          # empty lists and zeros: all is well
    findings.wrong                                 # what is not, one line each

Three records are compared that different parts of a run write: the lines of ``metrics.jsonl``, one for each committed
step; the control plane's state in the newest checkpoint; and the journal.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from staleflow.config import Config
from staleflow.errors import StaleFlowError
from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import choose
from staleflow.run.decisions import read_decisions
from staleflow.run.directory import RunDirectory
from staleflow.run.state import STATE
from staleflow.servers.book import of_group
from staleflow.servers.durable import DurableJournal


@dataclass
class Findings:
    steps: int = 0
    tokens: int = 0
    """Trained."""
    lost: list[int] = field(default_factory=list[int])
    """Prompts that were drawn and are nowhere: not trained, not in the last state, not released."""
    twice: list[int] = field(default_factory=list[int])
    """Prompts that more than one step was trained on."""
    violations: int = 0
    """Tokens older than the bound."""
    steps_again: int = 0
    """Steps that were made again by a later attempt."""
    tokens_again: int = 0
    released: int = 0
    """Groups that were given up with a reason."""
    wrong: list[str] = field(default_factory=list[str])
    """Whatever else does not fit together."""

    @property
    def well(self) -> bool:
        return not (self.lost or self.twice or self.violations or self.wrong)


def audit(path: Path, summary: dict[str, Any]) -> Findings:
    """Of a run that has ended with a checkpoint."""
    found = Findings()
    run, config = RunDirectory.existing(path)
    rows = read_metrics(run.metrics)
    trained = _steps(found, run, config, rows)
    choice = choose(run.checkpoints)
    found.wrong += [str(each) for each in choice.skipped]
    if choice.folder is None:
        found.wrong.append("there is no whole checkpoint")
        return found
    state: Any = msgspec.msgpack.decode((choice.folder / STATE).read_bytes())[1]
    _prompts(found, state, trained)
    _counts(found, state, summary)
    _journal(found, run, rows)
    try:
        if not any(True for _ in read_decisions(run.decisions)):
            found.wrong.append("no decision was recorded")
    except (OSError, ValueError) as error:
        found.wrong.append(f"decisions cannot be read: {error}")
    return found


def _steps(found: Findings, run: RunDirectory, config: Config, rows: list[dict[str, Any]]) -> Counter[int]:
    """Every step once, whole, and young enough. Returns how often each prompt was trained."""
    found.steps = len(rows)
    if (made := [row["step"] for row in rows]) != list(range(len(rows))):
        found.wrong.append(f"metrics.jsonl lacks steps: {sorted(set(range(max(made) + 1)) - set(made))[:9]}")
    every = [json.loads(line) for line in run.metrics.read_text().splitlines() if line.strip()]
    found.steps_again = len(every) - len(rows)
    found.tokens = sum(int(row["tokens"]) for row in rows)
    found.tokens_again = sum(int(row["tokens"]) for row in every) - found.tokens
    trained: Counter[int] = Counter()
    for row in rows:
        trained.update(row["prompts"])
        told = row["groups"], len(row["prompts"]), len(row["lengths"])  # by the trainer, and by the control plane
        if told != (config.groups, config.groups, config.groups * config.group_size):
            found.wrong.append(
                f"step {row['step']} was made of {told[0]} groups, had {told[1]} and {told[2]} responses"
            )
        found.violations += sum(n for age, n in row["token_staleness"].items() if int(age) > config.staleness)
    found.twice = sorted(prompt for prompt, times in trained.items() if times > 1)
    return trained


def _prompts(found: Findings, state: dict[str, Any], trained: Counter[int]) -> None:
    """What was drawn was trained, is being made, is owed, or was released for good. Of the last the state only says
    how many there are, so it is what is left over."""
    live = {group[1] for group in state["groups"]}
    gone = [each for each in range(state["next_prompt"]) if each not in trained and each not in live]
    missing = [each for each in gone if each not in state["owed"]]
    found.released = sum(state["ledger"]["released"].values())
    if len(missing) > found.released:
        found.lost = missing
    if both := sorted(live & set(trained)):
        found.twice += both


def _counts(found: Findings, state: dict[str, Any], summary: dict[str, Any]) -> None:
    admitted, committed = summary["groups_admitted"], summary["groups_committed"]
    released, live = sum(summary["groups_released"].values()), len(state["ledger"]["groups"])
    if admitted != committed + released + live:
        found.wrong.append(f"{admitted} groups admitted, {committed} committed, {released} released, {live} live")
    for name, value in (("steps", found.steps), ("violations", 0), ("tokens_trained", found.tokens)):
        if summary[name] != value:
            found.wrong.append(f"the summary says {name}={summary[name]}, the steps say {value}")


def _journal(found: Findings, run: RunDirectory, rows: list[dict[str, Any]]) -> None:
    """The last journal commits what the steps say. Others that are still there can be read."""
    by_step = {row["step"]: sorted(row["prompts"]) for row in rows}
    paths = sorted(run.path.glob("events*.db"), key=lambda path: (len(path.name), path.name))
    for path in paths:
        try:
            for step, groups in committed(path):
                prompts = sorted(of_group(name)[0] for name in groups)
                last = path == run.journal(run.journals[-1])
                if last and by_step.get(step) != prompts:
                    found.wrong.append(
                        f"{path.name}: step {step} had {prompts}, metrics.jsonl says {by_step.get(step)}"
                    )
        except StaleFlowError as error:
            found.wrong.append(str(error))


def committed(path: Path) -> list[tuple[int, list[str]]]:
    """The groups of every step that the journal says was committed."""
    journal = DurableJournal(path, threaded=False)
    found: list[tuple[int, list[str]]] = []
    leased: list[str] = []
    try:
        for kind, *rest in journal.events():
            match kind:
                case "lease":
                    leased += rest[0]
                case "consume":
                    leased = list(rest[0])
                case "rollback":
                    leased = []
                case "commit":
                    found, leased = [*found, (rest[0], leased)], []
    finally:
        journal.close()
    return found
