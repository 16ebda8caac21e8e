"""Speculation by vLLM's own settings: several tokens in one step, each with the version that accepted it.

Greedy, because vLLM 0.32.0 for CPUs does not set the temperature of drafted tokens. In a process of its own, with one
engine: after one that speculates by n-grams, it starts no other (its search for kernels fails on a module of numba)."""

from pathlib import Path
from typing import Any

import pytest

from staleflow.cli import main
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.conformance.engines import VLLM_DEVICE
from tests.vllm.test_operations import walk

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

METHOD = "ngram" if VLLM_DEVICE == "cpu" else "ngram_gpu"
NGRAM = {"method": METHOD, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Drafts are what the sequence has said before: right until the next pull, and wrong after it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.mark.slow
@pytest.mark.parametrize("on_pull", ["recompute", "keep"])
def test_tokens_drafted_under_old_weights_are_stamped_by_those_that_accepted_them(
    on_pull: Any, folder: Path, store: LocalParameterServer, capfd: pytest.CaptureFixture[str]
) -> None:
    said = walk(on_pull, 800, folder, store, engines=1, temperature=0.0, speculative_config=NGRAM)
    with capfd.disabled():
        print(f"\n{said}")
    assert " 0 steps with several" not in said


def test_speculation_that_would_draw_wrongly_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "--dry-run", "rollout.engine=vllm", f"rollout.engine_arguments.speculative_config={NGRAM}"]) == 2
    )
    assert "speculates with a temperature that it does not set" in capsys.readouterr().err
