"""Episodes of several turns under other rules, with real processes: all turns in step, one batch at a time, old ones
thrown away, and the bound.

    python bench/agents_turns.py                      # two cores: about six minutes for each seed
    python bench/agents_turns.py --seeds 2 --json docs/results/agents_turns.json        # run again to resume

Every run is ``staleflow train agent`` with a tool that takes its time: lognormal, 0.2 s on average, at most 2 s, the
same for the same call in every run. *turns in step*: bound 0, and nobody begins a turn before all have ended the one
before, with its tool. *synchronous*: bound 0, whole batches; every episode continues by itself. *discard*: two steps
more are begun than may be trained on (bound 4), and a complete group with a token older than two versions is thrown
away and its prompt drawn again. *bound 2*: as it ships. What is simulated on a larger scale: ``agents_policies.py``.

*tokens/s*: trained, from the third step on. *wasted*: tokens that were made and not trained, of all. *lengths*: mean
tokens of what was trained in the first three steps, when all models are alike: a rule that throws long ones away trains
on shorter ones. *accuracy*: held-out, after the last step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402
from staleflow.agents.calculator import TOOLS, result  # noqa: E402
from staleflow.agents.client import LimitError, Model  # noqa: E402
from staleflow.agents.outcome import Outcome, scored, truncated  # noqa: E402
from staleflow.agents.play import Limits  # noqa: E402
from staleflow.observe.metrics import read_metrics  # noqa: E402
from staleflow.tasks.task import Problem, digest  # noqa: E402
from staleflow.types import GIVEN  # noqa: E402

if TYPE_CHECKING:
    from staleflow.servers.lifecycle import Group

MEAN_S, VARIATION, LONGEST_S = 0.2, 1.5, 2.0
MOST_S = 900
STEPS, WARM = 15, 2
SETTINGS = (f"steps={STEPS}", "evaluation.every=0", "evaluation.when=after", "samples=0", "checkpoints.best=false")
PLAY = "environment.play=bench.agents_turns"
ARMS: dict[str, tuple[str, ...]] = {
    "turns in step": (f"{PLAY}:in_step", "staleness=0", "strategies.consume=batch"),
    "synchronous": (f"{PLAY}:play", "staleness=0", "strategies.consume=batch"),
    "discard, older than 2": (f"{PLAY}:play", "staleness=4", "filter=bench.agents_turns:young"),
    "bound 2": (f"{PLAY}:play", "staleness=2"),
}


def seconds(*call: object) -> float:
    """What the tool takes for a call."""
    sigma = math.sqrt(math.log(1 + VARIATION**2))
    drawn = NormalDist(math.log(MEAN_S) - sigma**2 / 2, sigma).inv_cdf((digest("tool", *call) + 0.5) / 2**64)
    return min(LONGEST_S, math.exp(drawn))


class Together:
    """Those that are played, and the turn that each is in or wants to begin."""

    def __init__(self) -> None:
        self._turns: dict[object, int] = {}
        self._moved = asyncio.Event()

    async def begins(self, who: object, turn: int) -> None:
        self._move(who, turn)
        while min(self._turns.values()) < turn:
            await self._moved.wait()

    def leaves(self, who: object) -> None:
        del self._turns[who]
        self._wake()

    def _move(self, who: object, turn: int) -> None:
        self._turns[who] = turn
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


together = Together()
"""Of this process, which plays all episodes."""


async def play(task: Problem, model: Model, limits: Limits, waits: Together | None = None) -> Outcome:
    """As ``agents/calculator.py``, with a slow tool."""
    messages: list[Mapping[str, Any]] = list(task.prompt)  # type: ignore[arg-type]
    me, turn = object(), 0
    try:
        async with limits.agent():
            while True:
                turn += 1
                if waits is not None:
                    await waits.begins(me, turn)
                message = await model.chat(messages, TOOLS)
                if not (calls := message.get("tool_calls")):
                    break
                await asyncio.sleep(seconds(task.facts["numbers"], turn))
                messages += [message, *(result(call) for call in calls)]
    except LimitError as error:
        return truncated(0.0, str(error))
    finally:
        if waits is not None:
            waits.leaves(me)
    return scored(float(message["content"] == str(task.facts["answer"])))


async def in_step(task: Problem, model: Model, limits: Limits) -> Outcome:
    return await play(task, model, limits, together)


newest = 0


def young(group: Group, *, most: int = 2) -> str | None:
    """Keep groups whose oldest token was made at most so many versions before the newest token of any group."""
    global newest
    versions = [version for member in group.members for version, _ in member.spans if version != GIVEN]
    newest = max(newest, *versions)
    return "too old" if newest - min(versions) > most else None


def run(arm: str, seed: int, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        words = ["agent", *SETTINGS, *ARMS[arm], f"seed={seed}", f"runs={runs}", *settings]
        command = [sys.executable, "-m", "staleflow", "train", *words, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S, check=False)
        if done.returncode:
            raise SystemExit(f"staleflow train {' '.join(words)} failed: {done.stderr[-500:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        rows = read_metrics(Path(runs) / "latest" / "metrics.jsonl")
    trained = sum(row["tokens"] for row in rows)
    return {
        "tokens_per_s": sum(row["tokens"] for row in rows[WARM:]) / (rows[-1]["time"] - rows[WARM - 1]["time"]),
        "wasted": summary["tokens_wasted"] / (trained + summary["tokens_wasted"]),
        "length": fmean(length for row in rows[:3] for length in row["lengths"]),
        "accuracy": summary["accuracy_final"],
        "staleness": summary["max_staleness"],
        "wall_s": summary["wall_s"],
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| rule | trained tokens/s | wasted | lengths | accuracy | oldest |", "|---" * 6 + "|"]
    for arm in ARMS:
        rows = [row for name, row in found.items() if name.startswith(f"{arm}, seed")]
        if rows:
            speed, wasted, length = (median(row[key] for row in rows) for key in ("tokens_per_s", "wasted", "length"))
            accuracy = ", ".join(f"{row['accuracy']:.0%}" for row in rows)
            oldest = max(row["staleness"] for row in rows)
            lines.append(f"| {arm} | {speed:,.0f} | {wasted:.1%} | {length:.1f} | {accuracy} | {oldest} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Rules for episodes, with real processes.")
    parser.add_argument("--seeds", type=amounts.count, default=1)
    parser.add_argument("--json", type=kept.to_continue, help="where results are kept, and continued from")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = kept.read(given.json)
    for seed in range(given.seeds):
        for arm in ARMS:
            if (name := f"{arm}, seed {seed}") not in found:
                found[name] = run(arm, seed, given.settings)
                print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
                kept.write(given.json, found)
    print(table(found))
    return found


if __name__ == "__main__":
    main()
