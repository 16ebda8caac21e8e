"""What Ray costs, and what a dead node does: one task on local processes, on Ray, and on a Ray cluster of two nodes.

    .venv-vllm/bin/python bench/cluster.py --json docs/results/cluster.json             # half an hour
    .venv-vllm/bin/python bench/cluster.py --json docs/results/cluster.json --runs 3    # a part of it
    .venv-ray/bin/python bench/cluster.py --json FILE                                   # without vLLM

The task is the preset ``laptop``; repeats are its seeds. Arms take turns, and a figure is the median over the repeats;
a bench that is started again with the same file continues. The nodes are on loopback addresses of this machine, which
they share.

*tokens/s*: trained, from step 10 on. *CPU*: of all processes for a step, Ray's own included, from then on. *control*:
CPU of the control plane's process, of one core. *pull*: on average, with the fetch from the other node where that is
needed. *memory*: the most that all processes have together at a time, shared pages once (PSS). *next step*: from the
death of a node, with everything on it, to the next committed step. *accuracy*: held-out, after the last step.

Weights: one pull of 200 MB from the shared memory of the own node against a plain copy of as many bytes, and one fetch
of it from another node, into memory that is there already, against a bare transfer over the same kind of connection.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402
from bench.chaos_lab import Victim  # noqa: E402
from bench.ray_nodes import Nodes, below, node_of  # noqa: E402
from staleflow.observe.metrics import read_metrics  # noqa: E402

LAPTOP = ("laptop", "evaluation.every=0", "evaluation.when=after", "processes.pin=false", "processes.threads=1")
VLLM = ("rollout.engine=vllm",)
RAY = ("runtime=ray",)
WARM = 10
"""Steps that are not measured: instances come when they are ready."""
LOOK_S = 5.0
"""Between two looks at the processes, which cost something themselves."""
LIMIT_S = 900.0
SIZE = 200 << 20
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "cpu_s": "CPU, s/step",
    "control": "control, %",
    "pull_ms": "pull, ms",
    "memory_mib": "memory, MiB",
    "next_step_s": "next step, s",
    "accuracy": "accuracy",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=amounts.count, default=60, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=amounts.count, default=3, help="of each arm (%(default)s)")
    parser.add_argument("--runs", type=amounts.count, default=10**6, help="at most, this time")
    parser.add_argument("--arms", type=amounts.count, default=10**6, help="the first ones only")
    parser.add_argument(
        "--json", type=kept.to_continue, metavar="FILE", help="where figures are kept, and continued from"
    )
    options = parser.parse_args()
    file: Path | None = options.json
    steps: int = options.steps
    arms: dict[str, Callable[[str], dict[str, float]]] = {
        "local": lambda seed: ran(steps, (seed,)),
        "Ray, one node": lambda seed: ran(steps, (seed, *RAY)),
        "Ray, two nodes": lambda seed: on_two_nodes(steps, (seed, *RAY)),
        "Ray, two nodes, one dies": lambda seed: on_two_nodes(steps, (seed, *RAY), dies=True),
    }
    if importlib.util.find_spec("vllm") is not None:
        arms["local, vLLM"] = lambda seed: ran(steps, (seed, *VLLM))
        arms["Ray, vLLM"] = lambda seed: ran(steps, (seed, *RAY, *VLLM))
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "steps": steps, "runs": {}}
    if file is not None and file.exists():
        found = kept.read(file)
        if found["steps"] != steps:
            parser.error(f"{file} has runs of {found['steps']} steps: give --steps {found['steps']}, or another file")
    todo = [
        (name, seed)
        for seed in range(options.repeats)
        for name in list(arms)[: options.arms]
        if seed >= len(found["runs"].get(name, []))
    ]
    for name, seed in todo[: options.runs]:
        figures = arms[name](f"seed={seed}")
        print(f"{name}, seed {seed}: {figures}", file=sys.stderr, flush=True)
        found["runs"].setdefault(name, []).append(figures)
        kept.write(file, found)
    if len(todo) <= options.runs and len(arms) <= options.arms:
        found["weights"] = weights()
        kept.write(file, found)
    print(table(found["runs"]))
    for name, shares in against_local(found["runs"]).items():
        print(f"{name}: {', '.join(f'{share:.3f}' for share in shares)} of the tokens/s of local processes, by seed")
    print("\n".join(f"{name}: {value:.3g}" for name, value in found.get("weights", {}).items()))
    return 0


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the accuracy of every seed."""
    rows = [f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, figures in runs.items():
        cells = ["" if key not in figures[0] else f"{median(figures, key):,.4g}" for key in COLUMNS]
        cells[-1] = ", ".join(f"{each['accuracy']:.3f}" for each in figures)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def against_local(runs: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """Throughput of each arm without deaths, by seed: what comes next to each other in time is compared."""
    found: dict[str, list[float]] = {}
    for name, figures in runs.items():
        if not name.startswith("local") and "next_step_s" not in figures[0]:
            base = runs.get("local, vLLM" if "vLLM" in name else "local", [])
            pairs = zip(figures, base, strict=False)
            found[name] = [each["tokens_per_s"] / other["tokens_per_s"] for each, other in pairs]
    return found


def median(figures: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in figures)


# Runs


def ran(
    steps: int,
    words: Sequence[str] = (),
    trees: Sequence[int] = (),
    fault: Callable[[Victim], None] | None = None,
) -> dict[str, float]:
    """``trees``: processes that belong to the run besides those that it starts. ``fault``: in the middle of it."""
    folder = Path(tempfile.mkdtemp(prefix="staleflow-cluster-")).resolve()
    victim = Victim([*LAPTOP, *words, f"steps={steps}"], folder)
    watch = Watch(victim, trees)
    figures: dict[str, float] = {}
    try:
        victim.start()
        watch.start()
        if fault is not None:
            victim.wait(lambda: victim.version >= steps // 2, "half of the steps", LIMIT_S)
            began = time.monotonic()
            fault(victim)
            after = victim.version
            victim.wait(lambda: victim.version > after, "the next step", LIMIT_S)
            figures["next_step_s"] = time.monotonic() - began
        if victim.ended(LIMIT_S):
            raise SystemExit(f"the run failed: {victim.last()}")
        assert victim.run is not None
        rows = read_metrics(victim.run / "metrics.jsonl")
    finally:
        watch.stop()
        if victim.alive:  # the bench was stopped
            victim.kill_tree()
        shutil.rmtree(folder, ignore_errors=True)
    summary = victim.summary
    return figures | {
        "tokens_per_s": sum(row["tokens"] for row in rows[WARM:]) / (rows[-1]["time"] - rows[WARM - 1]["time"]),
        "cpu_s": watch.cpu_s,
        "control": 100 * summary["control_overhead"],
        "pull_ms": 1000 * summary["pull_s"],
        "memory_mib": watch.most / 2**20,
        "accuracy": summary["accuracy_final"],
    }


class Watch(threading.Thread):
    """Looks at the processes of a run now and then."""

    def __init__(self, victim: Victim, trees: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.most = 0
        """Bytes, of all together."""
        self._victim = victim
        self._trees = trees
        self._over = threading.Event()
        self._used: dict[int, float] = {}
        """By process: CPU seconds when it was last seen."""
        self._looks: list[tuple[int, float]] = []
        """Version and CPU seconds of all processes until then."""

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            version = self._victim.version
            roots = [*self._trees, *([control] if (control := self._victim.control) else [])]
            pids = {pid for root in roots for pid in (root, *below(root))}
            self.most = max(self.most, sum(map(pss, pids)))
            self._used |= {pid: used for pid in pids if (used := cpu_s(pid))}
            if version >= WARM:
                self._looks.append((version, sum(self._used.values())))

    def stop(self) -> None:
        self._over.set()
        self.join()

    @property
    def cpu_s(self) -> float:
        """For a step."""
        steps = [look for look in self._looks if look[0] < self._victim.version]  # not what comes after the last
        if len(steps) < 2:
            return float("nan")
        (first, before), (last, after) = steps[0], steps[-1]
        return (after - before) / max(1, last - first)


def on_two_nodes(steps: int, words: Sequence[str], dies: bool = False) -> dict[str, float]:
    with Nodes() as nodes:
        added = {node.host: node for node in (nodes.add(), nodes.add())}
        before = {name: os.environ.get(name) for name in nodes.environment}
        os.environ.update(nodes.environment)

        def die(victim: Victim) -> None:
            """Not the one with the trainer."""
            hosts = [node_of(victim.pids(name)[0]) for name in ("i0", "i1")]
            nodes.kill(added[next(host for host in hosts if host != node_of(victim.pids("trainer")[0]))])

        try:
            trees = [nodes.first.process.pid, *(node.process.pid for node in added.values())]
            return ran(steps, words, trees, die if dies else None)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def pss(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def cpu_s(pid: int) -> float:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


# Weights


def weights(repeats: int = 7) -> dict[str, float]:
    import torch

    from staleflow.servers.weights.mirror import MirroredWeights
    from staleflow.servers.weights.parameter_server import LocalParameterServer
    from staleflow.servers.weights.serving import WeightService

    tensors = {f"layer{at}": torch.randn(SIZE // 4 // 20) for at in range(20)}
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    plain = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    folder = Path(tempfile.mkdtemp(prefix="staleflow-weights-"))
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    times: dict[str, list[float]] = {"copy": [], "pull": [], "transfer": [], "fetch": []}

    def timed(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - began)

    def copy() -> None:
        for name, tensor in tensors.items():
            plain[name].copy_(tensor)

    with (
        LocalParameterServer.create("bench.a", registry=folder / "a") as trainer,
        WeightService("127.0.0.1", "bench.a", folder / "weights.json", folder / "a"),
    ):
        mirror = MirroredWeights("bench.b", folder / "weights.json", registry=folder / "b")
        own = LocalParameterServer.attach("bench.a", registry=folder / "a")
        for version in range(repeats + 3):  # the first ones take the memory
            for tensor in tensors.values():
                tensor.add_(1.0)
            trainer.push(version, tensors)
            timed("copy", copy)
            timed("pull", lambda version=version: own.pull(into, version))
            timed("transfer", transfer)
            timed("fetch", lambda version=version: mirror.lend(lambda *_: None, version))
        own.close()
        mirror.close()
    shutil.rmtree(folder, ignore_errors=True)
    took = {name: statistics.median(each[3:]) for name, each in times.items()}
    return {f"{name}_ms": 1000 * value for name, value in took.items()} | {
        "pull against a copy": took["pull"] / took["copy"],
        "fetch against the transfer alone": took["fetch"] / took["transfer"],
    }


_SENT = bytearray(SIZE)
_CAME = bytearray(SIZE)


def transfer() -> None:
    """As many bytes over a connection of the loopback address, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with server.accept()[0] as end:
                end.sendall(_SENT)

        sending = threading.Thread(target=send)
        sending.start()
        with socket.create_connection(server.getsockname()) as end:
            left = memoryview(_CAME)
            while left:
                left = left[end.recv_into(left[: 1 << 20]) :]
        sending.join()


if __name__ == "__main__":
    sys.exit(main())
