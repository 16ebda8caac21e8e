"""What faster decoding of few sequences is worth on whole clusters: simulated presets with and without it, and the law.

    python bench/gpu/presets.py --json presets.json         # no GPU needed; a minute or more on one core
    python bench/gpu/presets.py --smoke                     # one small run of each, seconds

A step of decoding is divided by what the cells of ``tail.py`` gained over the plain step, with lines between them and
nothing from ``NOTHING_FROM`` sequences on. The gains are those of a model on one GPU (``--shape``), carried over to
larger models on several, whose steps are bound by memory to a larger part: an upper estimate.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import kept
from bench.gpu.simulated import Line, between, named
from staleflow.coordinator.cost import CostModel
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.setting import Setting, preset
from staleflow.study.compare import first_counted
from staleflow.study.law import law
from staleflow.study.result import speed

ROOT = Path(__file__).resolve().parents[2]
CELLS = ROOT / "docs" / "results" / "engine_few.json"
PRESETS, BOUNDS, SEEDS, STEPS = ("paper-14b-128", "paper-30b-a3b"), (1, 2, 3), (0, 1), 13
SMOKE = ("steps=4", "groups=16")
CONTEXT, NOTHING_FROM = 512, 128


@dataclass(frozen=True, slots=True)
class Faster(CostModel):
    """An engine whose steps of decoding are shorter by what few sequences gain."""

    gains: Line = ()

    def _gain(self, running: int) -> float:
        return between(self.gains, running) if running < NOTHING_FROM else 1.0

    def step(self, running: int, context: int, prefill: int = 0) -> float:
        return self.steps(1, running, context, prefill)

    def steps(self, count: int, running: int, context: int, prefill: int = 0) -> float:
        whole = CostModel.steps(self, count, running, context, prefill)
        other = count * self.per_prefill_token * prefill
        return other + (whole - other) / self._gain(running) if running else whole

    def step_times(self, running: NDArray[Any], context: NDArray[Any]) -> NDArray[np.float64]:
        sizes, gains = zip(*self.gains, strict=True)
        return CostModel.step_times(self, running, context) / np.interp(running, sizes, gains)

    def throughputs(self, running: NDArray[Any], context: NDArray[Any]) -> NDArray[np.float64]:
        return running / self.step_times(running, context)


def gains(cells: Mapping[str, Any], shape: str) -> Line:
    """By sequences: how many times as long the plain step takes. Of several calls the last one counts."""
    took: dict[str, dict[int, float]] = {"plain": {}, "few": {}}
    for name, cell in named(cells):
        words = name.split()
        if words[0] == shape and len(words) == 5 and words[3] == str(CONTEXT) and int(words[1]) < NOTHING_FROM:
            took[words[4]][int(words[1])] = cell["ms"]
    both = sorted(took["plain"].keys() & took["few"].keys())
    return (*((n, max(1.0, took["plain"][n] / took["few"][n])) for n in both), (NOTHING_FROM, 1.0))


def simulated(setting: Setting, seed: int) -> float:
    """Trained tokens a second, without the first steps."""
    cluster = Cluster(setting, seed)
    cluster.run()
    commits = [(step.time, step.tokens) for step in cluster.recorder.steps]
    return speed(commits, first_counted(setting.steps, setting.staleness))


def rows(line: Line, presets: tuple[str, ...], bounds: tuple[int, ...], seeds: tuple[int, ...], *words: str) -> Any:
    found: list[dict[str, Any]] = []
    for name in presets:
        for bound in bounds:
            plain = preset(name, "lengths=correlated", f"staleness={bound}", *words)
            faster = replace(plain, rollout=Faster(**asdict(plain.rollout), gains=line))
            row: dict[str, Any] = {"preset": name, "bound": bound}
            for kind, setting in (("plain", plain), ("faster", faster)):
                terms = law(setting, streamed=True)
                row[kind] = [simulated(setting, seed) for seed in seeds]
                row[f"{kind} law"] = {"tokens_per_s": terms.tokens_per_s, "binds": terms.binds, "tail_s": terms.tail_s}
            row["gain"] = sum(row["faster"]) / sum(row["plain"]) - 1
            found.append(row)
            print(table(found[-1:]), flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"| {row['preset']} | {row['bound']} | {', '.join(f'{each:,.0f}' for each in row['plain'])} "
        f"| {', '.join(f'{each:,.0f}' for each in row['faster'])} | {100 * row['gain']:+.0f} % "
        f"| {row['plain law']['tokens_per_s']:,.0f} ({row['plain law']['binds']}) "
        f"-> {row['faster law']['tokens_per_s']:,.0f} ({row['faster law']['binds']}) |"
        for row in found
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=kept.to_read, default=str(CELLS), help="what tail.py wrote")
    parser.add_argument("--shape", default="qwen-1.5b")
    parser.add_argument("--json", type=kept.to_write)
    parser.add_argument("--smoke", action="store_true", help="a single small run of each kind")
    given = parser.parse_args(arguments)
    line = gains(json.loads(given.cells.read_text()), given.shape)
    print("| preset | bound | plain, tokens/s | faster | gain | the law |\n|---|---|---|---|---|---|")
    if given.smoke:
        made = rows(line, ("paper-14b",), (1,), (0,), *SMOKE)
    else:
        made = rows(line, PRESETS, BOUNDS, SEEDS, f"steps={STEPS}")
    found = {"gains": line, "rows": made}
    kept.write(given.json, found)
    return found


if __name__ == "__main__":
    main()
