"""Why a trajectory was moved, and what its life was."""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events
from staleflow.study.why.answer import Answer, plural, seconds
from staleflow.study.why.decided import decision_for
from staleflow.study.why.group import lives_of
from staleflow.study.why.lives import Lives, Spell, TrajectoryLife

REASONS = {
    "thrashing": "{source} held more than it has KV memory for, and {target} had room",
    "tail": "the open step waited for it, and {target} would end it sooner",
    "levelling": "{source} had far more context than {target} when both pulled: a move costs no further prefill then",
    "leaving": "{source} was told to leave",
}
INPUTS = ("newest", "waiting", "kv_free", "blockers", "blocked_s", "thrashing", "pull_s", "pace", "migration")


def about_trajectory(directory: RunDirectory, config: Config, name: str) -> Answer:
    lives = lives_of(directory, config, name.rpartition("/")[0])
    life = lives.trajectories.get(name)
    if life is None:
        raise ConfigError(
            f"trajectory {name} is not in the record of {directory.path}: see staleflow samples for names"
        )
    spells = life.spells(lives.time)
    facts = _facts(life, spells, lives)
    placed = [spell for spell in spells if spell.instance]
    if len(placed) < 2:
        return Answer("trajectory", f"{name} was not moved: {_life(life, spells, lives)}", facts)
    source, target = placed[-2], placed[-1]
    why, more = _why(directory, life, source, target)
    times = f" (the last of {plural(len(placed) - 1, 'move')})" if len(placed) > 2 else ""
    sentence = (
        f"{name} was moved from {source.instance} to {target.instance} at {seconds(source.end)}{times} because {why}"
    )
    return Answer("trajectory", sentence, facts | more)


def _why(directory: RunDirectory, life: TrajectoryLife, source: Spell, target: Spell) -> tuple[str, dict[str, Any]]:
    names = {"source": source.instance, "target": target.instance}
    decided = decision_for(directory, "Interrupt", life.name, before=source.end)
    if decided is not None and decided.time >= source.begin:
        reason: str = next(each[3] for each in decided.commands if each[:2] == ["Interrupt", life.name])
        inputs = {key: decided.inputs[key] for key in INPUTS if key in decided.inputs}
        return REASONS.get(reason, reason).format(**names), {"reason": reason, "decided_on": inputs}
    if any(kind == "misreport" for time, kind, _ in life.marks if time == source.end):
        wrong = next(value for time, kind, value in life.marks if kind == "misreport" and time == source.end)
        return f"{source.instance} could not serve it or reported what cannot be true: {wrong}", {"reason": "misreport"}
    lost = read_events(directory, about=[source.instance], kinds=["lost"])
    if any(abs(each.time - source.end) < 1 for each in lost):
        return f"{source.instance} died: it continued from its last streamed token", {"reason": "lost"}
    return f"{source.instance} gave it back; the decision is no longer recorded", {"reason": None}


def _life(life: TrajectoryLife, spells: list[Spell], lives: Lives) -> str:
    group = next(each for each in lives.groups.values() if life.name in each.members)
    parts = [f"{spell.where} for {seconds(spell.seconds)}" for spell in spells if spell.seconds >= 0.01]
    text = f"{', then '.join(parts) or 'it has not begun'} ({life.tokens:,} tokens)"
    if group.released is not None:
        return f"{text}; its group was released ({group.released[1]})"
    return f"{text}; step {group.step} trained it" if group.step is not None else text


def _facts(life: TrajectoryLife, spells: list[Spell], lives: Lives) -> dict[str, Any]:
    group = next(each for each in lives.groups.values() if life.name in each.members)
    return {
        "trajectory": life.name,
        "group": group.name,
        "group_version": group.version,
        "versions": [{"version": version, "tokens": count} for version, count in life.spans],
        "tokens": life.tokens,
        "moves": life.moves,
        "reward": next((value for _, kind, value in reversed(life.marks) if kind == "score"), None),
        "trained_at_step": group.step,
        "life": [
            {"doing": spell.doing, "instance": spell.instance, "from_s": spell.begin, "to_s": spell.end}
            for spell in spells
        ],
    }
