"""vLLM under Ray: the engine, or several processes of it, in a process below an actor."""

from pathlib import Path

import pytest

from staleflow.config.checks import check
from staleflow.observe.metrics import read_metrics
from tests.runtime.local.test_run import configured, run_once
from tests.vllm.conftest import KINDS
from tests.vllm.test_training import save

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytest.importorskip("ray", reason="Ray is not installed here: make test-vllm")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_below_an_actor_has_the_weights_that_are_trained(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = save(KINDS["qwen3, tied"], tmp_path / "model")
    words = ["runtime=ray", "rollout.engine=vllm", "steps=3", "rollout.instances=1"]
    if workers > 1:
        words.append(f"rollout.engine_arguments={{tensor_parallel_size: {workers}}}")
    config = configured(model, tmp_path, *words)
    check(config)
    summary, directory = run_once(config, model)
    assert summary["violations"] == 0
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["logprob_kl"] < 1e-6 for row in rows)  # at bound 0; other weights would differ
