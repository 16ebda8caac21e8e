"""A mixture of experts. In a process of its own: vLLM makes what it needs for one only with the first engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.test_weights import (
    test_log_probabilities_after_each_pull_are_those_of_the_weights_that_were_pulled as log_probabilities_are_right,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


@pytest.mark.parametrize("on_pull", ["recompute", "keep"])
def test_log_probabilities_of_experts_are_those_of_the_weights_that_were_pulled(
    on_pull: str, tmp_path: Path, store: Any
) -> None:
    log_probabilities_are_right("experts", on_pull, "packed", tmp_path, store)
