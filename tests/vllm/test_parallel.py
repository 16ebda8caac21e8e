"""Tensor parallelism: vLLM's workers are processes, and each pulls its part by itself."""

import pickle
from pathlib import Path

import pytest

from staleflow.rollout.engine import LendingSource
from staleflow.rollout.options import EngineOptions
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.workers.roles import LazyWeights
from tests.conformance.engines import drained
from tests.vllm.conftest import model_of, weights_of
from tests.vllm.test_weights import ask, recomputed


def test_a_source_that_travels_to_a_worker_joins_the_store_there(tmp_path: Path) -> None:
    store = LocalParameterServer.create(f"vllm-travels-{tmp_path.name}")
    try:
        store.push(3, weights_of(model_of("llama", 0)))
        source = LazyWeights(f"vllm-travels-{tmp_path.name}")
        read: dict[str, int] = {}
        for each in (source, pickle.loads(pickle.dumps(source))):
            assert isinstance(each, LendingSource)
            assert each.lend(lambda version, tensors: read.update((name, version) for name, _ in tensors), 0) == 3
        assert read == dict.fromkeys(weights_of(model_of("llama", 0)), 3)
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_hold_one_version_after_each_pull(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
    from staleflow.rollout.vllm.engine import VllmEngine
    from staleflow.rollout.vllm.start import start

    models = [model_of("qwen3, tied", seed) for seed in range(3)]
    models[0].save_pretrained(tmp_path)
    options = EngineOptions(kv_tokens=1024, max_running=4, threads=1)
    engine = VllmEngine(start(tmp_path, options, {"tensor_parallel_size": 2}), tmp_path, options, version=0)
    name = f"vllm-parallel-{tmp_path.name}"
    store = LocalParameterServer.create(name)
    try:
        source = LazyWeights(name)
        asked = [ask(f"r{at}", 10 + 7 * at, 20) for at in range(4)]
        engine.submit(asked)
        for version in (1, 2):
            for _ in range(5):
                engine.step()
            store.push(version, weights_of(models[version]))
            assert engine.pull(source, version) == version
        ended = drained(engine)
    finally:
        engine.close()
        store.close()
    for each in asked:
        result = ended[each.name]
        assert result.spans == ((0, 5), (1, 5), (2, 10))
        assert result.logprobs == pytest.approx(recomputed(models, each, result), abs=2e-4)
