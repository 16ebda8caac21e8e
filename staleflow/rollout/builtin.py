"""The built-in engine: continuous batching in PyTorch, for one process on a CPU or one GPU.

engine = TorchEngine("models/tiny", EngineOptions(kv_tokens=65_536, max_running=64))
engine.submit([Request("t1", 1, prompt=[5, 8, 13])])
while engine.busy:
    for result in engine.step().finished: ...
"""

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from staleflow.rollout.attention import Layout, PagedAttention, PrefillSpan
from staleflow.rollout.device import DTYPES, cuda_parts, device_of
from staleflow.rollout.engine import (
    EngineError,
    LoadWeights,
    Part,
    Reason,
    Request,
    Result,
    StepOutput,
    WeightSource,
)
from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import read_config, read_tensors
from staleflow.rollout.options import EngineOptions, Sampling
from staleflow.rollout.pages import PagePool
from staleflow.rollout.refusals import refused
from staleflow.rollout.rows import Ints, Rows, drawn_in
from staleflow.rollout.sampling import Drawn, Params, draw, uniform
from staleflow.rollout.scheduler import Scheduler, StepPlan
from staleflow.rollout.sequence import Sequence
from staleflow.rollout.stopping import StopStrings
from staleflow.rollout.tiles import Spans
from staleflow.types import Failed, InstanceState

if TYPE_CHECKING:
    from staleflow.rollout.cuda import DecodeGraphs, Flight
    from staleflow.rollout.cuda_prefill import PrefillSteps


PREFILL_COST = 4.0
"""On a GPU, what a step with prefill costs in steps without: it holds up all that decode, the longest among them, and
the step after it is launched only when its tokens are known."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was started."""

    order: Ints
    """Rows of those that decode."""
    decoding: int
    drawing: list[Sequence]
    """Who draws: first those that decode, then those whose prefill ends."""
    collect: Callable[[], Drawn]
    """Wait for what they drew."""
    blind: bool = False
    """Whether the next step can begin before that is known."""


class TorchEngine:
    def __init__(self, folder: str | Path, options: EngineOptions | None = None, version: int = 0) -> None:
        """Load the model in ``folder``; its weights count as ``version``."""
        self.options = options = options or EngineOptions()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.device = device_of(options.device)
        config = read_config(folder)
        dtype = DTYPES[options.dtype]
        self.model = Model(config, dtype, self.device)
        if options.weights == "random":
            self.model.randomise()
        else:
            self.model.load(read_tensors(folder))
        culprit = self.model.unsound()
        if culprit is not None:
            raise EngineError(f"{folder}: {culprit} has values that are not finite numbers: use another checkpoint")
        self.pool = PagePool(options.kv_tokens, options.page_size)
        self._graphs: DecodeGraphs | None = None
        """Where a decoding step is one CUDA graph."""
        self._prefills: PrefillSteps | None = None
        """Steps with prefill on a GPU."""
        self.attention = PagedAttention(config.geometry, self.pool.total, options.page_size, dtype, self.device)
        self.rows = Rows(options.max_running, self.attention.null_page)
        self.scheduler = Scheduler(self.pool, self.rows, options.prefill_tokens)
        self.scheduler.version = version
        self.capacity = min(config.positions, self.pool.total * options.page_size)
        """The longest sequence, prompt included, that it can hold."""
        if self.device.type == "cuda":
            pages = self.pool.pages_for(self.capacity)
            decoding, prefilling = cuda_parts()
            self._graphs = decoding(self.model, self.attention, options.max_running, pages, options.persistent_kernel)
            tokens = options.prefill_tokens + options.max_running
            self._prefills = prefilling(self.model, self.attention, options.max_running, tokens, pages)
            self.scheduler.patience = PREFILL_COST
        self._ahead: _Flight | None = None
        """The next step, launched before the tokens of the last one were known."""
        self._requests: dict[str, Sequence] = {}
        self._stops = StopStrings(Path(folder))
        self._returned: list[Result] = []
        self._failed: list[Failed] = []
        self._last: tuple[int, int, float] | None = None
        self._culprit: tuple[int, str | None] | None = None
        self._closed = False

    def prepare(self) -> None:
        """On a GPU: compile and record now what the first steps would have to wait for."""
        if self._graphs is not None and self._prefills is not None:
            self.submit([Request("first", 0, [0] * 8, sampling=Sampling(max_tokens=2))])
            while self.busy:
                self.step()
            self._graphs.prepare(min(self.options.longest, self.capacity))
            self._prefills.prepare()
            self.pool.forget()
            self._last = None

    @property
    def described(self) -> str:
        """What it runs on, for people."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, Triton kernels and CUDA graphs"
        return f"CPU, {torch.get_num_threads()} thread(s)"

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._returned or self._failed)

    def submit(self, requests: Many[Request]) -> None:
        for request in requests:
            problem = refused(
                request, self._requests, self.model.config.vocabulary, self.capacity, self._stops.available
            )
            if problem is not None:
                self._failed.append(Failed(request.name, request.epoch, problem))
                continue
            sequence = self._requests[request.name] = Sequence(request)
            self.scheduler.waiting.append(sequence)

    def interrupt(self, names: Many[str]) -> None:
        for sequence in self._take_out(names):
            self._returned.append(sequence.result("interrupted", self.version))
            self._release(sequence)

    def abort(self, names: Many[str]) -> None:
        for sequence in self._take_out(names):
            self._release(sequence)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        started = time.perf_counter()
        finished: list[Result] = []
        made, context, prefilled = 0, 0, self.scheduler.prefilled
        flight = self._ahead or self._launch(finished)
        self._ahead = None
        prefilled = self.scheduler.prefilled - prefilled
        if flight is not None:
            context = int(self.rows.position[flight.order].sum())
            self._ahead = self._launch_following(flight)
            made = self._take_in(flight, flight.collect(), finished)
            if not prefilled:
                self._last = (flight.decoding, context, time.perf_counter() - started)
        if not self._requests:
            self._ahead = None
        output = StepOutput(finished, self._returned, self._failed, made, prefilled, context)
        self._returned, self._failed = [], []
        return output

    def peek(self, name: str, start: int) -> Part | None:
        sequence = self._requests.get(name)
        return None if sequence is None else sequence.part(start, self.version)

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        """Copy new weights over the old ones. On an error of the source, the weights are of no certain version."""
        self._land()  # its tokens would be of the old version
        parameters = self.model.parameters
        with torch.inference_mode():
            held = source.pull(parameters, version) if isinstance(source, WeightSource) else source(parameters)
        if held < version:
            raise EngineError(f"asked for version {version} of the weights and got {held}: push it before the pull")
        if held == self.version:
            return held
        for sequence in self._requests.values():
            sequence.close_span(self.version)
        self.scheduler.version = held
        if self.options.kv_on_pull == "keep":
            self.scheduler.keep_entries()
        else:
            self.scheduler.restart()
        return held

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.model.parameters

    def snapshot(self) -> InstanceState:
        running, backlog = self.scheduler.running.values(), self.scheduler.backlog()
        size = self.pool.page_size
        return InstanceState(
            version=self.version,
            running=len(running) + backlog.joining,
            waiting=backlog.stuck,
            context=sum(len(sequence.tokens) for sequence in running) + backlog.tokens,
            kv_free=(self.pool.available - backlog.pages) * size,
            kv_total=self.pool.total * size,
            max_running=self.options.max_running,
            kv_version=min((sequence.kv_version for sequence in running), default=self.version),
            step=self._last,
        )

    def close(self) -> None:
        self.abort(list(self._requests))
        self._closed = True

    def _take_out(self, names: Many[str]) -> list[Sequence]:
        found = [self._requests.pop(name) for name in dict.fromkeys(names) if name in self._requests]
        self.scheduler.discard_waiting(sequence.request.name for sequence in found)
        if not self._requests:
            self._ahead = None  # what it drew has no owner
        return found

    def _release(self, sequence: Sequence, keep: bool = True) -> None:
        if sequence.row >= 0:
            idle = self.scheduler.remove(sequence, keep)
            if not keep and idle:
                self.attention.clear_pages(idle)

    def _finish(self, sequence: Sequence, reason: Reason) -> Result:
        result = sequence.result(reason, self.version)
        del self._requests[sequence.request.name]
        self._release(sequence)
        return result

    def _launch(self, finished: list[Result]) -> "_Flight | None":
        """Plan a step and start it; None if there is nothing to do."""
        plan = self.scheduler.plan()
        for sequence in plan.exhausted:
            finished.append(self._finish(sequence, "capacity"))
        if not (plan.decode or plan.prefill):
            return None
        if plan.copies:
            self.attention.copy_pages(plan.copies)
        if self._graphs is not None and not plan.prefill:
            flight = self._replay(self._graphs, plan, self.rows.token[plan.order])
        elif self._prefills is not None:
            flight = self._prefill(self._prefills, plan)
        else:
            drawn, drawing = self._run(plan)
            flight = _Flight(plan.order, len(plan.decode), drawing, lambda: drawn)
        self._count(plan)
        return flight

    def _launch_following(self, flight: "_Flight") -> "_Flight | None":
        """Start the step after this one, with the tokens that it will draw, if that can be done blindly."""
        if self._graphs is None or not flight.blind or int(self.rows.position[flight.order].max()) + 1 >= self.capacity:
            return None
        plan = self.scheduler.following()
        if plan is None or all(len(each.tokens) + 1 >= each.limit for each in plan.decode):
            return None
        stayed = np.arange(flight.decoding) if plan.stayed is None else plan.stayed
        following = self._replay(self._graphs, plan, drawn_in(stayed))
        self._count(plan)
        return following

    def _land(self) -> None:
        """Give up the step that was launched ahead."""
        if self._ahead is not None:
            self._ahead = None
            self.scheduler.undo_following()

    def _count(self, plan: StepPlan) -> None:
        """The plan is under way: its tokens count as computed, and its decoding rows as drawn."""
        self.rows.drawn[plan.order] += 1
        self.scheduler.computed(plan)

    def _replay(self, graphs: "DecodeGraphs", plan: StepPlan, tokens: Ints) -> "_Flight":
        """A decoding step as a CUDA graph. It draws without truncation; with any, its logits are drawn from here."""
        rows, order = self.rows, plan.order
        params = Params.of(rows, order)
        position = rows.position[order]
        pages = self.pool.pages_for(int(position.max()) + 1)
        tables = rows.tables[order, :pages]
        flight = graphs.launch(tokens, position, tables, uniform(params.seed, params.drawn), params.temperature)
        if params.truncated.any():
            drawn = draw(flight.logits, params)
            return _Flight(order, len(order), plan.decode, lambda: drawn)
        return _Flight(order, len(order), plan.decode, lambda: _drawn(flight), blind=True)

    def _prefill(self, steps: "PrefillSteps", plan: StepPlan) -> "_Flight":
        """A step with prefill on a GPU: a token of each sequence that decodes, then what is prefilled."""
        rows, order = self.rows, plan.order
        parts = plan.prefill
        held = np.concatenate((order, np.array([part.sequence.row for part in parts], np.int64)))
        starts = np.concatenate((rows.position[order], np.array([part.start for part in parts], np.int64)))
        lengths = np.concatenate((np.ones_like(order), np.array([part.length for part in parts], np.int64)))
        given = (part.sequence.tokens[part.start : part.start + part.length] for part in parts)
        tokens = np.concatenate((rows.token[order], *(np.array(each, np.int64) for each in given)))
        draws = np.concatenate((np.ones(len(order), np.bool_), np.array([part.last for part in parts], np.bool_)))
        params = Params.of(rows, held[draws])
        flight = steps.launch(
            tokens,
            Spans.of(starts, lengths, rows.tables[held], self.pool.page_size),
            np.cumsum(lengths)[draws] - 1,
            uniform(params.seed, params.drawn),
            params.temperature,
        )
        drawing = [*plan.decode, *(part.sequence for part in parts if part.last)]
        if params.truncated.any():
            drawn = draw(flight.logits, params)
            return _Flight(order, len(order), drawing, lambda: drawn)
        return _Flight(order, len(order), drawing, lambda: _drawn(flight))

    def _run(self, plan: StepPlan) -> tuple[Drawn, list[Sequence]]:
        """Run a plan's tokens through the model and draw from what comes out. Also returns who draws."""
        size = self.pool.page_size
        order, rows = plan.order, self.rows
        position = rows.position[order]
        tables = rows.tables[order]
        slots = tables[np.arange(len(order)), position // size] * size + position % size
        tokens, positions = rows.token[order], position
        spans: list[PrefillSpan] = []
        wanted = None
        drawing = plan.decode
        if plan.prefill:
            more = [self._inputs(*part) for part in plan.prefill]
            tokens = np.concatenate([tokens, *(each[0] for each in more)])
            positions = np.concatenate([position, *(each[1] for each in more)])
            slots = np.concatenate([slots, *(each[2] for each in more)])
            wanted, first = list(range(len(order))), len(order)
            drawing = list(plan.decode)
            for part in plan.prefill:
                spans.append(PrefillSpan(first, part.start, part.length, part.sequence.pages))
                first += part.length
                if part.last:
                    wanted.append(first - 1)
                    drawing.append(part.sequence)
            wanted = torch.tensor(wanted, dtype=torch.int64, device=self.device)
            order = np.array([sequence.row for sequence in drawing], np.int64)
        self.attention.begin(Layout(slots, tables, position + 1, spans))
        logits = self.model.forward(self._tensor(tokens), self._tensor(positions), self.attention, wanted)
        return draw(logits, Params.of(rows, order)), drawing

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _inputs(self, sequence: Sequence, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and slots of a part of a prefill."""
        size = self.pool.page_size
        positions = np.arange(start, start + count)
        pages = np.array(sequence.pages, np.int64)[positions // size]
        return np.array(sequence.tokens[start : start + count], np.int64), positions, pages * size + positions % size

    def _take_in(self, flight: "_Flight", drawn: Drawn, finished: list[Result]) -> int:
        """Append what was drawn, and let those that end with it leave. Returns how many tokens they were."""
        made = 0
        self.rows.token[flight.order] = drawn.tokens[: flight.decoding]
        for index, (sequence, token, logprob, sound) in enumerate(
            zip(flight.drawing, drawn.tokens, drawn.logprobs, drawn.sound, strict=True)
        ):
            if sequence.row < 0:
                continue  # it left while this step was under way
            if not sound:
                self._fail(sequence)
                continue
            sequence.append(token, logprob)
            if index >= flight.decoding:
                self.rows.follow(sequence)
            made += 1
            reason = self._ended(sequence, token)
            if reason is not None:
                finished.append(self._finish(sequence, reason))
        return made

    def _ended(self, sequence: Sequence, token: int) -> Reason | None:
        if token in sequence.stops:
            return "stop"
        if sequence.request.sampling.stop_strings and self._stops.hit(sequence):
            return "stop"
        length = len(sequence.tokens)
        if length >= sequence.limit:
            return "length"
        return "capacity" if length > self.capacity else None

    def _fail(self, sequence: Sequence) -> None:
        request = sequence.request
        if self._culprit is None or self._culprit[0] != self.version:
            self._culprit = (self.version, self.model.unsound())
        culprit = self._culprit[1]
        message = f"request {request.name}: the model gave logits that are not finite numbers"
        if culprit is not None:
            message += f", because {culprit} has some in version {self.version} of the weights"
        self._failed.append(Failed(request.name, request.epoch, message))
        del self._requests[request.name]
        self._release(sequence, keep=False)


def _drawn(flight: "Flight") -> Drawn:
    tokens, logprobs = flight.collect()
    return Drawn(tokens, logprobs, [math.isfinite(each) for each in logprobs])


def make(model_folder: str | Path, options: EngineOptions) -> TorchEngine:
    """The engine of an instance, which has pulled no version yet."""
    engine = TorchEngine(model_folder, options, version=-1)
    engine.prepare()
    return engine
