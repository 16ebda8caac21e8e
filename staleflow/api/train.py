"""``train``: a run with rewards and data of this program.

result = train(load("laptop", ["steps=20"]), on_step=lambda row: print(row["step"], row["reward"]))
result = train(config, reward={correct: 1.0, brief: 0.2}, data=[{"prompt": "2 + 2", "answer": "4"}])
result = train(config, reward=correct, data="train.jsonl", resume="runs/latest")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.api.command import Command, caller_folder, configuration
from staleflow.api.data import with_data
from staleflow.api.result import Interrupted, Result
from staleflow.api.steps import Steps
from staleflow.caller import REWARDS, RUN, STOPPED
from staleflow.config import Config, ConfigError, load, to_yaml
from staleflow.config.convert import leaves, to_tree
from staleflow.config.loading import fs_path
from staleflow.config.text import render_flow
from staleflow.errors import StaleFlowError
from staleflow.reward.forks import Forks
from staleflow.reward.options import PYTHON, Reward
from staleflow.reward.options import REWARDS as KNOWN
from staleflow.run.directory import RunDirectory

LOOK_S = 0.2
"""How often new steps are looked for."""

ARewardFunction = Callable[..., Any]
Rewards = str | ARewardFunction | Iterable[str | ARewardFunction] | Mapping[str | ARewardFunction, float]
OnStep = Callable[[dict[str, Any]], object]


def train(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    reward: Rewards | None = None,
    data: Any = None,
    on_step: OnStep | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Result:
    """Train, or continue the run in the directory ``resume``. Returns when the run has ended.

    ``config``: from ``load``, or what ``load`` takes; None: the embedded default, or that of the run to be resumed.
    ``reward``: a function of problem and response, sync or async, or ``module:function``; several as a list, or with
    their weights as a mapping. A function of this program is run in forks of it. ``data``: a file, rows, texts, a
    ``datasets`` object, a name on the Hugging Face hub, or a mapping of ``train`` and ``held_out`` to these.
    ``on_step`` is called with each line of ``metrics.jsonl``; if it raises, the run ends in good order.

    ``StaleFlowError`` if something is wrong; ``Interrupted`` after Ctrl-C.
    """
    if on_step is not None and not callable(on_step):
        raise ConfigError(f"on_step is a {type(on_step).__name__}: give a function of one row")
    with ExitStack() as held:
        folder = held.enter_context(caller_folder())
        config = configuration(config)
        directory, before = (None, None) if resume is None else RunDirectory.existing(Path(fs_path(resume, "resume")))
        wanted = config or before or load(None)
        options, own = with_rewards(wanted.reward, reward)
        wanted = with_data(replace(wanted, reward=options), data)
        if own:
            held.enter_context(Forks(own, folder / REWARDS))
        if resume is None or before is None:
            words = [str(folder / f"{_name()}.yaml")]
            Path(words[0]).write_text(to_yaml(wanted), encoding="utf-8")
        else:
            words = ["--resume", os.fspath(resume), *_changes(before, wanted)]
        steps = Steps(folder / RUN, on_step, None if directory is None else directory.metrics)
        _follow(held.enter_context(Command(["train", *words], folder)), steps, folder)
        result = Result(Path((folder / RUN).read_text()))
    if result.interrupted:
        raise Interrupted(result)
    return result


def with_rewards(options: Reward, reward: Rewards | None) -> tuple[Reward, dict[str, ARewardFunction]]:
    """The options that name these rewards, and those of them that are functions, by name."""
    if reward is None:
        return options, {}
    if isinstance(reward, Mapping):
        given, weights = list(reward), tuple(map(_weight, reward.values()))
    elif isinstance(reward, str) or callable(reward) or not isinstance(reward, Iterable):
        given, weights = [reward], ()
    else:
        given, weights = list(reward), options.weights
    names, own = list[str](), dict[str, ARewardFunction]()
    for each in given:
        if isinstance(each, str):
            names.append(each)
        elif callable(each):
            name = getattr(each, "__name__", type(each).__name__).strip("<>")
            own[name] = each
            names.append(f"{PYTHON}{name}")
        else:
            raise ConfigError(f"reward={each!r} is a {type(each).__name__}: give a function, or module:function")
    named = names[0] if len(names) == 1 and not isinstance(reward, Mapping) else tuple(names)
    options = replace(options, function=named, weights=weights)
    for name, function in own.items():
        KNOWN.check_call(f"{PYTHON}{name}", function, options.arguments_of(name))
    return options, own


def _weight(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the weight {value!r} of a reward is a {type(value).__name__}: give a number") from None


def _follow(command: Command, steps: Steps, folder: Path) -> None:
    asked = False
    while True:
        try:
            while command.running(LOOK_S):
                steps.look()
            steps.look()
            break
        except KeyboardInterrupt:
            command.interrupt()
            if asked:  # for the second time: it does not wait for its step
                raise
            asked = True
        except BaseException as error:  # of on_step: the run that ends for it says so
            with suppress(OSError):
                (folder / STOPPED).write_text(type(error).__name__, encoding="utf-8")
            raise
    try:
        code, _ = command.result()
    except StaleFlowError as error:
        if asked:  # before there was anything to continue
            raise KeyboardInterrupt(str(error)) from error
        raise
    if code and not steps.known:
        raise KeyboardInterrupt


def _changes(before: Config, after: Config) -> list[str]:
    """What the resumed run is to do otherwise. The command refuses what it may not."""
    was, now = dict(leaves(to_tree(before))), dict(leaves(to_tree(after)))
    return [f"{name}={render_flow(value)}" for name, value in now.items() if was[name] != value]


def _name() -> str:
    """Of this program, for the run's directory."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).stem if main else "notebook"
