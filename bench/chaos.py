"""Real runs under random faults, and an audit of what each has left.

    python bench/chaos.py --json docs/results/chaos.json --output docs/results/reliability.md       # all of it: hours
    python bench/chaos.py --faults 30 --kinds kill,hang    # some
    python bench/chaos.py --seed 17 --cases 1              # one run again, as a failing case says
    python bench/chaos.py --plan 'kill i0 + service gone, tree'    # two volleys, chosen
    python bench/chaos.py --recovery 20                    # throughput after the death of one of four instances
    python bench/chaos.py --durability 5                   # what the journal and the standby state cost
    python bench/chaos.py --short-steps 20                 # runs of 400 steps of 2 x 2 responses, cores kept busy

A *case* is one run of ``staleflow train``: a small model, with bound, instances, reward and evaluations drawn by its
seed; in a quarter of them (``--episodes``) environments play, in three turns. *Volleys* of one to three faults hit it,
most of them once the run has made steps again after the one before; then SIGTERM ends it, and ``bench/chaos_audit.py``
reads what it left. What is drawn is the same for a seed; the moments are not.

| kind | fault |
|---|---|
| kill | SIGKILL of an instance, the trainer, the evaluator, a reward worker or an environment's |
| hang | SIGSTOP, for good |
| slow | SIGSTOP and SIGCONT, several times within a few seconds |
| memory | RLIMIT_AS of a process is set to what it has |
| disk | the file system of the run directory is full for some seconds |
| shm | the same for shared memory |
| service | the reward service hangs, fails, is busy, answers nonsense or twice, or is gone, for some seconds |
| control | SIGKILL of the control plane's process; the run is resumed if it has ended |
| tree | SIGKILL of every process of the run; it is resumed |
| stop | SIGTERM, SIGHUP or SIGINT at any moment; it is resumed |

*Noticed*: until the run says so. *Next step*: until a step is committed. Both from the moment of the fault, by when
lines arrive here. Results are added to ``--json`` after every case; a bench that is started again continues.
Disk and shared memory are file systems of a namespace of this process (Linux, no privileges needed), so nothing of the
machine is filled; where that is not allowed these kinds are left out. Clock jumps and late, repeated and reordered
messages are the simulator's part (``bench/chaos_simulated.py``).
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with threads cannot enter a namespace
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402
from bench.chaos_case import FULL, KINDS, ROLES, Case, plan_of  # noqa: E402
from bench.chaos_lab import SHARED, TRAIN, HangError, Victim, enter_namespace, mount_small, unmount  # noqa: E402

FAULTS, RECOVERIES, REPEATS, SHORT = 500, 20, 5, 20
DISK_MIB, SHM_MIB = 96, 64
CALM = 6
"""Steps between two kills of an instance."""
NO_JOURNAL = f"from staleflow.servers.durable import DurableJournal as J; J._write = lambda self, batch: None; {TRAIN}"
ARMS = {
    "all of it": (TRAIN, ()),
    "without the journal": (NO_JOURNAL, ()),
    "without journal and standby state": (NO_JOURNAL, ("processes.standby=false",)),
}
LAPTOP = ("laptop", "evaluation.every=0", "evaluation.problems=8")
BEGIN, END = "<!-- bench/chaos.py -->", "<!-- /bench/chaos.py -->"
"""Around what it writes into a page."""
SPIN = "while True: pass"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--faults", type=amounts.whole, help=f"how many in all, over as many runs as that takes ({FAULTS})"
    )
    parser.add_argument("--cases", type=amounts.whole, help="this many runs instead")
    parser.add_argument("--each", type=amounts.count, default=10, help="faults of one run at most (%(default)s)")
    parser.add_argument("--seed", type=amounts.whole, default=0, help="of the first run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, by commas (all)")
    parser.add_argument("--plan", type=plan_of, default=(), help="one run with these: 'kill i0 + service gone, tree'")
    parser.add_argument(
        "--episodes", type=amounts.amount, default=0.25, help="share of runs in which environments play (0.25)"
    )
    parser.add_argument(
        "--recovery", type=amounts.whole, help=f"deaths of one of four instances, laptop preset ({RECOVERIES})"
    )
    parser.add_argument(
        "--durability", type=amounts.whole, help=f"runs of the laptop preset with and without it ({REPEATS})"
    )
    parser.add_argument("--short-steps", type=amounts.whole, help=f"runs of 400 short steps on busy cores ({SHORT})")
    parser.add_argument("--json", type=kept.to_continue, help="where results are kept, and continued from")
    parser.add_argument("--output", type=Path, help="put the table into this file, between its marks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the run that is under way
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {unknown.pop()!r}: give some of {', '.join(KINDS)}")
    options.cases = options.cases or (1 if options.plan else None)
    if not any((options.faults, options.cases, options.recovery, options.durability, options.short_steps)):
        options.faults, options.recovery, options.durability, options.short_steps = FAULTS, RECOVERIES, REPEATS, SHORT
    results = Results(options.json)
    with tempfile.TemporaryDirectory(prefix="staleflow-chaos-") as scratch:
        folder = Path(scratch)
        if options.faults or options.cases:
            chaos(options, kinds, folder, results)
        if options.recovery:
            recovery(options.recovery, folder, results)
        if options.durability:
            durability(options.durability, folder, results)
        if options.short_steps:
            short_steps(options.short_steps, folder, results)
    text = table(results.values)
    print(text)
    if options.output:
        before, mark, rest = options.output.read_text().partition(f"{BEGIN}\n")
        options.output.write_text(f"{before}{mark}{text}{rest[rest.index(END) :]}")
    return 1 if failed(results.values) else 0


class Results:
    """What was found so far, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.values: dict[str, list[dict[str, Any]]] = kept.read(path)

    def of(self, part: str) -> list[dict[str, Any]]:
        return self.values.get(part, [])

    def add(self, part: str, value: dict[str, Any]) -> None:
        self.values.setdefault("about", [_about()])
        self.values.setdefault(part, []).append(value)
        kept.write(self._path, self.values)


def _about() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": " ".join(sys.argv),
        **machine,
    }


def chaos(options: argparse.Namespace, kinds: Sequence[str], folder: Path, results: Results) -> None:
    model, played = folder / "model", folder / "played"
    why = enter_namespace() or mount_small(SHARED, SHM_MIB)  # before PyTorch starts threads
    _save_model(model)
    _save_played(played)
    if why:
        print(f"left out: disk, shm and shared memory that is left: {why}")
        kinds = [each for each in kinds if each not in FULL]
    seed = options.seed
    while (len(results.of("cases")) < options.cases) if options.cases else _faults(results) < options.faults:
        if any(case["seed"] == seed for case in results.of("cases")):
            seed += 1
            continue
        place = folder / f"case-{seed}"
        place.mkdir()
        if not why:
            mount_small(place, DISK_MIB)
        most = options.each if options.cases else min(options.each, options.faults - _faults(results))
        episodes = random.Random(f"episodes {seed}").random() < options.episodes
        with_model = played if episodes else model
        try:
            case = Case(seed, kinds, place, with_model, not why, options.plan, episodes).execute(most)
        finally:
            if not why:
                unmount(place)
        again = f"--seed {seed} --cases 1 --each {most} --kinds {','.join(kinds)} --episodes {int(episodes)}"
        case["reproduce"] = f"python bench/chaos.py {again}"
        results.add("cases", case)
        _tell(case)
        seed += 1


def _faults(results: Results) -> int:
    return sum(len(case["faults"]) for case in results.of("cases"))


def _save_model(folder: Path) -> None:
    from staleflow.tasks.base_model import Shape, new_model, tokenizer

    new_model(Shape(hidden=32, intermediate=48, layers=2, heads=2), seed=5).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _save_played(folder: Path) -> None:
    """A model that can be asked by messages."""
    from staleflow.tasks import calculator
    from staleflow.tasks.base_model import Shape, new_model
    from staleflow.tasks.calculator_model import tokenizer

    shape = Shape(hidden=32, intermediate=48, layers=2, heads=2)
    new_model(shape, 5, len(calculator.VOCABULARY), calculator.PAD, calculator.END).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _tell(case: dict[str, Any]) -> None:
    what = ", ".join(f"{each['kind']} {each['name']}" for each in case["faults"])
    print(f"seed {case['seed']}: {case['seconds']:.0f} s, {case.get('steps', 0)} steps: {what}", flush=True)
    for line in problems(case):
        print(f"  WRONG: {line}\n  again: {case['reproduce']}", flush=True)


def problems(case: dict[str, Any]) -> list[str]:
    counts = [f"{key}: {case[key]}" for key in ("lost", "twice", "violations") if case.get(key)]
    return [*counts, *case["wrong"]]


# Throughput


def recovery(kills: int, folder: Path, results: Results) -> None:
    """Tokens a second over the step in which one of four instances dies and the one after it, against those before."""
    victim = Victim([*LAPTOP, "rollout.instances=4", "steps=100000"], folder / "recovery")
    draw = random.Random("recovery")
    victim.start()
    kill: list[int] = []
    try:
        for at in range(kills):
            victim.wait(lambda: victim.version >= (kill[-1] if kill else 0) + CALM + 3, "steps between two kills", 600)
            name = f"i{(at + draw.randrange(2)) % 4}"
            for pid in victim.pids(name)[:1]:
                os.kill(pid, signal.SIGKILL)
                kill.append(victim.version)
        victim.wait(lambda: victim.version >= kill[-1] + 3, "the last steps", 600)
        victim.signal(signal.SIGTERM)
        victim.ended(300)
    finally:
        victim.kill_tree()
    from staleflow.observe.metrics import read_metrics

    assert victim.run is not None
    rows = {row["step"]: row for row in read_metrics(victim.run / "metrics.jsonl")}

    def speed(first: int, last: int) -> float:
        tokens = sum(rows[step]["tokens"] for step in range(first, last + 1))
        return tokens / (rows[last]["time"] - rows[first - 1]["time"])

    for version in kill:
        before = statistics.median(speed(step, step + 1) for step in range(version - CALM, version - 1))
        results.add("recovery", {"version": version, "before": before, "during": speed(version, version + 1)})


def durability(repeats: int, folder: Path, results: Results) -> None:
    """The same run with and without what makes it survive, in turn."""
    for repeat in range(len(results.of("durability")) // len(ARMS), repeats):
        for arm, (command, words) in ARMS.items():
            settings = [*LAPTOP, "steps=24", f"seed={repeat}", *words]
            before = _cpu_s()
            victim = _finished(folder / f"durability-{repeat}", settings, command)
            speed, cpu_s = victim.summary["trained_tokens_per_s"], _cpu_s() - before
            results.add("durability", {"arm": arm, "tokens_per_s": speed, "cpu_s": cpu_s})


def _cpu_s() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def short_steps(runs: int, folder: Path, results: Results) -> None:
    """Steps as short as a pull, while something else keeps every core busy."""
    words = ["steps=400", "groups=2", "group_size=2", "evaluation.every=0", "evaluation.problems=4"]
    cores = os.cpu_count() or 1
    idle = max(0, round(cores - os.getloadavg()[0]))
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(idle)]
    try:
        for at in range(len(results.of("short")), runs):
            began = time.monotonic()
            try:
                victim = _finished(folder / f"short-{at}", [*words, f"seed={at}"])
                value = {"code": victim.codes[-1], "steps": victim.summary.get("steps"), "last": victim.last()}
            except HangError as error:
                value = {"code": None, "steps": None, "last": str(error)}
            results.add("short", value | {"seconds": time.monotonic() - began})
            print(f"short steps, run {at}: {value['code']}, {value['steps']} steps", flush=True)
    finally:
        for each in busy:
            each.kill()
            each.wait()


def _finished(folder: Path, words: Sequence[str], command: str = TRAIN) -> Victim:
    victim = Victim(words, folder, command)
    victim.start()
    try:
        victim.ended(1800)
    finally:
        victim.kill_tree()
    return victim


# What is said of it


def failed(values: dict[str, list[dict[str, Any]]]) -> bool:
    wrong = any(problems(case) for case in values.get("cases", []))
    return wrong or any((run["code"], run["steps"]) != (0, 400) for run in values.get("short", []))


def table(values: dict[str, list[dict[str, Any]]]) -> str:
    parts = {"cases": _cases, "recovery": _recovery, "durability": _durability, "short": _short}
    return "\n\n".join(tell(values[part]) for part, tell in parts.items() if values.get(part)) + "\n"


def _cases(cases: list[dict[str, Any]]) -> str:
    faults = [fault for case in cases for fault in case["faults"]]
    rows = ["| fault | times | noticed p50 / p99, s | next step p50 / p99, s |", "|---|---|---|---|"]
    for kind in KINDS:
        names = sorted({_role(each) for each in faults if each["kind"] == kind})
        for name in names:
            some = [each for each in faults if (each["kind"], _role(each)) == (kind, name)]
            told, step = ([each[key] for each in some if each[key] is not None] for key in ("noticed_s", "step_s"))
            what = f"{kind}, {name}" if name != kind else kind
            rows.append(f"| {what} | {len(some)} | {_quantiles(told)} | {_quantiles(step)} |")
    total = {key: sum(len(case.get(key) or []) for case in cases) for key in ("lost", "twice", "wrong")}
    rows += [
        "",
        "| over all of it | |",
        "|---|---|",
        f"| runs, faults | {len(cases)}, {len(faults)} |",
        f"| steps committed | {sum(case.get('steps', 0) for case in cases):,} |",
        f"| groups lost | {total['lost']} |",
        f"| groups trained twice | {total['twice']} |",
        f"| tokens older than the bound | {sum(case.get('violations', 0) for case in cases)} |",
        f"| anything else wrong: hangs, ends without cause, left behind | {total['wrong']} |",
        f"| tokens lost by dead instances, for each death | {_lost(cases)} |",
        f"| resumes | {sum(case['attempts'] - 1 for case in cases)} |",
        f"| steps made again by them, and their tokens | {sum(case.get('steps_again', 0) for case in cases)}, "
        f"{sum(case.get('tokens_again', 0) for case in cases):,} |",
    ]
    return "\n".join(rows)


def _lost(cases: list[dict[str, Any]]) -> str:
    deaths = sum(sum(case["restarts"].get("instance", {}).values()) for case in cases)
    return f"{sum(case.get('tokens_lost', 0) for case in cases) / max(1, deaths):.0f} ({deaths} deaths)"


def _role(fault: dict[str, Any]) -> str:
    if fault["kind"] in ROLES and fault["name"][1:].isdigit():
        return "instance"
    return "stop" if fault["kind"] == "stop" else fault["name"]


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f} / {ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]:.1f}"


def _recovery(kills: list[dict[str, Any]]) -> str:
    lost = [1 - each["during"] / each["before"] for each in kills]
    return (
        f"One of four instances killed, {len(kills)} times: throughput over that step and the next is lower by "
        f"{statistics.median(lost):.0%} (median; from {min(lost):.0%} to {max(lost):.0%})."
    )


def _durability(runs: list[dict[str, Any]]) -> str:
    speed = {arm: [each["tokens_per_s"] for each in runs if each["arm"] == arm] for arm in ARMS}
    cpu = {arm: [each["cpu_s"] for each in runs if each["arm"] == arm and "cpu_s" in each] for arm in ARMS}
    rows = ["| laptop preset, medians | trained tokens/s | of the last row | CPU of the run, s | of the last row |"]
    rows.append("|---" * 5 + "|")
    columns = [
        {arm: statistics.median(each) if each else math.nan for arm, each in kind.items()} for kind in (speed, cpu)
    ]
    for arm, each in speed.items():
        cells = " | ".join(f"{kind[arm]:,.0f} | {kind[arm] / [*kind.values()][-1]:.1%}" for kind in columns)
        rows.append(f"| {arm} ({len(each)} runs) | {cells} |")
    return "\n".join(rows)


def _short(runs: list[dict[str, Any]]) -> str:
    well = sum((run["code"], run["steps"]) == (0, 400) for run in runs)
    return f"`steps=400 groups=2 group_size=2` on busy cores: {well} of {len(runs)} runs ended well."


if __name__ == "__main__":
    sys.exit(main())
