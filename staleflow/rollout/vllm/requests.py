# pyright: reportMissingImports=false
"""The requests that vLLM holds for us: how ours become its, and what they draw.

Tokens are kept here, because vLLM does not return those of a request that is aborted; so an interrupted request has
all of them, and one that is resumed is a new one with a longer prompt. Steps are taken from vLLM's core: what its
``LLMEngine`` makes of their outputs (texts, dictionaries of log-probabilities) is not needed, and costs. ::

    requests = Requests(llm, StopStrings(folder))
    requests.add(Sequence(request), cached_as=None)
    step = requests.step()          # what ended, what failed, how many tokens were drawn
    sequences = requests.remove(["t1"])
"""

import math
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from staleflow.rollout.engine import Reason
from staleflow.rollout.sequence import Sequence
from staleflow.rollout.stopping import StopStrings


class Step(NamedTuple):
    ended: list[tuple[Sequence, Reason]]
    failed: list[Sequence]
    """Whose logits are not finite numbers."""
    made: int


class Requests:
    def __init__(self, llm: LLMEngine, stops: StopStrings) -> None:
        self._core = llm.engine_core
        self._inputs = llm.input_processor
        self._tasks = llm.get_supported_tasks()
        self._stops = stops
        self._keys: dict[str, str] = {}
        """By our name, the one in vLLM, which does not refuse a name twice."""
        self._held: dict[str, Sequence] = {}
        """By the name in vLLM."""
        self._count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held.values())

    def get(self, name: str) -> Sequence | None:
        return self._held[self._keys[name]] if name in self._keys else None

    def of(self, scheduled: Iterable[Any]) -> list[Sequence]:
        """Those of requests in vLLM's scheduler."""
        return [self._held[each.request_id] for each in scheduled]

    def add(self, sequence: Sequence, cached_as: str | None) -> None:
        """``cached_as``: KV entries are shared only with requests that have the same here."""
        self._count += 1
        key = f"{sequence.request.name}#{self._count}"
        prompt = tokens_input(list(sequence.tokens), cache_salt=cached_as)
        request = self._inputs.process_inputs(key, prompt, _parameters(sequence), supported_tasks=self._tasks)
        self._core.add_request(request)
        self._keys[sequence.request.name] = key
        self._held[key] = sequence

    def remove(self, names: Iterable[str]) -> list[Sequence]:
        """Those of them that are here."""
        keys = [self._keys.pop(name) for name in dict.fromkeys(names) if name in self._keys]
        self._core.abort_requests(keys)
        return [self._held.pop(key) for key in keys]

    def step(self) -> Step:
        """Compute one step of vLLM, and take in what it drew."""
        ended: list[tuple[Sequence, Reason]] = []
        failed: list[Sequence] = []
        before_their_end: list[str] = []
        made = 0
        for output in self._core.get_output().outputs:
            sequence = self._held.get(output.request_id)
            if sequence is None:
                continue
            known = len(sequence.tokens)
            reason = self._take_in(sequence, output)
            made += len(sequence.tokens) - known
            if reason is None:
                continue
            if reason == "failed":
                failed.append(sequence)
            else:
                ended.append((sequence, reason))
            del self._held[self._keys.pop(sequence.request.name)]
            if output.finish_reason is None:
                before_their_end.append(output.request_id)
        self._core.abort_requests(before_their_end)
        return Step(ended, failed, made)

    def _take_in(self, sequence: Sequence, output: Any) -> Reason | Literal["failed"] | None:
        """Append what a request drew: one token, or several by speculation. Returns why it ends with that, if so."""
        for token, logprob in zip(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist(), strict=True):
            if not math.isfinite(logprob):
                return "failed"
            sequence.append(token, logprob)
            if token in sequence.stops:
                return "stop"
            if sequence.request.sampling.stop_strings and self._stops.hit(sequence):
                return "stop"
            if len(sequence.tokens) >= sequence.limit:
                return "length"
        return None if output.finish_reason is None else "capacity"


def _parameters(sequence: Sequence) -> SamplingParams:
    sampling = sequence.request.sampling
    return SamplingParams(
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
    )


def _seed(sequence: Sequence) -> int:
    """For vLLM's generator, which begins anew with each request: another one after each interruption, or the same
    numbers would be used again."""
    if not sequence.generated:
        return sequence.seed >> 1
    seed = f"{sequence.seed} {sequence.generated}".encode()
    return int.from_bytes(blake2b(seed, digest_size=8).digest(), "little") >> 1
