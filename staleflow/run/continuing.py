"""How a run is continued, as its messages say it: by the command, or by the program whose functions are its rewards.

continuing(run, config.reward)                  # staleflow train --resume runs/x
continuing(run, config.reward, "steps=80")      # staleflow train --resume runs/x steps=80
continuing(run, stored_reward(run))             # for who has only the run's directory

Of a run whose reward is a function ``correct`` of a program: ``staleflow.train(resume='runs/x', reward=correct)``.
"""

from __future__ import annotations

from keyword import iskeyword
from pathlib import Path

from staleflow.errors import StaleFlowError
from staleflow.reward.options import PYTHON, Reward
from staleflow.run.directory import RunDirectory


def continuing(run: Path, reward: Reward, *changes: str) -> str:
    """``changes``: settings that it is to have then."""
    if not of_a_program(reward):
        return " ".join(["staleflow train --resume", str(run), *changes])
    stored = str(RunDirectory(run).config_file)
    config = f"staleflow.load({stored!r}, {list(changes)!r}), " if changes else ""
    return f"staleflow.train({config}resume={str(run)!r}, reward={_given(reward)})"


def stored_reward(run: Path) -> Reward:
    """Of the run in this directory. The default if its settings cannot be read: whoever continues it will be told."""
    try:
        return RunDirectory.existing(run)[1].reward
    except (StaleFlowError, OSError):
        return Reward()


def of_a_program(reward: Reward) -> bool:
    """Whether only the program that started the run has its functions."""
    return any(each.startswith(PYTHON) for each in reward.functions)


def _given(reward: Reward) -> str:
    """As the program gave it to ``staleflow.train``."""
    names = [_name(each) for each in reward.functions]
    if reward.weights:
        weighted = zip(names, reward.weights, strict=True)
        return "{" + ", ".join(f"{name}: {weight:g}" for name, weight in weighted) + "}"
    return names[0] if isinstance(reward.function, str) else f"[{', '.join(names)}]"


def _name(function: str) -> str:
    if not function.startswith(PYTHON):
        return repr(function)
    name = function.removeprefix(PYTHON)
    return name if name.isidentifier() and not iskeyword(name) else f"<{name}>"  # a lambda
