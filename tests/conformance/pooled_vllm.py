"""vLLM engines for tests: real ones, which another test has left if possible, because starting one takes a second.

On a GPU they are eager, because a start takes long otherwise, or with ``STALEFLOW_TEST_GRAPHS=1`` as in a run, compiled
and with CUDA graphs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

from staleflow.rollout.options import EngineOptions
from staleflow.rollout.vllm.engine import VllmEngine
from staleflow.rollout.vllm.start import start
from tests.conformance.engines import VLLM_DEVICE

EAGER = not os.environ.get("STALEFLOW_TEST_GRAPHS")
_free: dict[Any, list[Any]] = {}


class Pooled(VllmEngine):
    leave: finalize

    def _shut_down(self) -> None:
        self.leave()


def pooled(folder: Path, options: EngineOptions, version: int, **arguments: Any) -> Pooled:
    """An engine with the weights of the folder and no requests; when it is closed or forgotten, the next one is made of
    it."""
    options = replace(options, device=VLLM_DEVICE)
    if VLLM_DEVICE != "cpu":
        arguments = {"enforce_eager": EAGER} | arguments
    key = folder, replace(options, kv_on_pull="recompute"), repr(sorted(arguments.items()))  # the same to vLLM
    free = _free.setdefault(key, [])
    llm = free.pop() if free else start(folder, options, arguments)
    llm.engine_core.abort_requests(list(llm.engine_core.engine_core.scheduler.requests))
    llm.reset_prefix_cache(reset_running_requests=True)
    engine = Pooled(llm, folder, options, version=-2)
    engine.pull(lambda _: version, version)
    engine.leave = finalize(engine, free.append, llm)
    return engine
