"""How fast a run could be by the law, and which setting would let it be faster.

The law is that of the run as it was configured and measured (``staleflow.study.measured``). What a changed setting
would bring is the change of the even ceiling (``staleflow.study.law``), which is nearer to what can be reached than the
law is. ``staleflow plan --run-dir RUN`` simulates the same and finds the best of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from staleflow.config import Config
from staleflow.errors import StaleFlowError
from staleflow.run.directory import RunDirectory
from staleflow.simulate.setting import Setting
from staleflow.study.law import BatchWork, Law, even_ceilings, law, work_of
from staleflow.study.measured import read_run

LENGTHS = 16_384
"""The latest that are looked at: more would take longer and say the same."""
WORTH = 0.02
"""A smaller gain is not worth a line."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the law allows the run."""

    setting: Setting
    work: BatchWork
    terms: Law

    @property
    def streamed(self) -> bool:
        return self.setting.strategies.consume == "stream"

    def ceiling(self, setting: Setting, anew: bool = False) -> float:
        """Tokens per second that a setting can bring, about. ``anew``: its batches are others."""
        return self.ceilings(setting, anew)[setting.instances]

    def ceilings(self, setting: Setting, anew: bool = False) -> dict[int, float]:
        """The same for every split of its GPUs, by instances."""
        streamed = setting.strategies.consume == "stream"
        return even_ceilings(setting, streamed, work_of(setting) if anew else self.work)

    @property
    def facts(self) -> dict[str, Any]:
        terms = self.terms
        found = {"training_s": terms.train_s, "rollout_s": terms.rollout_s, "tail_s": terms.tail_s}
        return found | {"step_s": terms.step_s, "binds": terms.binds}


@dataclass(frozen=True, slots=True)
class Help:
    setting: str
    gain: float | None
    """Tokens per second that it would bring, about, as a share; None: nobody can say."""
    text: str

    @property
    def facts(self) -> dict[str, Any]:
        return {"setting": self.setting, "gain": self.gain, "text": self.text}


def allowed(directory: RunDirectory, group_size: int) -> Allowed | None:
    """By the latest lengths. None if too little is known of the run."""
    try:
        run = read_run(str(directory.path))
        most = LENGTHS // group_size * group_size
        setting = replace(run, lengths=run.lengths[-most:], prompts=(), signal=(), order=()).setting()
        work = work_of(setting)
        found = Allowed(setting, work, law(setting, setting.strategies.consume == "stream", work))
        found.ceiling(setting)
    except (StaleFlowError, ArithmeticError, LookupError, ValueError):
        return None
    return found


def helps(
    directory: RunDirectory, config: Config, cause: str, scored: float, tokens_per_s: float, found: Allowed | None
) -> list[Help]:
    """What would help, the best first. ``scored``: the share of waiting in which rewards were made; ``tokens_per_s``:
    what the run does now."""
    if cause == "reward":
        workers = f"reward.workers={2 * config.reward.workers}"
        text = f"{workers}, or a reward that answers sooner, would save up to {scored:.0%} of what is waited for"
        return [Help(workers, None, text)]
    if cause == "instance":
        name = f"staleflow scale {directory.path} rollout={max(1, config.rollout.instances - 1)}"
        return [Help("rollout.instances", None, f"Look at its log and what else runs there, or let it go ({name})")]
    if found is None:
        return []
    advice = {"training": _training, "rollout": _rollout, "tail": _tail, "bound": _bound}
    every = [each for each in advice[cause](found, tokens_per_s) if each.gain is None or each.gain >= WORTH]
    return sorted(every, key=lambda each: -(each.gain or 0.0))


def _help(setting: str, gain: float) -> Help:
    return Help(setting, gain, f"{setting} would bring about {gain:+.0%}")


def _split(found: Allowed) -> Iterator[Help]:
    """The best division of the GPUs, if it is another."""
    own, ceilings = found.setting, found.ceilings(found.setting)
    best = max(ceilings, key=lambda instances: ceilings[instances])
    gpus = own.gpus - best * own.gpus_per_instance
    if best != own.instances:
        gain = ceilings[best] / ceilings[own.instances] - 1
        yield _help(f"cluster.training_gpus={gpus} rollout.instances={best}", gain)


def _training(found: Allowed, _tokens_per_s: float) -> Iterator[Help]:
    own = found.setting
    yield from _split(found)
    per_token, fixed = own.trainer_per_token_gpu_s / 2, own.trainer_fixed_s / 2
    faster = replace(own, trainer_per_token_gpu_s=per_token, trainer_fixed_s=fixed)
    gain = found.ceiling(faster) / found.ceiling(own) - 1
    text = f"A trainer that is twice as fast would bring about {gain:+.0%}; no bound and no further instance helps"
    yield Help("training.device", gain, text)


def _rollout(found: Allowed, _tokens_per_s: float) -> Iterator[Help]:
    own = found.setting
    more = replace(own, instances=own.instances + 1)
    yield _help(f"rollout.instances={more.instances}", found.ceiling(more) / found.ceiling(own) - 1)
    yield from _split(found)


def _bound(found: Allowed, tokens_per_s: float) -> Iterator[Help]:
    """Two who wait for each other are slower than either; a further step ends that."""
    more = replace(found.setting, staleness=found.setting.staleness + 1)
    gain = found.ceiling(more) / tokens_per_s - 1
    yield Help(f"staleness={more.staleness}", gain, f"With staleness={more.staleness} they need not: up to {gain:+.0%}")


def _tail(found: Allowed, _tokens_per_s: float) -> Iterator[Help]:
    own, now = found.setting, found.ceiling(found.setting)
    older, larger = replace(own, staleness=own.staleness + 1), replace(own, groups=2 * own.groups)
    yield _help(f"staleness={older.staleness}", found.ceiling(older) / now - 1)
    yield _help(f"groups={larger.groups}", found.ceiling(larger, anew=True) / now - 1)
    if own.strategies.consume == "batch":
        streamed = replace(own, strategies=replace(own.strategies, consume="stream"))
        yield _help("strategies.consume=stream", found.ceiling(streamed) / now - 1)
    if own.strategies.tail == "wait":
        text = "strategies.tail=replace or truncate gives up the last responses of a step instead of waiting"
        yield Help("strategies.tail", None, text)
