"""What sharding the trainer over ranks costs and saves, on CPUs: the update, the memory of a rank, and tokens/s.

    python bench/sharded.py             # a table; a minute
    python bench/sharded.py --json      # the same as JSON
    python bench/sharded.py --quick     # a small model, seconds

A model of random weights trains the same steps in one process and on two and three ranks, each a process with one
thread that talk by gloo over loopback. *State* is weights, gradients and moments, counted as the bytes of the tensors
that a process holds; its share is of what one process holds. *Difference* is the largest one between a parameter after
the first step and the same of one process. Tokens are all that went through the model, prompts included; with more
ranks than cores they share the cores. *CPU* is what all ranks together took for the steps, against one process: other
work on the machine hardly changes it. *Push* is the time until a version can be pulled.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.training.ranks import meet
from staleflow.training.sharded import ShardedTrainer
from staleflow.training.sharded_store import RankedServer
from staleflow.training.trainer import Trainer, TrainerOptions
from staleflow.types import Row

RANKS = (1, 2, 3)
MOST_SHARE, MOST_DIFFERENCE = 0.55, 1e-5
"""What is aimed at for two ranks."""
VOCABULARY = 1024
STEPS = 3
"""Of which the first is not timed."""


class Size(NamedTuple):
    hidden: int
    layers: int
    groups: int
    tokens: int


FULL, QUICK = Size(256, 4, 8, 96), Size(64, 2, 8, 32)


def groups_of(size: Size, step: int) -> list[list[Row]]:
    """Responses of skewed lengths, every group with a signal."""
    random = np.random.default_rng(step)
    groups: list[list[Row]] = []
    for group in range(size.groups):
        rows: list[Row] = []
        for member in range(4):
            length = int(min(size.tokens, 1 + random.exponential(size.tokens / 2)))
            ids = random.integers(0, VOCABULARY, 16 + length)
            logprobs = np.full(length, -np.log(VOCABULARY))
            rows.append(
                Row.of(f"{group}/{member}", ids[:16], ids[16:], logprobs, ((step, length),), float(member == 0))
            )
        groups.append(rows)
    return groups


def work(rank: int, ranks: int, size: Size, at: str, found: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        vocab_size=VOCABULARY,
    )
    model, options = LlamaForCausalLM(config), TrainerOptions(0, learning_rate=1e-4)
    name = f"bench-{Path(at).parent.name}"
    server = LocalParameterServer.create(name) if rank == 0 else None
    if ranks == 1:
        trainer, weights = Trainer(model, options), server
    else:
        team = meet(rank, ranks, Path(at), "cpu")
        trainer, weights = ShardedTrainer(model, options, team), RankedServer(team, name, server)
    assert weights is not None
    first: list[np.ndarray] = []
    state, seconds, push_s, cpu_s, tokens = 0, 0.0, 0.0, 0.0, 0
    for step in range(STEPS):
        groups = groups_of(size, step)
        began, used = time.perf_counter(), time.process_time()
        trainer.feed(step, groups)
        trainer.flush()
        state = state_bytes(trainer)
        trainer.finish(step)
        ended = time.perf_counter()
        weights.push(step, trainer.weights())
        if step:
            seconds += ended - began
            push_s += time.perf_counter() - ended
            cpu_s += time.process_time() - used
            tokens += sum(row.prompt.size + row.tokens.size for group in groups for row in group)
        else:
            first = [whole(each) for each in trainer.parameters]
    weights.close()
    found.put((rank, first if rank == 0 else [], state, tokens / seconds, push_s / (STEPS - 1), cpu_s))


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def state_bytes(trainer: Trainer) -> int:
    tensors = [*trainer.model.parameters(), *(each.grad for each in trainer.parameters)]
    tensors += [value for state in trainer.optimiser.state.values() for value in state.values() if value.ndim]
    memory = [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def measure(ranks: int, size: Size) -> list[Any]:
    """What each rank found, the first one's first."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix=f"ranks-{uuid4().hex[:8]}-") as folder:
        found = spawn.Queue()
        at = str(Path(folder) / "meet")
        processes = [spawn.Process(target=work, args=(rank, ranks, size, at, found)) for rank in range(ranks)]
        for process in processes:
            process.start()
        results = sorted((found.get(timeout=600) for _ in processes), key=lambda each: each[0])
        for process in processes:
            process.join(60)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="The trainer on several ranks.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    rows: list[dict[str, float]] = []
    alone: Any = None
    for ranks in RANKS:
        results = measure(ranks, size)
        _, parameters, state, tokens_per_s, push_s, _ = results[0]
        state, cpu_s = max(each[2] for each in results), sum(each[5] for each in results)
        alone = alone or (parameters, state, tokens_per_s, cpu_s)
        apart = max(float(np.abs(one - other).max()) for one, other in zip(alone[0], parameters, strict=True))
        rows.append(
            {
                "ranks": ranks,
                "difference": apart,
                "state_mb": state / 1e6,
                "share": state / alone[1],
                "tokens_per_s": tokens_per_s,
                "speed": tokens_per_s / alone[2],
                "cpu": cpu_s / alone[3],
                "push_ms": push_s * 1000,
            }
        )
    two = rows[RANKS.index(2)]
    met = two["share"] <= MOST_SHARE and two["difference"] <= MOST_DIFFERENCE
    parameters = sum(each.size for each in alone[0])
    if args.json:
        print(json.dumps({"cores": os.cpu_count(), "parameters": parameters, "rows": rows, "met": met}))
        return 0 if met else 1
    print(f"{parameters / 1e6:.1f} M parameters, {os.cpu_count()} cores")
    print("ranks  difference  state of a rank  share  tokens/s  speed   CPU  push")
    for row in rows:
        print(
            f"{row['ranks']:5d}  {row['difference']:10.1e}  {row['state_mb']:12.1f} MB  {row['share']:5.2f}  "
            f"{row['tokens_per_s']:8,.0f}  {row['speed']:5.2f}  {row['cpu']:4.2f}  {row['push_ms']:.1f} ms"
        )
    said = "met" if met else "NOT met"
    print(f"{said}: two ranks hold at most {MOST_SHARE} of the state each, and differ by at most {MOST_DIFFERENCE:g}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
