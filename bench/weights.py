"""How fast weights go through shared memory, against a plain copy of as many bytes in the same run.

    python bench/weights.py            # a table
    python bench/weights.py --json     # the same as JSON
    python bench/weights.py --quick    # small models only, seconds

Trainer and readers are processes, each with one thread. The plain copy of a push is one ``memmove`` of the model's
size in the trainer. That of a pull is one ``memmove`` in each reader, all at once, from one of two shared segments
that the trainer has just filled: the bytes are as far away as those of a version that was just pushed. Figures are
medians of interleaved repeats; memory is touched before. With more readers than cores both share the cores, so the
ratio is what counts. GB/s are 1e9 bytes of the trainer's model per second for one process; the last column is for all
readers together. The engine's tensors lie in one buffer, as those of the built-in engine do. *Scattered* is the ratio
for tensors that do not, and *by tensor* that of such a pull to one ``memmove`` for each tensor: the C library copies
very large blocks with streaming stores, up to a third faster than tensors of usual size.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ctypes
import gc
import json
import mmap
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.segments import attach_segment, create_segment, unlink_segment

PULL_TARGET, PUSH_TARGET = 0.8, 0.5
"""Shares of the speed of a plain copy, for models of at least ``COUNTED_MB``: below, starting the copies takes most of
the time, some tenths of a millisecond."""
COUNTED_MB = 64
MODELS = {"4 MB": (4 << 20, 64), "256 MB": (256 << 20, 290), "1 GB": (1 << 30, 290)}
"""Bytes, and tensors."""
QUICK = {"4 MB": (4 << 20, 64), "64 MB": (64 << 20, 290)}
READERS = (1, 2, 4)
COMMANDS = ("memcpy", "memcpy by tensor", "pull", "pull into scattered")
GAP = 256
"""Bytes between scattered tensors, so that no two are copied as one."""


def shapes(size: int, tensors: int) -> dict[str, int]:
    """Elements by name: of every eight tensors seven are matrices and one is a vector, as in a transformer."""
    small = max(1, tensors // 8)
    each = size // 4 // (tensors - small)
    return {f"layers.{number}": 1024 if number % 8 == 7 else each for number in range(tensors)}


def carve(flat: torch.Tensor, elements: dict[str, int], gap: int) -> dict[str, torch.Tensor]:
    """Tensors inside one buffer: one behind the other, as the built-in engine has them, or with gaps between them."""
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, number in elements.items():
        found[name] = flat[at : at + number]
        at += number + gap // 4
    return found


def room(elements: dict[str, int]) -> int:
    return sum(elements.values()) + len(elements) * GAP // 4


def timed(call: Callable[[], object]) -> tuple[float, float]:
    start = time.monotonic()
    call()
    return start, time.monotonic()


def address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def reader(pipe: Connection, barrier: Any, registry: str, elements: dict[str, int], plain: str) -> None:
    """Pull, or copy what is in the plain segment, at each command; answer with start and end."""
    torch.set_num_threads(1)
    server = LocalParameterServer.attach("bench", registry=registry)
    target, size = torch.zeros(room(elements)), 4 * sum(elements.values())
    into, scattered = carve(target, elements, 0), carve(target, elements, GAP)
    other = LocalParameterServer.attach("bench", registry=registry)
    memory = attach_segment(plain)
    assert memory is not None
    pieces: list[tuple[int, int, int]] = []  # the same copy, tensor by tensor
    for tensor in scattered.values():
        pieces.append((tensor.data_ptr(), pieces[-1][1] + pieces[-1][2] if pieces else 0, tensor.nbytes))
    source = address(memory)
    calls: dict[str, Callable[[], object]] = {
        "pull": lambda: server.pull(into),
        "pull into scattered": lambda: other.pull(scattered),
        "memcpy": lambda: ctypes.memmove(target.data_ptr(), source, size),
        "memcpy by tensor": lambda: [ctypes.memmove(to, source + at, length) for to, at, length in pieces],
    }
    gc.disable()
    pipe.send("ready")
    while (command := pipe.recv()) != ("quit", 0):
        source = address(memory) + command[1] * size
        barrier.wait()
        pipe.send(timed(calls[command[0]]))
    assert server.last_pull
    assert not server.last_pull.skipped
    server.close()
    other.close()


class Readers:
    """Processes that pull at the same time."""

    def __init__(self, count: int, registry: str, elements: dict[str, int], plain: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "staleflow.servers.weights.parameter_server"])
        barrier = context.Barrier(count)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=reader, args=(theirs, barrier, registry, elements, plain), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def do(self, command: str, half: int) -> tuple[list[float], float]:
        """Seconds for each reader, and from the first start to the last end. Copies are from that half of the plain
        segment."""
        for pipe in self.pipes:
            pipe.send((command, half))
        spans = [pipe.recv() for pipe in self.pipes]
        return [end - start for start, end in spans], max(end for _, end in spans) - min(start for start, _ in spans)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(("quit", 0))
        for process in self.processes:
            process.join()


def pull_row(size: int, tensors: int, count: int, repeats: int) -> dict[str, Any]:
    elements = shapes(size, tensors)
    seconds: dict[str, list[float]] = {command: [] for command in COMMANDS}
    spans: dict[str, list[float]] = {command: [] for command in COMMANDS}
    with tempfile.TemporaryDirectory() as registry, LocalParameterServer.create("bench", registry=registry) as server:
        weights = {name: torch.zeros(number) for name, number in elements.items()}
        server.push(0, weights)
        total = 4 * sum(elements.values())
        flat, plain = torch.zeros(total // 4), f"/sf-bench-{os.getpid()}"
        memory = create_segment(plain, 2 * total)
        readers = Readers(count, registry, elements, plain)
        unlink_segment(plain)
        for repeat in range(-2, repeats):
            for command in COMMANDS:
                if command.startswith("pull"):
                    change(weights)
                    server.push(server.newest() + 1, weights)
                else:
                    ctypes.memmove(address(memory) + repeat % 2 * total, flat.data_ptr(), total)
                times, span = readers.do(command, repeat % 2)
                if repeat >= 0:
                    seconds[command] += times
                    spans[command].append(span)
        readers.stop()
    speed = {command: total / statistics.median(times) / 1e9 for command, times in seconds.items()}
    together = {command: count * total / statistics.median(times) / 1e9 for command, times in spans.items()}
    return {
        "readers": count,
        "gb_s": round(speed["pull"], 2),
        "ms": round(statistics.median(seconds["pull"]) * 1e3, 3),
        "memcpy_gb_s": round(speed["memcpy"], 2),
        "ratio": round(speed["pull"] / speed["memcpy"], 3),
        "scattered_ratio": round(speed["pull into scattered"] / speed["memcpy"], 3),
        "scattered_ratio_by_tensor": round(speed["pull into scattered"] / speed["memcpy by tensor"], 3),
        "aggregate_gb_s": round(together["pull"], 2),
        "aggregate_memcpy_gb_s": round(together["memcpy"], 2),
    }


def change(weights: dict[str, torch.Tensor], every: int = 1) -> None:
    for number, tensor in enumerate(weights.values()):
        if number % every == 0:
            tensor[0] += 1


def push_rows(size: int, tensors: int, repeats: int) -> list[dict[str, Any]]:
    """Everything new, nine tenths frozen, and fp32 to bf16, each against a copy of the trainer's bytes."""
    elements = shapes(size, tensors)
    weights = {name: torch.zeros(number) for name, number in elements.items()}
    flat = torch.zeros(sum(elements.values())), torch.zeros(sum(elements.values()))
    half = torch.zeros(sum(elements.values()), dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as registry,
        LocalParameterServer.create("bench", registry=registry) as server,
        LocalParameterServer.create("cast", registry=registry, dtype=torch.bfloat16) as casting,
    ):

        def push(to: LocalParameterServer, every: int) -> tuple[float, float]:
            change(weights, every)
            version = to.newest() + 1
            return timed(lambda: to.push(version, weights))

        for repeat in range(-3, repeats):
            spans = {
                "memcpy": timed(lambda: ctypes.memmove(flat[0].data_ptr(), flat[1].data_ptr(), flat[1].nbytes)),
                "push": push(server, 1),
                "again": push(server, 10),  # both slots hold the frozen ones
                "push, 90 % frozen": push(server, 10),
                "cast": timed(lambda: half.copy_(flat[0])),
                "push, fp32 to bf16": push(casting, 1),
            }
            for name, (start, end) in spans.items() if repeat >= 0 else ():
                seconds.setdefault(name, []).append(end - start)
    speed = {name: 4 * sum(elements.values()) / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return [
        {
            "what": name,
            "gb_s": round(speed[name], 2),
            "ms": round(statistics.median(seconds[name]) * 1e3, 3),
            "memcpy_gb_s": round(speed["memcpy"], 2),
            "ratio": round(speed[name] / speed["memcpy"], 3),
            **({"ratio_to_cast": round(speed[name] / speed["cast"], 3)} if "bf16" in name else {}),
        }
        for name in speed
        if name.startswith("push")
    ]


def measure(quick: bool = False) -> dict[str, Any]:
    """All rows, and whether the targets are met. Needs four times the largest model for each reader."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model, (size, tensors) in (QUICK if quick else MODELS).items():
        repeats = max(15, min(200, (1 << 31) // size))
        about = {"model": model, "megabytes": size >> 20, "tensors": tensors}
        for row in push_rows(size, tensors, repeats):
            rows.append({**about, "readers": 0, **row})
        for count in READERS:
            rows.append({**about, "what": "pull", **pull_row(size, tensors, count, repeats)})
    counted = [row for row in rows if row["megabytes"] >= COUNTED_MB]
    worst = {what: min(row["ratio"] for row in counted if row["what"] == what) for what in ("pull", "push")}
    return {
        "rows": rows,
        "slowest_pull_ratio": worst["pull"],
        "slowest_scattered_ratio": min(row["scattered_ratio"] for row in counted if row["what"] == "pull"),
        "slowest_push_ratio": worst["push"],
        "target_pull_ratio": PULL_TARGET,
        "target_push_ratio": PUSH_TARGET,
        "targets_met": worst["pull"] >= PULL_TARGET and worst["push"] >= PUSH_TARGET,
    }


def table(result: dict[str, Any]) -> str:
    names = ("GB/s", "memcpy", "ratio", "scattered", "by tensor", "ms", "all")
    keys = ("gb_s", "memcpy_gb_s", "ratio", "scattered_ratio", "scattered_ratio_by_tensor", "ms", "aggregate_gb_s")
    lines = [f"{'model':>8} {'tensors':>7} {'what':<20} {'readers':>7}" + "".join(f"{name:>10}" for name in names)]
    for row in result["rows"]:
        lines.append(
            f"{row['model']:>8} {row['tensors']:>7} {row['what']:<20} {row['readers'] or '':>7}"
            + "".join(f"{row[key]:>10.2f}" if key in row else " " * 10 for key in keys)
        )
    lines.append(
        f"from {COUNTED_MB} MB on: slowest pull {result['slowest_pull_ratio']:.2f} of memcpy (target {PULL_TARGET}), "
        f"{result['slowest_scattered_ratio']:.2f} into scattered tensors; slowest push "
        f"{result['slowest_push_ratio']:.2f} of memcpy (target {PUSH_TARGET})"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="small models only")
    options = parser.parse_args()
    result = measure(options.quick)
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
