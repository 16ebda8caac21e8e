"""A step on a GPU, from the arrival of its last group to first tokens under the new version, as a timeline.

    python bench/gpu/step.py                                        # SmolLM2-135M's shape, as the preset one-gpu has it
    python bench/gpu/step.py --json step.json --picture step.svg    # also as JSON and as a picture
    python bench/gpu/step.py --smoke                                # a tiny model on whatever device there is

One process has both ends: the trainer's worker with its stores in shared memory, and an engine in bfloat16 that decodes
256 sequences, with nothing under way when the version comes. A step is 32 groups of 8 rows, prompts of 40 tokens and
responses of 21; they come one by one, and the clock starts with the last. Spans of the trainer are *gradients* (what
the GPU still has to do), *note* (writing down what was fed), *update*, *push*; then, of the engine, *pull* and *first
tokens* (until each sequence has one: all contexts are computed again); beside them runs *standby*, the copy for a
successor, until it is done. What the control plane does in between (journal, decision) is not in it: a run's
``finish_s`` and ``cycle_s`` are.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import amounts, kept
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.shapes import SHAPES, write
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.training.standby import Standby
from staleflow.training.trainer import Trainer, TrainerOptions
from staleflow.types import Feed, Finish, Row
from staleflow.workers.trainer import TrainerWorker

SPANS = ("gradients", "note", "update", "push", "pull", "first tokens", "standby")
COLOURS = ("#4c78a8", "#9d755d", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#bab0ac")


class Timeline:
    """When each span began and ended, in seconds since the last group came."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[float, float]] = {}
        self.began = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter() - self.began
        yield
        if torch.cuda.is_available() and name != "standby":
            torch.cuda.current_stream().synchronize()
        self.spans[name] = (begin, time.perf_counter() - self.began)

    def around(self, thing: Any, method: str, name: str) -> None:
        """Record each call of a method as a span."""
        inner: Callable[..., Any] = getattr(thing, method)

        def call(*args: Any) -> Any:
            with self.span(name):
                return inner(*args)

        setattr(thing, method, call)


def group(version: int, vocabulary: int, random: np.random.Generator) -> list[Row]:
    prompt = random.integers(0, vocabulary, 40)

    def row(at: int) -> Row:
        tokens = random.integers(0, vocabulary, 21)
        return Row.of(f"p/{at}", prompt, tokens, np.full(21, -8), ((version, 21),), float(at % 2))

    return [row(at) for at in range(8)]


class Bench:
    def __init__(self, shape: str, folder: Path, groups: int, running: int, micro_tokens: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        write(shape, folder)
        self.vocabulary, self.groups, self.running = SHAPES[shape]["vocab_size"], groups, running
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        options = TrainerOptions(2, learning_rate=1e-6, micro_tokens=micro_tokens, correction="truncated")
        self.trainer = Trainer(model, options)
        self.weights = LocalParameterServer.create("step", registry=folder, dtype=torch.bfloat16)
        self.standby = Standby(LocalParameterServer.create("step-standby", registry=folder), folder, share=1.0)
        self.worker = TrainerWorker(self.trainer, self.weights, lambda _: None, standby=self.standby)
        self.worker.publish()
        engine = EngineOptions(
            kv_tokens=running * 128,
            max_running=running,
            prefill_tokens=8_192,
            dtype="bfloat16",
            device=self.device,
            weights="random",
        )
        self.engine = TorchEngine(folder, engine)
        self.reader = LocalParameterServer.attach("step", registry=folder)
        self.random = np.random.default_rng(0)

    def step(self) -> dict[str, tuple[float, float]]:
        number = self.trainer.version
        prompt = self.random.integers(0, self.vocabulary, 40).tolist()
        names = [f"{number}-{at}" for at in range(self.running)]
        self.engine.submit([Request(name, 1, prompt, sampling=Sampling(max_tokens=21)) for name in names])
        for _ in range(8):
            self.engine.step()
        came = [group(number, self.vocabulary, self.random) for _ in range(self.groups)]
        for each in came[:-1]:
            self.worker.handle([Feed(number, [each])])
            self.trainer.advance()
        line = Timeline()
        line.around(self.standby, "note", "note")
        line.around(self.trainer, "_update", "update")
        line.around(self.weights, "push", "push")
        line.around(self.standby, "_copy", "standby")
        with line.span("gradients"):
            self.worker.handle([Feed(number, [came[-1]])])
            self.trainer.flush()
        self.worker.handle([Finish(number)])
        for thing, method in ((self.standby, "note"), (self.trainer, "_update"), (self.weights, "push")):
            delattr(thing, method)
        with line.span("pull"):
            self.engine.pull(self.reader, number + 1)
        with line.span("first tokens"):
            waiting = set(names)
            while waiting:
                self.engine.step()
                waiting = {name for name in waiting if self._newest(name) <= number}
        self.standby.wait()
        del self.standby._copy
        self.engine.interrupt(names)
        while self.engine.snapshot().running:
            self.engine.step()
        return line.spans

    def _newest(self, name: str) -> int:
        """The version of its latest token."""
        part = self.engine.peek(name, 0)
        return part.spans[-1][0] if part is not None else -1

    def close(self) -> None:
        self.reader.close()
        self.standby.close()
        self.weights.close()


def picture(spans: dict[str, tuple[float, float]]) -> str:
    """One bar for each span, on one scale."""
    end = max(last for _, last in spans.values())
    scale, bars = 640 / end, list[str]()
    for at, (name, colour) in enumerate(zip(SPANS, COLOURS, strict=True)):
        begin, last = spans[name]
        x, y, wide = 110 + begin * scale, 20 + 26 * at, max(1.0, (last - begin) * scale)
        bars.append(f'<text x="100" y="{y + 14}" text-anchor="end">{name}</text>')
        bars.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18" fill="{colour}"/>')
        bars.append(f'<text x="{x + wide + 4:.1f}" y="{y + 14}">{1e3 * (last - begin):.1f} ms</text>')
    style = 'font-family="sans-serif" font-size="12" width="860" height="215"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>{"".join(bars)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on any device")
    parser.add_argument("--shape", default="smollm-135m", choices=[*SHAPES])
    parser.add_argument("--micro-tokens", type=amounts.count, default=16_384)
    parser.add_argument("--json", type=kept.to_write)
    parser.add_argument("--picture", type=kept.to_write)
    given = parser.parse_args()
    sizes = (4, 4) if given.smoke else (32, 256)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench("tiny" if given.smoke else given.shape, Path(folder), *sizes, given.micro_tokens)
        steps = [bench.step() for _ in range(3 if given.smoke else 8)][2:]
        bench.close()
    middle = {
        name: (statistics.median(each[name][0] for each in steps), statistics.median(each[name][1] for each in steps))
        for name in SPANS
    }
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "torch": torch.__version__,
        "shape": "tiny" if given.smoke else given.shape,
        "to_first_tokens_ms": round(1e3 * middle["first tokens"][1], 2),
        "ms": {name: [round(1e3 * each, 2) for each in span] for name, span in middle.items()},
    }
    print(json.dumps(found), flush=True)
    kept.write(given.json, found)
    if given.picture:
        given.picture.write_text(picture(middle))


if __name__ == "__main__":
    main()
