"""What has no tensors loads no PyTorch: a control plane that takes the place of a dead one must be there at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.tasks.options import ADDER, CALCULATOR
from staleflow.tasks.recipes import CalculatorRecipe, Recipe

HEAVY = {"torch", "transformers", "safetensors"}
CONTROL = (
    "from staleflow import cli\n"
    "from staleflow.commands import train\n"
    "from staleflow.observe.terminal import TerminalView\n"
    "from staleflow.runtime.local.patience import run_patiently\n"
    "from staleflow.runtime.local.run import LocalRun\n"
    "from staleflow.runtime.local.status import status_of\n"
    "from staleflow.runtime.ray import site\n"
    "from staleflow.tasks.opening import model_folder\n"
    "assert model_folder(sys.argv[1], sys.argv[2]).is_dir()\n"
)
PAGE = "from staleflow.commands import dash\nfrom staleflow.dash import server\n"


def loaded(code: str, *words: str) -> str:
    """The heavy packages that a program has loaded in the end."""
    code = f"import sys\n{code}print(*({HEAVY!r} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.processes
@pytest.mark.parametrize("model", [ADDER, CALCULATOR])
def test_a_control_plane_does_not_wait_for_pytorch(model: str, tmp_path: Path) -> None:
    """It did, for the names of two stores and of a base model that was there."""
    for recipe in (Recipe(), CalculatorRecipe()):
        recipe.folder(tmp_path).mkdir()
    assert loaded(CONTROL, model, str(tmp_path)).strip() == ""


@pytest.mark.processes
def test_the_live_page_does_not_wait_for_pytorch() -> None:
    assert loaded(PAGE).strip() == ""
