"""Where the time of an instance goes inside a run: every step and pull of the built-in engine, by kind.

    python bench/gpu/system.py --trace traces --cells 2-stream ...      # a file for each instance of each run
    python bench/gpu/traced.py traces/*.jsonl                           # seconds by kind, and the longest steps

A line is ``[second, milliseconds, kind, tokens made, tokens prefilled, context]``; kinds are a *pull*, a step with
*prefill*, a step launched *ahead* or *not ahead*. On a shared card a step also waits for whatever other processes do.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import amounts, kept
from bench.gpu.skewed import limited
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import LoadWeights, Request, StepOutput, WeightSource
from staleflow.rollout.options import EngineOptions

OFTEN = 64
"""Lines that are written together."""


class TracedEngine(TorchEngine):
    def __init__(
        self, folder: str | Path, options: EngineOptions, to: Path, lengths: tuple[int, int] | None = None
    ) -> None:
        """``lengths``: mean and longest, as ``skewed.py`` draws them; None: as the model ends them."""
        super().__init__(folder, options, version=-1)
        to.mkdir(parents=True, exist_ok=True)
        self._lengths, self._lines = lengths, list[str]()
        self._to = to / f"{os.getpid()}.jsonl"

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(limited(requests, *self._lengths) if self._lengths else requests)

    def step(self) -> StepOutput:
        ahead, began = self._ahead is not None, time.time()
        output = super().step()
        if output.made or output.prefilled:
            kind = "prefill" if output.prefilled else "ahead" if ahead else "not ahead"
            self._note(began, kind, output.made, output.prefilled, output.context)
        return output

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        began = time.time()
        held = super().pull(source, version)
        self._note(began, "pull", 0, 0, held)
        return held

    def _note(self, began: float, kind: str, *counts: int) -> None:
        self._lines.append(json.dumps([round(began, 4), round(1e3 * (time.time() - began), 3), kind, *counts]))
        if len(self._lines) == OFTEN:
            with self._to.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()


def engine(model_folder: str | Path, options: EngineOptions, to: str, mean: int = 0, longest: int = 0) -> TracedEngine:
    made = TracedEngine(model_folder, options, Path(to), (mean, longest) if mean else None)
    made.prepare()
    return made


def summary(lines: Sequence[Sequence[Any]]) -> dict[str, dict[str, float]]:
    """By kind: how many, seconds, milliseconds of one, tokens made and prefilled."""
    found: dict[str, dict[str, float]] = {}
    for _, took, kind, made, prefilled, _ in lines:
        row = found.setdefault(kind, {"steps": 0, "seconds": 0.0, "made": 0, "prefilled": 0})
        row["steps"] += 1
        row["seconds"] += took / 1e3
        row["made"] += made
        row["prefilled"] += prefilled
    for row in found.values():
        row["ms"] = 1e3 * row["seconds"] / row["steps"]
    begun = min(line[0] for line in lines)
    found["all"] = {"seconds": max(line[0] + line[1] / 1e3 for line in lines) - begun, "steps": len(lines)}
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--longest", type=amounts.count, default=5, help="how many of the longest steps to show")
    parser.add_argument("--json", type=kept.to_write)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for path in given.files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path)] = summary(lines)
        print(path)
        for kind, row in found[str(path)].items():
            print(f"  {kind:10}", "  ".join(f"{key} {value:,.1f}" for key, value in row.items()))
        first = min(line[0] for line in lines)
        for line in sorted(lines, key=lambda line: -line[1])[: given.longest]:
            print(f"    at {line[0] - first:.1f} s: {line[1:]}")
    kept.write(given.json, found)
    return found


if __name__ == "__main__":
    main()
