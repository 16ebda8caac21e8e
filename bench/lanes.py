"""Would it help to keep long trajectories apart? Computed for a fleet in balance, with no randomness and free pulls.

If all instances are alike they are one lane. With two lanes, a trajectory starts in the first and moves to the second
at a threshold of tokens. By Little's law a lane holds what arrives in a second times how long it stays, which gives its
step time; the two add up to how long the longest trajectory takes, and by the law to the time of a step. The best split
of the GPUs, share of the second lane and threshold are searched for::

    lanes(setting, work_of(setting), 2)       # tokens per second
"""

from collections.abc import Sequence
from itertools import pairwise

from staleflow.simulate.setting import Setting
from staleflow.study.law import BatchWork, law, splits

THRESHOLDS = (1_000, 2_000, 4_000, 6_000, 8_000, 10_000, 13_000)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
NEVER = 10**9
ROUNDS = 40
"""Iterations to find a lane's step time, and the time of a step."""


def lanes(setting: Setting, work: BatchWork, count: int) -> float:
    """Tokens per second at most with ``count`` lanes, one or two."""
    spread = list(setting.workload.spread())
    least = float("inf")
    for split in splits(setting):
        train = law(split, streamed=True, work=work).train_s
        if train >= least:
            continue
        ways = [(split.instances,)]
        if count == 2:
            second = {round(share * split.instances) for share in SHARES}
            ways += [(split.instances - each, each) for each in second if 0 < each < split.instances]
        for way in ways:
            for threshold in (NEVER,) if len(way) == 1 else THRESHOLDS:
                edges = [0, NEVER] if len(way) == 1 else [0, threshold, NEVER]
                parts = [_part(spread, low, high) for low, high in pairwise(edges)]
                least = min(least, _step_s(split, work, way, parts, edges, train, least))
    return work.tokens / least


def _part(spread: Sequence[tuple[float, float]], low: int, high: int) -> tuple[float, float, float]:
    """Per trajectory, on average: tokens made between two lengths, context tokens times tokens, and entries."""
    tokens = context = entries = 0.0
    for share, length in spread:
        end = min(length, high)
        if end > low:
            tokens += share * (end - low)
            context += share * (end * end - low * low) / 2
            entries += share
    return tokens, context, entries * low


def _step_s(
    setting: Setting,
    work: BatchWork,
    way: tuple[int, ...],
    parts: list[tuple[float, float, float]],
    edges: list[int],
    train: float,
    least: float,
) -> float:
    """The shortest time of a step that this way allows, if it is below ``least``."""
    terms = law(setting, streamed=True, work=work)
    after = terms.tail_s * (setting.staleness + 1) - work.longest_s
    longest = work.longest_tokens

    def lasts(step_s: float) -> bool:
        tail = work.waits_s + after
        for instances, part, (low, high) in zip(way, parts, pairwise(edges), strict=True):
            pace = _pace(setting, work, instances, part, step_s)
            if pace is None:
                return False
            tail += pace * max(0.0, min(longest, high) - low)
        return tail <= step_s * (setting.staleness + 1)

    low, high = train, min(least, 1e5)
    if not lasts(high):
        return float("inf")
    if lasts(low):
        return low
    for _ in range(ROUNDS // 2):
        middle = (low + high) / 2
        low, high = (low, middle) if lasts(middle) else (middle, high)
    return high


def _pace(
    setting: Setting, work: BatchWork, instances: int, part: tuple[float, float, float], step_s: float
) -> float | None:
    """Seconds for a token in a lane; None if it cannot keep up."""
    tokens, context, entered = part
    cost, prompt = setting.rollout, work.prompt
    arrive = setting.groups * setting.group_size / step_s / instances
    pace = cost.floor + cost.fixed
    for _ in range(ROUNDS):
        running = arrive * pace * tokens
        held = arrive * pace * (context + prompt * tokens)
        prefill = arrive * pace * (entered or prompt / setting.group_size)
        if running > setting.max_running or held > setting.kv_tokens:
            return None
        pace = (
            cost.fixed
            + max(cost.floor, cost.base + cost.per_sequence * running)
            + cost.per_context_token * held
            + cost.per_prefill_token * prefill
        )
    return pace
