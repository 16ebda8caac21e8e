# pyright: reportMissingImports=false
"""The engine: vLLM behind the interface of ``rollout/engine.py``, driven one step at a time.

engine = VllmEngine(start(folder, options, {}), folder, options, version=0)
engine.submit([Request("t1", 1, prompt=[5, 8, 13])])
output = engine.step()
"""

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.version import __version__

from staleflow.errors import line_of
from staleflow.rollout.device import DTYPES
from staleflow.rollout.engine import (
    EngineError,
    LendingSource,
    LoadWeights,
    Part,
    Reason,
    Request,
    Result,
    StepOutput,
    WeightSource,
)
from staleflow.rollout.model_folder import read_tensors
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.refusals import refused
from staleflow.rollout.sequence import Sequence
from staleflow.rollout.stopping import StopStrings
from staleflow.rollout.vllm.requests import Requests
from staleflow.rollout.vllm.weights import Copies, pull
from staleflow.types import Failed, InstanceState

ATTEMPTS = 8
"""How often the workers of an engine may find different versions, because one was pushed meanwhile."""
STUCK = 100
"""Steps in a row that compute nothing although there are requests: the engine will never continue."""


class VllmEngine:
    def __init__(self, llm: LLMEngine, folder: str | Path, options: EngineOptions, version: int) -> None:
        """``llm``: made by ``start``; its weights count as ``version``."""
        self.options = options
        self.version = version
        self._llm = llm
        self._folder = Path(folder)
        config = llm.vllm_config
        self._scheduler: Any = llm.engine_core.engine_core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._block: int = config.cache_config.block_size
        self._vocabulary: int = config.model_config.get_vocab_size()
        self.capacity: int = config.model_config.max_model_len - 1
        """The longest sequence, prompt included, that it can continue."""
        self._stops = StopStrings(self._folder)
        self._requests = Requests(llm, self._stops)
        self._only_greedy = options.device == "cpu" and config.speculative_config is not None
        self._idle = 0
        self._returned: list[Result] = []
        self._failed: list[Failed] = []
        self._last: tuple[int, int, float] | None = None
        self._copies: dict[str, torch.Tensor] | None = None
        self._pulled = self._closed = False
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"version": version}})

    @property
    def described(self) -> str:
        """What it runs on, for people."""
        if self.options.device == "cpu":
            return f"CPU, {torch.get_num_threads()} thread(s), vLLM {__version__}"
        return f"{torch.cuda.get_device_name(self.options.device)}, vLLM {__version__}"

    @property
    def preempted(self) -> int:
        """How often a sequence had to give way for lack of memory, or was computed again after a pull."""
        return self._scheduler.preempted

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._returned or self._failed)

    def submit(self, requests: Many[Request]) -> None:
        for request in requests:
            problem = refused(request, self._requests, self._vocabulary, self.capacity, self._stops.available)
            if self._only_greedy and request.sampling.temperature:
                problem = (
                    f"request {request.name}: vLLM for CPUs speculates with a temperature that it does not set: give "
                    "temperature=0, or no speculative_config"
                )
            if problem is not None:
                self._failed.append(Failed(request.name, request.epoch, problem))
            else:
                self._add(Sequence(request))

    def interrupt(self, names: Many[str]) -> None:
        self._returned += [self._result(each, "interrupted") for each in self._requests.remove(names)]

    def abort(self, names: Many[str]) -> None:
        self._requests.remove(names)

    def step(self) -> StepOutput:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        finished: list[Result] = []
        made, counts = 0, self._scheduler
        counts.decoding = counts.context = counts.prefilled = 0
        if self._requests:
            began = time.perf_counter()
            try:
                step = self._requests.step()
            except Exception as error:  # whatever vLLM raises, it does not continue after it
                raise EngineError(f"vLLM failed in a step ({line_of(error)}): start the instance again") from error
            made = step.made
            finished = [self._result(*each) for each in step.ended]
            self._failed += [self._not_finite(each.request) for each in step.failed]
            self._idle = 0 if counts.decoding or counts.prefilled else self._idle + 1
            if self._idle > STUCK:
                raise EngineError(f"vLLM computed nothing in {STUCK} steps: start the instance again")
            if counts.decoding and not counts.prefilled:
                self._last = (counts.decoding, counts.context, time.perf_counter() - began)
        output = StepOutput(finished, self._returned, self._failed, made, counts.prefilled, counts.context)
        self._returned, self._failed = [], []
        return output

    def peek(self, name: str, start: int) -> Part | None:
        sequence = self._requests.get(name)
        return None if sequence is None else sequence.part(start, self.version)

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        """Load new weights into vLLM. On an error of the source, they are of no certain version."""
        lends = self._copies is None and isinstance(source, LendingSource)
        lender = cast(LendingSource, source) if lends else self._copied(source, version)
        held: set[int] = set()
        for _ in range(ATTEMPTS):
            held = set(self._llm.collective_rpc(pull, args=(lender, max(version, *held, -1))))
            if len(held) == 1:
                break
        else:
            raise EngineError(f"the workers hold versions {held} of the weights: push less often")
        (now,) = held
        self._pulled = True
        if now != self.version:
            for each in self._requests:
                each.close_span(self.version)
            self.version = now
            self._renew_entries()
        return now

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._copies is None:
            if self._pulled:
                raise EngineError("weights() was not called before the first pull, so they were not kept: call it then")
            dtype = DTYPES[self.options.dtype]
            self._copies = {name: tensor.to(dtype) for name, tensor in read_tensors(self._folder)}
        return self._copies

    def snapshot(self) -> InstanceState:
        running, waiting = self._scheduler.get_request_counts()
        requests = self._scheduler.running
        joining, blocks = self._joining()
        return InstanceState(
            version=self.version,
            running=running + len(joining),
            waiting=waiting - len(joining),
            context=sum(request.num_tokens for request in (*requests, *joining)),
            kv_free=(self._pool.get_num_free_blocks() - blocks) * self._block,
            kv_total=(self._pool.num_gpu_blocks - 1) * self._block,  # one is never used
            max_running=self.options.max_running,
            kv_version=min((each.kv_version for each in self._requests.of(requests)), default=self.version),
            step=self._last,
        )

    def _joining(self) -> tuple[list[Any], int]:
        """Who waits for prefill only: there is a row and memory for them, which is in blocks. Prompts that they share
        with others are counted as if they did not."""
        rows = self.options.max_running - len(self._scheduler.running)
        free, found = self._pool.get_num_free_blocks(), list[Any]()
        needed = 0
        for request in islice(self._scheduler.waiting, rows):
            blocks = -(-request.num_tokens // self._block)
            if needed + blocks > free:
                break
            needed += blocks
            found.append(request)
        return found, needed

    def close(self) -> None:
        if not self._closed:
            self.abort([each.request.name for each in self._requests])
            self._closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        self._llm.engine_core.shutdown()

    def _add(self, sequence: Sequence) -> None:
        sequence.kv_version = self.version
        # With entries of other weights kept, those must not be found.
        self._requests.add(sequence, str(self.version) if self.options.kv_on_pull == "keep" else None)

    def _result(self, sequence: Sequence, reason: Reason) -> Result:
        return sequence.result(reason, self.version)._replace(kv_version=sequence.kv_version)

    def _not_finite(self, request: Request) -> Failed:
        message = (
            f"request {request.name}: the model gave logits that are not finite numbers in version {self.version} of "
            "the weights"
        )
        return Failed(request.name, request.epoch, message)

    def _copied(self, source: WeightSource | LoadWeights, version: int) -> Copies:
        """The version in tensors of this process, for who asked for them or for a source that only fills tensors."""
        copies = self.weights()
        if isinstance(source, LendingSource):

            def copy(_: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
                self._copies = {name: tensor.clone() for name, tensor in tensors}

            held = source.lend(copy, version)
        else:
            held = source.pull(copies, version) if isinstance(source, WeightSource) else source(copies)
        if held < version:
            raise EngineError(f"asked for version {version} of the weights and got {held}: push it before the pull")
        return Copies(held, self.weights())

    def _renew_entries(self) -> None:
        """The weights changed: KV entries are computed again, or stay with the sequences that run."""
        if self.options.kv_on_pull == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
            for each in self._requests:
                each.kv_version = self.version
            return
        running = {each.request.name for each in self._requests.of(self._scheduler.running)}
        waiting = [each.request.name for each in self._requests if each.request.name not in running]
        # What waits could find entries of the old weights in the cache: it begins anew under the name of the new ones.
        for each in self._requests.remove(waiting):
            self._add(each)
