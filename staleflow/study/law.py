"""What no scheduler can beat, computed from the setting instead of simulated.

*The no-bubble limit*: fleet and trainer are always busy, the split is the best one, and nothing waits for anything.

*The law*: with ``T`` the time to train a batch, ``R`` the time in which the fleet generates one at its best, and ``L``
the time from publishing a version to the end of the longest trajectory started under it, a step lasts at least ::

    max(T, R, (T + L) / (bound + 1))      whole batches
    max(T, R, L' / (bound + 1))           streamed: L' is L, the training of that trajectory, update and push
    T + max(R, L)                         all GPUs do both in turn

``L`` is what it takes on an instance that does nothing else: pull, prefill, one token after the other, half the time of
tools between turns, half the reward latency. ``R`` is for instances that are always as full as memory allows, which
makes every trajectory slow. No fleet does both, so the ceiling is not a target that can be met: it says what is
impossible.

*The even ceiling* is nearer to what can: every instance always runs the same number of sequences, the best one, and
both ``R`` and ``L`` are for that number; and every instance pulls every version and prefills again what it holds then,
which adds to both. It is not a law: a scheduler could leave some instances emptier, or some versions out. Use::

    limit(setting)                        # tokens per second
    ceiling(setting, streamed=True)       # the best split's; law(...) is that of the setting's own split
    even_ceiling(setting, streamed=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from staleflow.simulate.setting import Setting, with_split

Term = Literal["training", "rollout", "tail"]

BATCHES = 16
"""Batches whose longest trajectories are averaged."""


@dataclass(frozen=True, slots=True)
class BatchWork:
    """A batch of the workload, on average."""

    tokens: float
    prompt_tokens: float
    """Prompt tokens as the trainer counts them: once for each trajectory."""
    mean: float
    """Output tokens of a trajectory, on average."""
    grown: float
    """Output tokens that a running trajectory has, on average over time: long ones run for longer."""
    prompt: float
    longest_s: float
    """Seconds from publishing a version to the reward of a batch's longest trajectory, alone on an instance."""
    longest_tokens: float
    waits_s: float
    """The part of ``longest_s`` in which nothing is decoded."""


@dataclass(frozen=True, slots=True)
class Law:
    """The three terms for one split, in seconds of a step."""

    train_s: float
    rollout_s: float
    tail_s: float
    tokens: float
    training_gpus: int

    @property
    def step_s(self) -> float:
        return max(self.train_s, self.rollout_s, self.tail_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def binds(self) -> Term:
        terms: dict[Term, float] = {"training": self.train_s, "rollout": self.rollout_s, "tail": self.tail_s}
        return max(terms, key=lambda term: terms[term])


def work_of(setting: Setting) -> BatchWork:
    """The work in a batch. Draws tens of thousands of lengths: call it once for a workload."""
    workload, cost = setting.workload, setting.rollout
    shares = list(workload.spread())
    mean = sum(share * tokens for share, tokens in shares)
    square = sum(share * tokens * tokens for share, tokens in shares)
    prompt = workload.mean_prompt_tokens() + setting.given_tokens
    longest, seconds = 0.0, 0.0
    for batch in range(BATCHES):
        tokens, before = _longest(setting, batch)
        alone = cost.steps(tokens, 1, before) + cost.fixed + cost.per_prefill_token * before
        longest += tokens / BATCHES
        seconds += alone / BATCHES
    waits = pull_s(setting) + setting.reward_s / 2 + (setting.turns - 1) * setting.tool_s / 2
    size = setting.groups * setting.group_size
    return BatchWork(
        tokens=mean * size,
        prompt_tokens=prompt * size,
        mean=mean,
        grown=square / (2 * mean),
        prompt=prompt,
        longest_s=seconds + waits,
        longest_tokens=longest,
        waits_s=waits,
    )


def _longest(setting: Setting, batch: int) -> tuple[int, int]:
    """The longest response of a batch, and its prompt."""
    prompts = range(batch * setting.groups, (batch + 1) * setting.groups)
    members = range(setting.group_size)
    length = setting.workload.length
    tokens, prompt = max((length(prompt, member), prompt) for prompt in prompts for member in members)
    return tokens, setting.workload.prompt_tokens(prompt)


def most_running(setting: Setting, work: BatchWork) -> int:
    """Sequences that memory and the engine allow on one instance. A prompt is held once for its group."""
    held = work.grown + work.prompt / setting.group_size
    return max(1, min(setting.max_running, int(setting.kv_tokens / held)))


def rate(setting: Setting, work: BatchWork, running: int) -> float:
    """Tokens per second of an instance that always runs this many. A prompt is prefilled once for its group."""
    cost = setting.rollout
    prefill = cost.per_prefill_token * work.prompt / setting.group_size / work.mean
    return running / (cost.step(running, int(running * (work.grown + work.prompt))) + running * prefill)


def law(setting: Setting, streamed: bool, work: BatchWork | None = None) -> Law:
    """The terms for the setting's own split."""
    work = work_of(setting) if work is None else work
    cost = setting.trainer
    after = cost.fixed_s + cost.push_s
    train = cost.train_s(work.tokens + work.prompt_tokens) + after
    rest = cost.train_s(work.longest_tokens) + after if streamed else train
    return Law(
        train_s=train,
        rollout_s=work.tokens / (setting.instances * rate(setting, work, most_running(setting, work))),
        tail_s=(work.longest_s + rest) / (setting.staleness + 1),
        tokens=work.tokens,
        training_gpus=setting.training_gpus,
    )


def in_turn(setting: Setting, work: BatchWork | None = None) -> Law:
    """The terms for a setting whose GPUs all do both: generation and training add up."""
    alone = law(setting, streamed=False, work=work)
    return Law(alone.train_s, alone.train_s + alone.rollout_s, alone.tail_s, alone.tokens, alone.training_gpus)


def splits(setting: Setting) -> Iterator[Setting]:
    """Every way to divide the GPUs that leaves none unused and enough for the trainer's state."""
    most = (setting.gpus - setting.least_training_gpus) // setting.gpus_per_instance
    for instances in range(1, most + 1):
        yield with_split(setting, setting.gpus - instances * setting.gpus_per_instance)


def ceiling(setting: Setting, streamed: bool, work: BatchWork | None = None) -> Law:
    """The law for the split that it allows the most."""
    work = work_of(setting) if work is None else work
    laws = [law(split, streamed, work) for split in splits(setting)]
    return max(laws, key=lambda each: (each.tokens_per_s, -max(each.train_s, each.rollout_s)))


def balance(setting: Setting, work: BatchWork | None = None) -> Setting:
    """The split for which fleet and trainer are equally fast, as far as whole instances allow."""
    work = work_of(setting) if work is None else work

    def busiest(split: Setting) -> float:
        each = law(split, streamed=True, work=work)
        return max(each.train_s, each.rollout_s)

    return min(splits(setting), key=busiest)


def limit(setting: Setting, work: BatchWork | None = None) -> float:
    """Tokens per second with fleet and trainer always busy, for the best split."""
    work = work_of(setting) if work is None else work
    best = law(balance(setting, work), streamed=True, work=work)
    return best.tokens / max(best.train_s, best.rollout_s)


def even_ceiling(setting: Setting, streamed: bool, work: BatchWork | None = None) -> float:
    """Tokens per second at most, if all instances always run the same number and pull everything; the best split's."""
    return max(even_ceilings(setting, streamed, work).values())


def even_ceilings(setting: Setting, streamed: bool, work: BatchWork | None = None) -> dict[int, float]:
    """The same of every split, by its instances."""
    work = work_of(setting) if work is None else work
    cost, bound = setting.rollout, setting.staleness
    paces: list[tuple[float, float, float]] = []
    for running in range(1, most_running(setting, work) + 1):
        context = running * (work.grown + work.prompt)
        again = pull_s(setting) + cost.per_prefill_token * context
        paces.append((rate(setting, work, running), cost.step(running, int(context)), again))
    found: dict[int, float] = {}
    for split in splits(setting):
        terms = law(split, streamed, work)
        after = terms.tail_s * (bound + 1) - work.longest_s
        least = float("inf")
        for tokens_per_s, step_s, again in paces:
            rollout = work.tokens / (split.instances * tokens_per_s) + again
            tail = (work.waits_s + work.longest_tokens * step_s + bound * again + after) / (bound + 1)
            least = min(least, max(terms.train_s, rollout, tail))
        found[split.instances] = work.tokens / least
    return found


def pull_s(setting: Setting) -> float:
    return setting.weight_bytes / min(setting.link_bandwidth, setting.total_bandwidth)
