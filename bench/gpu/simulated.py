"""The runs of ``system.py`` predicted by the simulator: what it says beside what was measured, with the errors.

    python bench/gpu/simulated.py --runs RUNS/skewed-qwen-0.5b-1 --tail docs/results/engine_few.json    # no GPU needed
    python bench/gpu/simulated.py --measured system.json ...       # also cells of which only the results are at hand
    python bench/gpu/simulated.py --figures figures.json --measured system.json ...   # no folder of any run is

The production control plane runs over modelled engines and a modelled trainer, with the lengths that the runs had, and
with the belief that it had there: in a real run it decides by a guess from the model's geometry, not by what steps turn
out to cost. That guess says how many sequences an instance is given at once, and so how old they are when they are
trained.

Costs are those of a process that has the card to itself: of decoding and prefill, the cells of ``tail.py``, with lines
between them (``--without``: calls that measured another engine); better of decoding, a trace of the synchronous run
(``--trace``), which also has what the worker does between two steps and the numbers of sequences between the cells.
``--launches``: a step with prefill is not a CUDA graph, and costs this and a price for each token. Of training, the
synchronous run: nothing else happens meanwhile. ``--pass-s``: each pass takes so much of that, however few tokens it
has, and passes begin as the real trainer's do where it shares a GPU; ``--at-once``: they began whenever it was idle,
and *gathered* is what would be otherwise.
Kernels of different processes do not run at the same time: the card is theirs in turn (*in turn*, ``turns.py``). The
slice of time is the one number taken from the run with bound 2: how much longer a token took to train there. *As if
alone* is the prediction without that, *as in bound 2* the one with costs as they were inside that run, whoever else had
work there. Without a run of bound 2, streamed, that with the largest bound takes its place.

Where only results are left, ``--figures`` is what the folders would have said; there is no *as in bound 2* then::

    {"train_us": 7.55, "share": 0.61, "prefill_us": 2.56, "settings": ["cluster.push_s=0.02"], "decoding": []}

microseconds of training and of prefill for a token, alone; the trainer's share of the card beside the instance at
bound 2, streamed; settings of the runs beyond those of ``system.py``; and what ``--trace`` says of decoding, as
``[sequences, context, seconds]``. ``--keep-figures FILE`` writes them.
"""

import argparse
import json
import re
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import amounts, kept
from bench.gpu import system, tail
from bench.gpu.skewed import length
from bench.gpu.turns import CardCluster, Passes, slice_for
from bench.simulator_error import METRICS, compared, left_out, observed
from staleflow.config import Config, load
from staleflow.config.gpus import COMMON
from staleflow.config.sizes import read_sizes
from staleflow.coordinator.cost import CostModel
from staleflow.observe.metrics import read_metrics
from staleflow.rollout.fit import Point, fit
from staleflow.rollout.shapes import SHAPES, write
from staleflow.runtime.local.run import CYCLE_S
from staleflow.simulate.setting import Setting, setting_of
from staleflow.simulate.trace import Trace
from staleflow.study.measured import read_run

SYNCHRONOUS, CONTENDED = "0-batch", "2-stream"
RUN = re.compile(r"\d+-(batch|stream)")
MOST = 0.9
"""The trainer's largest share of the card, whatever a noisy run measured: instances are left something."""
MOST_BETWEEN_S = 0.001
"""Between two steps of an instance that has work; if there is more, it had none."""
RECOVERED = ("push_s", "cycle_s", "weight_bytes", "reward_s")
"""Times of a run that its folder says, and its results do not."""
Rows = dict[str, dict[str, Any]]
Line = tuple[tuple[float, float], ...]
"""Sizes in order, and the seconds of each."""


def between(line: Line, size: float) -> float:
    """The seconds of a size; below the first those of the first, beyond the last as between the last two."""
    if size <= line[0][0] or len(line) == 1:
        return line[0][1]
    at = min(bisect_left(line, (size, 0.0)), len(line) - 1)
    (low, low_s), (high, high_s) = line[at - 1], line[at]
    return low_s + (high_s - low_s) * (size - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Priced(CostModel):
    """An engine that takes what was measured, with lines between: a kernel for few sequences bends them more than
    ``CostModel`` does."""

    decoding: Line = ()
    """By sequences that run, without what their context adds."""
    prefilling: Line = ()
    """By tokens prefilled: what a step takes longer."""

    def step(self, running: int, context: int, prefill: int = 0) -> float:
        return self.steps(1, running, context, prefill)

    def steps(self, count: int, running: int, context: int, prefill: int = 0) -> float:
        one = between(self.prefilling, prefill) if prefill else 0.0
        if not running:
            return count * one
        one += between(self.decoding, running)
        return count * one + self.per_context_token * (count * context + running * (count * (count - 1) // 2))


def named(cells: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The cells of ``tail.py`` by name, also where a file holds those of several calls."""
    for name, cell in cells.items():
        if not isinstance(cell, dict):
            continue
        if "ms" in cell or "with_ms" in cell:
            yield name, cell
        else:
            yield from named(cell)


def priced(
    cells: Mapping[str, Any],
    shape: str,
    per_prefill_token: float,
    launches: float | None = None,
    inside: Sequence[Point] = (),
) -> Priced:
    """An engine that has the card to itself, by the cells of ``tail.py``, of which the last of a kind counts;
    ``inside``: decoding as it was in a run instead. A prefill's cell says also what decoding takes beside it."""
    found, prefill, beside = dict[tuple[int, int], Point](), dict[float, float](), dict[str, Point]()
    others, their_context = tail.Sizes.beside, tail.Sizes.contexts[0]
    for name, cell in named(cells):
        if name.startswith(f"{shape} prefill "):
            prefill[int(name.split()[-1])] = (cell["with_ms"] - cell["without_ms"]) / 1e3
            beside[name] = Point(others, others * their_context, cell["without_ms"] / 1e3)
        elif name.startswith(shape) and name.endswith("few"):
            running, context = (int(each) for each in name.removeprefix(shape).removesuffix("few").split(" x "))
            found[running, context] = Point(running, running * context, cell["ms"] / 1e3)
    points = list(found.values())
    model, _ = fit(points, per_prefill_token)
    if launches is not None or not prefill:
        prefill = {tokens: (launches or 0.0) + per_prefill_token * tokens for tokens in (1, 2)}
    line = bare(inside or [*points, *beside.values()], model.per_context_token)
    return Priced(**asdict(model), decoding=line, prefilling=tuple(sorted(prefill.items())))


def bare(points: Sequence[Point], per_context_token: float) -> Line:
    """Seconds by sequences, less what their context adds; more sequences never take less."""
    line: list[tuple[float, float]] = []
    for running in sorted({point.running for point in points}):
        seconds = [each.seconds - per_context_token * each.context for each in points if each.running == running]
        line.append((running, max([sum(seconds) / len(seconds), *(before for _, before in line[-1:])])))
    return tuple(line)


def decoding_in(steps: Sequence[Sequence[Any]]) -> list[Point]:
    """What decoding took inside a run, by a trace of ``traced.py``: from one step to the next, since the worker has
    something to do between them. Steps of about as many sequences are one point; those before the second pull, in
    which everything is new, are left out."""
    pulls = [at for at, (_, _, kind, *_) in enumerate(steps) if kind == "pull"]
    sums: dict[int, list[float]] = {}
    for at in range(pulls[1] if len(pulls) > 1 else 0, len(steps) - 1):
        began, took, kind, running, _, context = steps[at]
        if kind in ("pull", "prefill"):
            continue
        seconds = min(steps[at + 1][0] - began, took / 1e3 + MOST_BETWEEN_S)
        about = sums.setdefault(round(4 * log2(running)), [0.0] * 4)
        for where, value in enumerate((1.0, running, context, seconds)):
            about[where] += value
    return [
        Point(round(running / count), round(context / count), seconds / count)
        for count, running, context, seconds in sums.values()
    ]


def guessed(shape: str) -> CostModel:
    """What the coordinator of a real run believes, where the run itself does not say it."""
    sizes = read_sizes(shape, SHAPES[shape])
    return CostModel.from_geometry(
        parameters=sizes.parameters,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_dim,
        bandwidth=COMMON.bandwidth,
        flops=COMMON.flops,
    )


def training(folder: Path) -> float:
    """Seconds of training for each token; the first step, which compiles, is left out."""
    rows = read_metrics(folder / "metrics.jsonl")[1:]
    return sum(row["train_s"] for row in rows) / sum(row["tokens"] + row["prompt_tokens"] for row in rows)


def predicted(setting: Setting, slice_s: float | None, passes: Passes | None = None) -> dict[str, float]:
    cluster = CardCluster(setting, 0, slice_s, passes)
    cluster.run()
    marks, first = cluster.marks, left_out(setting.staleness, setting.steps)
    begin, end = marks[first - 1], marks[-1]
    seconds, tokens = end.time - begin.time, end.tokens - begin.tokens
    running = (end.instances_running_s - begin.instances_running_s) / setting.instances
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / (len(marks) - first),
        "mean_staleness": (end.ages - begin.ages) / tokens,
        "trainer_idle": (end.trainer_idle_s - begin.trainer_idle_s) / seconds,
        "instances_idle": 1 - running / seconds,
    }


def seen_in(runs: Path, instances: int) -> dict[str, dict[str, Any]]:
    """What was measured, by the folders of the runs."""
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(each for each in runs.iterdir() if RUN.fullmatch(each.name)):
        seen = observed(folder, int(folder.name.split("-")[0]), instances)
        found[folder.name] = {"steps": read_run(str(folder)).summary["steps"], **seen}
    return found


def written(results: Mapping[str, Any], shape: str, instances: int) -> dict[str, dict[str, Any]]:
    """What was measured, by a file of results of ``system.py``, or one that holds several."""
    head, found = f"skewed {shape}, {instances} x rollout, bound ", dict[str, dict[str, Any]]()
    for name, row in results.items():
        if not isinstance(row, dict):
            continue
        if RUN.fullmatch(cell := name.removeprefix(head).replace(", ", "-")):
            found[cell] = row
        elif "steps" not in row:
            found |= written(row, shape, instances)
    return found


def contended(runs: Path) -> Path:
    """The run that says how the card is shared."""
    if (wanted := runs / CONTENDED).is_dir():
        return wanted
    others = [each for each in runs.iterdir() if RUN.fullmatch(each.name) and each.name != SYNCHRONOUS]
    if not others:
        raise SystemExit(f"{runs} has no run but {SYNCHRONOUS}: make {CONTENDED} with system.py")
    return max(others, key=lambda each: (int(each.name.split("-")[0]), each.name))


class Known(NamedTuple):
    """What is known of runs before any is predicted."""

    config: Callable[[Sequence[str]], Config]
    """As they were configured, with changes."""
    per_token_s: float
    """Of training, for a process that has the card to itself."""
    per_prefill_token: float
    share: float
    """The trainer's, of the card, beside instances, in the run ``beside``."""
    beside: str = CONTENDED
    believed: CostModel | None = None
    """By the coordinator; None: the guess from the model's geometry."""
    shared: Callable[[Sequence[str]], Config] | None = None
    """As ``config``, with costs as they were in that run."""

    @classmethod
    def of(cls, runs: Path) -> "Known":
        alone, shared = read_run(str(runs / SYNCHRONOUS)), read_run(str(contended(runs)))
        assert alone.cost is not None
        per_token_s, prefill = training(alone.folder), alone.cost.per_prefill_token / alone.summary["instances"]
        share, beside = per_token_s / training(shared.folder), shared.folder.name
        return cls(alone.config, per_token_s, prefill, share, beside, alone.believed, shared.config)

    @classmethod
    def given(cls, figures: Mapping[str, Any], shape: str, folder: Path) -> "Known":
        """``folder``: for the model, of which only the shape is needed."""
        (folder / shape).mkdir()
        write(shape, folder / shape)
        (folder / shape / "tokenizer.json").touch()
        made = [*system.settings("skewed", shape, folder, "builtin"), "rollout.instances=1"]
        made += [f"cluster.cycle_s={CYCLE_S}", *figures.get("settings", ())]
        train_s, prefill_s = figures["train_us"] / 1e6, figures["prefill_us"] / 1e6
        return cls(lambda words: load("one-gpu", [*made, *words]), train_s, prefill_s, figures["share"])

    def figures(self, inside: Sequence[Point]) -> dict[str, Any]:
        """What ``given`` takes."""
        times = {name: getattr(self.config([]).cluster, name) for name in RECOVERED}
        found = {"train_us": 1e6 * self.per_token_s, "share": self.share, "prefill_us": 1e6 * self.per_prefill_token}
        settings = [f"cluster.{name}={value}" for name, value in times.items() if value is not None]
        return {**found, "settings": settings, "decoding": [[*point] for point in sorted(inside)]}


def compare(
    known: Known,
    rows: Mapping[str, Mapping[str, Any]],
    cells: Mapping[str, Any],
    shape: str,
    mean: int,
    longest: int,
    prompt: int,
    launches: float | None = None,
    inside: Sequence[Point] = (),
    pass_s: float | None = None,
    at_once: bool = False,
) -> Rows:
    """By run: each figure measured and predicted, in two or three ways."""
    costs = priced(cells, shape, known.per_prefill_token, launches, inside)
    passes = None if pass_s is None else Passes(pass_s, known.config([]).training.micro_tokens, at_once)
    per_token_s = known.per_token_s - (passes.least_s(1) if passes is not None else 0.0)
    believed, share = known.believed or guessed(shape), min(MOST, known.share)

    def configured(name: str, config: Callable[[Sequence[str]], Config]) -> Setting:
        bound, consume = name.split("-")
        steps = rows[name]["steps"]
        made = config([f"steps={steps}", f"staleness={bound}", f"strategies.consume={consume}"])
        count, size = made.groups * (steps + int(bound) + 2), made.group_size
        lengths = Trace(
            (prompt,) * count,
            tuple(tuple(length(f"p{at}/{member}", mean, longest) for member in range(size)) for at in range(count)),
        )
        return replace(setting_of(made, name, lengths), believed=believed)

    def alone(name: str) -> Setting:
        own = configured(name, known.config)
        return replace(own, rollout=costs, trainer_per_token_gpu_s=per_token_s, trainer_fixed_s=0.0)

    if known.beside not in rows:
        raise SystemExit(f"there are no results of {known.beside} with {shape}, which says how the card is shared")
    slice_s = slice_for(alone(known.beside), share, passes)
    print(f"decoding alone: {costs}; training alone: {1e6 * per_token_s:.2f} us a token", file=sys.stderr)
    said = f"the trainer's share beside instances in {known.beside}: {share:.2f}"
    print(f"{said}, as with slices of {1e3 * slice_s:.2f} ms", file=sys.stderr)
    found: Rows = {}
    for name, seen in rows.items():
        own = alone(name)
        ways = {"in turn": (own, slice_s, passes), "as if alone": (own, None, passes)}
        if passes is not None and at_once:
            ways["gathered"] = (own, slice_s, passes._replace(at_once=False))
        if known.shared is not None:
            ways["as in bound 2"] = (configured(name, known.shared), None, None)
        found[name] = {
            way: {key: compared(key, seen[key], values[key]) for key in METRICS}
            for way, values in ((way, predicted(*given)) for way, given in ways.items())
        }
    return found


def table(rows: Rows) -> str:
    lines = ["| run | way | " + " | ".join(METRICS.values()) + " |", "|---|---|" + "---|" * len(METRICS)]
    for run, ways in rows.items():
        for way, figures in ways.items():
            cells = (
                f"{each['measured']:,.2f} -> {each['predicted']:,.2f} ({each['error']:+.0f})"
                for each in figures.values()
            )
            lines.append(f"| {run} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Rows:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--runs", type=Path, help="folder of runs named BOUND-CONSUME")
    source.add_argument("--figures", type=kept.to_read, help="what is known of runs that are not at hand (see above)")
    parser.add_argument("--tail", type=kept.to_read, required=True, help="what tail.py wrote")
    parser.add_argument("--without", nargs="*", default=(), help="calls in it to leave out, by how they begin")
    parser.add_argument("--shape", default="qwen-0.5b")
    parser.add_argument(
        "--lengths", type=amounts.count, nargs=3, default=(256, 4096, 128), help="mean, longest, prompt"
    )
    parser.add_argument(
        "--launches", type=amounts.amount, help="seconds of a step with prefill that is not a CUDA graph"
    )
    parser.add_argument("--pass-s", type=amounts.amount, help="seconds of a pass beyond those of its tokens")
    parser.add_argument("--at-once", action="store_true", help="passes begin as soon as the trainer is idle")
    parser.add_argument(
        "--measured", type=kept.to_read, help="what system.py wrote: cells without a folder of their own"
    )
    parser.add_argument("--section", help="of that file, if it holds the results of several days")
    parser.add_argument("--trace", type=Path, help=f"of {SYNCHRONOUS} by traced.py: what decoding takes inside a run")
    parser.add_argument("--keep-figures", type=kept.to_write, help="what --figures reads")
    parser.add_argument("--json", type=kept.to_write)
    given = parser.parse_args(arguments)
    results, cells = (json.loads(each.read_text()) if each else {} for each in (given.measured, given.tail))
    results = results[given.section] if given.section is not None else results
    cells = {name: cell for name, cell in cells.items() if not name.startswith(tuple(given.without))}
    figures = json.loads(given.figures.read_text()) if given.figures is not None else {}
    points = [Point(*each) for each in figures.get("decoding", ())]
    if given.trace is not None:
        points = decoding_in([json.loads(line) for line in given.trace.read_text().splitlines()])
    with tempfile.TemporaryDirectory() as folder:
        known = Known.of(given.runs) if given.runs is not None else Known.given(figures, given.shape, Path(folder))
        instances = known.config([]).rollout.instances
        seen = written(results, given.shape, instances) | (seen_in(given.runs, instances) if given.runs else {})
        trainer = {"pass_s": given.pass_s, "at_once": given.at_once}
        more = {"launches": given.launches, "inside": points, **trainer}
        rows = compare(known, seen, cells, given.shape, *given.lengths, **more)
    print(table(rows))
    kept.write(given.json, rows)
    kept.write(given.keep_figures, known.figures(points))
    return rows


if __name__ == "__main__":
    main()
