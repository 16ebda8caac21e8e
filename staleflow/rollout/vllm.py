# pyright: reportMissingImports=false
"""vLLM as a rollout engine, unpatched: its synchronous ``LLMEngine`` in this process, one step at a time.

Weights and requests change between two steps and nowhere else. So every token of a step was made by the version that
is held then, and the spans made here are exact. This is why asynchronous scheduling is off: with it, a batch is under
way between two steps, and its tokens would be stamped with weights that did not make them.

What is touched of vLLM, in 0.26 and in 0.32: ``add_request``, ``step``, ``abort_request``, ``collective_rpc``,
``reset_prefix_cache``, a subclass of its scheduler that counts, and a backend of its weight transfer. ::

    engine = make("models/tiny", EngineOptions(kv_tokens=65_536), tensor_parallel_size=2)
    engine.submit([Request("t1", 1, prompt=[5, 8, 13])])
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",  # among its warnings are some for each pull
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # instances share the cores with each other and the trainer
}.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from vllm.config import WeightTransferConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from staleflow.errors import line_of  # noqa: E402
from staleflow.model_json import read_json  # noqa: E402
from staleflow.rollout.device import DTYPES  # noqa: E402
from staleflow.rollout.engine import (  # noqa: E402
    EngineError,
    Lender,
    LendingSource,
    LoadWeights,
    Part,
    Reason,
    Request,
    Result,
    StepOutput,
    WeightSource,
)
from staleflow.rollout.model_folder import read_tensors  # noqa: E402
from staleflow.rollout.options import EngineOptions  # noqa: E402
from staleflow.rollout.refusals import refused  # noqa: E402
from staleflow.rollout.sequence import Sequence  # noqa: E402
from staleflow.rollout.stopping import StopStrings  # noqa: E402
from staleflow.rollout.vllm_plugin import BACKEND, register  # noqa: E402
from staleflow.types import Failed, InstanceState  # noqa: E402

BLOCK = 32
"""Blocks of KV memory have a multiple of this many tokens: vLLM's attention on CPUs has no others."""
ATTEMPTS = 8
"""How often the workers of an engine may find different versions, because one was pushed meanwhile."""
STUCK = 100
"""Steps in a row that compute nothing although there are requests: the engine will never continue."""


# Weights


@dataclass
class Init(WeightTransferInitInfo):
    version: int


@dataclass
class Update(WeightTransferUpdateInfo):
    source: Lender
    version: int


class PullEngine(WeightTransferEngine[Init, Update]):
    """In each worker of vLLM: pulls from the parameter server what this worker holds of the model.

    vLLM's own loaders split and fuse the tensors, which are read where they are. Everything happens in one call,
    because it is done again if the tensors were overwritten meanwhile."""

    init_info_cls = Init
    update_info_cls = Update
    version: int | None = None
    """None: of no certain version."""

    def init_transfer_engine(self, init_info: Init) -> None:
        self.version = init_info.version

    def receive_weights(self, update_info: Update) -> None:
        self.version = update_info.source.lend(self._load, update_info.version)

    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if version == self.version:
            return
        self.version = None
        if self.device.type == "cpu":
            self._forget_experts()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(self._complete(tensors))
            finalize_layerwise_reload(self.model, self.model_config)

    def _complete(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """On a CPU a head that is tied to the embeddings is a packed copy, and stays old if it is not named."""
        tied = self.device.type == "cpu" and getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        for name, tensor in tensors:
            yield name, tensor
            if tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", tensor

    def _forget_experts(self) -> None:
        """On a CPU, experts are packed when their kernel is made, and new weights would be taken for packed ones."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...

    def trainer_send_weights(self, *_: Any, **__: Any) -> None:  # 0.26 has it here
        raise NotImplementedError("the trainer pushes to the parameter server")


def _pull(worker: Any, source: Lender, version: int) -> int:
    """In a worker. Returns the version that it holds then."""
    worker.start_weight_update()
    worker.update_weights({"source": source, "version": version})
    worker.finish_weight_update()
    return worker.weight_transfer_engine.version


@dataclass(frozen=True)
class Copies:
    """A version in tensors of this process."""

    version: int
    tensors: Mapping[str, torch.Tensor]

    def lend(self, use: Any, at_least: int) -> int:  # noqa: ARG002
        use(self.version, iter(self.tensors.items()))
        return self.version


# Steps


class CountingScheduler(Scheduler):
    """vLLM's scheduler, which also counts what the latest step computes."""

    decoding = context = prefilled = preempted = 0

    def schedule(self, *arguments: Any, **more: Any) -> Any:
        output = super().schedule(*arguments, **more)
        self.decoding = self.context = self.prefilled = 0
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            before = request.num_computed_tokens - count
            if before + 1 == request.num_tokens:
                self.decoding += 1
                self.context += before
            else:
                self.prefilled += count
        self.preempted += len(output.preempted_req_ids or ())
        return output


@dataclass(slots=True)
class _Held:
    sequence: Sequence
    key: str
    """Its name in vLLM, which does not refuse a name twice."""
    id: str = ""
    """Its name inside vLLM's scheduler."""


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
        self._held: dict[str, _Held] = {}
        self._by_key: dict[str, _Held] = {}
        self._count = 0
        self._idle = 0
        self._returned: list[Result] = []
        self._failed: list[Failed] = []
        self._last: tuple[int, int, float] | None = None
        self._copies: dict[str, torch.Tensor] | None = None
        self._pulled = self._closed = False
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"version": version}})

    @property
    def preempted(self) -> int:
        """How often a sequence had to give way for lack of memory, or was computed again after a pull."""
        return self._scheduler.preempted

    @property
    def busy(self) -> bool:
        return bool(self._held or self._returned or self._failed)

    def submit(self, requests: Many[Request]) -> None:
        for request in requests:
            problem = refused(request, self._held, self._vocabulary, self.capacity, self._stops.available)
            if problem is not None:
                self._failed.append(Failed(request.name, request.epoch, problem))
                continue
            self._add(Sequence(request))

    def interrupt(self, names: Many[str]) -> None:
        self._returned += [self._result(each.sequence, "interrupted") for each in self._take_out(names)]

    def abort(self, names: Many[str]) -> None:
        self._take_out(names)

    def step(self) -> StepOutput:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        finished: list[Result] = []
        made, counts = 0, self._scheduler
        counts.decoding = counts.context = counts.prefilled = 0
        if self._held:
            began = time.perf_counter()
            try:
                outputs = self._llm.step()
            except Exception as error:  # whatever vLLM raises, it does not continue after it
                raise EngineError(f"vLLM failed in a step ({line_of(error)}): start the instance again") from error
            for output in outputs:
                made += self._take_in(output, finished)
            self._idle = 0 if counts.decoding or counts.prefilled else self._idle + 1
            if self._idle > STUCK:
                raise EngineError(f"vLLM computed nothing in {STUCK} steps: start the instance again")
            if counts.decoding and not counts.prefilled:
                self._last = (counts.decoding, counts.context, time.perf_counter() - began)
        output = StepOutput(finished, self._returned, self._failed, made, counts.prefilled, counts.context)
        self._returned, self._failed = [], []
        return output

    def peek(self, name: str, start: int) -> Part | None:
        held = self._held.get(name)
        return None if held is None else held.sequence.part(start, self.version)

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        """Load new weights into vLLM. On an error of the source, they are of no certain version."""
        lends = self._copies is None and isinstance(source, LendingSource)
        lender = cast(Lender, source) if lends else self._copied(source, version)
        held: set[int] = set()
        for _ in range(ATTEMPTS):
            held = set(self._llm.collective_rpc(_pull, args=(lender, max(version, *held, -1))))
            if len(held) == 1:
                break
        else:
            raise EngineError(f"the workers hold versions {held} of the weights: push less often")
        (now,) = held
        self._pulled = True
        if now != self.version:
            for each in self._held.values():
                each.sequence.close_span(self.version)
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
        entries = {each.id: each.sequence.kv_version for each in self._held.values()} if requests else {}
        return InstanceState(
            version=self.version,
            running=running,
            waiting=waiting,
            context=sum(request.num_tokens for request in requests),
            kv_free=self._pool.get_num_free_blocks() * self._block,
            kv_total=(self._pool.num_gpu_blocks - 1) * self._block,  # one is never used
            max_running=self.options.max_running,
            kv_version=min((entries[request.request_id] for request in requests), default=self.version),
            step=self._last,
        )

    def close(self) -> None:
        if not self._closed:
            self.abort(list(self._held))
            self._closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        self._llm.engine_core.shutdown()

    def _add(self, sequence: Sequence) -> None:
        request, sampling = sequence.request, sequence.request.sampling
        self._count += 1
        held = _Held(sequence, f"{request.name}#{self._count}")
        prompt = TokensPrompt(prompt_token_ids=list(sequence.tokens))
        if self.options.kv_on_pull == "keep":  # entries of other weights are there, and must not be found
            prompt["cache_salt"] = str(self.version)
        sequence.kv_version = self.version
        held.id = self._llm.add_request(
            held.key,
            prompt,
            SamplingParams(
                max_tokens=sequence.limit - len(sequence.tokens),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=_seed(sequence),
                stop_token_ids=list(sampling.stop_tokens),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        self._held[request.name] = self._by_key[held.key] = held

    def _forget(self, name: str) -> _Held:
        held = self._held.pop(name)
        del self._by_key[held.key]
        return held

    def _take_out(self, names: Many[str]) -> list[_Held]:
        found = [self._forget(name) for name in dict.fromkeys(names) if name in self._held]
        if found:
            self._llm.abort_request([each.key for each in found])
        return found

    def _take_in(self, output: Any, finished: list[Result]) -> int:
        """Append what a request drew; let it leave if it ends with that. Returns how many tokens they were."""
        held = self._by_key.get(output.request_id)
        if held is None:
            return 0
        sequence, drawn = held.sequence, output.outputs[0]
        reason: Reason | None = None
        for token, logprobs in zip(drawn.token_ids, drawn.logprobs, strict=True):
            logprob = logprobs[token].logprob
            if not math.isfinite(logprob):
                self._fail(held, output.finished)
                return 0
            sequence.append(token, logprob)
            if (reason := self._ended(sequence, token)) is not None:
                break
        if reason is None and output.finished:
            reason = "capacity"
        if reason is not None:
            self._forget(sequence.request.name)
            if not output.finished:
                self._llm.abort_request([held.key])
            finished.append(self._result(sequence, reason))
        return len(drawn.token_ids)

    def _ended(self, sequence: Sequence, token: int) -> Reason | None:
        if token in sequence.stops:
            return "stop"
        if sequence.request.sampling.stop_strings and self._stops.hit(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else None

    def _fail(self, held: _Held, gone: bool) -> None:
        request = self._forget(held.sequence.request.name).sequence.request
        if not gone:
            self._llm.abort_request([held.key])
        message = (
            f"request {request.name}: the model gave logits that are not finite numbers in version {self.version} of "
            "the weights"
        )
        self._failed.append(Failed(request.name, request.epoch, message))

    def _result(self, sequence: Sequence, reason: Reason) -> Result:
        return sequence.result(reason, self.version)._replace(kv_version=sequence.kv_version)

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
            for each in self._held.values():
                each.sequence.kv_version = self.version
            return
        running = {request.request_id for request in self._scheduler.running}
        # What waits could find entries of the old weights in the cache: it begins anew under the name of the new ones.
        for waiting in self._take_out([name for name, each in self._held.items() if each.id not in running]):
            self._add(waiting.sequence)


def _seed(sequence: Sequence) -> int:
    """For vLLM's generator, which begins anew with each request: another one after each interruption, or the same
    numbers would be used again."""
    if not sequence.generated:
        return sequence.seed >> 1
    seed = f"{sequence.seed} {sequence.generated}".encode()
    return int.from_bytes(blake2b(seed, digest_size=8).digest(), "little") >> 1


# Start


def start(folder: str | Path, options: EngineOptions, arguments: Mapping[str, Any]) -> LLMEngine:
    """vLLM with a model, its KV memory as given by the options and not by what the device has."""
    register()
    size = -(-options.page_size // BLOCK) * BLOCK
    blocks = options.kv_tokens // size
    if not blocks:
        raise EngineError(f"kv_tokens={options.kv_tokens} is less than one block of {size} tokens: give more")
    on_cpu, longest = options.device == "cpu", min(_positions(Path(folder)), blocks * size)
    settings: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "load_format": "dummy" if options.weights == "random" else "safetensors",
        "max_model_len": longest,
        "max_num_seqs": options.max_running,
        # On a CPU, seeds of requests and prompts in parts together make vLLM fail.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(options.prefill_tokens + options.max_running, longest if on_cpu else 0),
        "block_size": size,
        "num_gpu_blocks_override": blocks + 1,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduler_cls": CountingScheduler,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    fixed = settings.keys() & arguments.keys()
    if fixed:
        raise EngineError(
            f"rollout.engine_arguments.{min(fixed)} is set by the other settings of rollout: leave it out"
        )
    settings |= {"enforce_eager": on_cpu, **arguments}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if on_cpu and settings["enforce_eager"]:
        torch.compiler.set_stance("force_eager")  # its sampler would be compiled in the first step, for up to a minute
    try:
        config = EngineArgs(**settings).create_engine_config()
        model, parallel = config.model_config, config.parallel_config
        layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
        entry = 2 * layers * heads * model.get_head_size() * DTYPES[options.dtype].itemsize
        config.cache_config.kv_cache_memory_bytes = (blocks + 1) * size * entry
        llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except Exception as error:  # vLLM raises many kinds
        raise EngineError(f"vLLM cannot run {folder} ({line_of(error)}): change the model or the settings") from error
    if llm.vllm_config.scheduler_config.async_scheduling:
        raise EngineError("vLLM schedules ahead, so that tokens would have the wrong version: use another release")
    return llm


def _positions(folder: Path) -> int:
    """Tokens of the longest sequence that the model was made for."""
    found = read_json(folder / "config.json")
    places = (found, *(each for each in found.values() if isinstance(each, dict)))
    return next((each["max_position_embeddings"] for each in places if "max_position_embeddings" in each), 2**31)


def make(model_folder: str | Path, options: EngineOptions, **arguments: Any) -> VllmEngine:
    """The engine of an instance, which has pulled no version yet. ``arguments``: further ones of vLLM's."""
    return VllmEngine(start(model_folder, options, arguments), model_folder, options, version=-1)
