"""The examples, and the script and the file of the README, run in small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_chat, save_tiny

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = (
    "steps=2", "groups=2", "group_size=2", "rollout.instances=1", "rollout.max_tokens=8", "rollout.kv_tokens=2048",
    "evaluation.problems=4", "evaluation.every=1", "processes.standby=false", "strategies.headroom=0",
)  # fmt: skip
ON_CPU = ("data.max_prompt_tokens=128", "rollout.device=cpu", "training.device=cpu", "rollout.dtype=float32")
README = re.findall(r"^```(python|yaml)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
BLOCKS = dict(reversed(README))
"""The first of each kind."""


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"))


def in_small(folder: Path, model: Path) -> list[str]:
    return [*SMALL, f"model={model}", f"runs={folder}", f"cache={folder}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_data", "own_reward", "lora"])
def test_an_example_with_a_chat_model(name: str, chat: Path, tmp_path: Path) -> None:
    said = run([sys.executable, f"{name}.py", *in_small(tmp_path, chat), "data.max_prompt_tokens=128"], EXAMPLES)
    assert "step 2/2" in said
    if name == "own_reward":
        assert re.search(r"^step 1: reward \d", said, re.MULTILINE)
    else:
        assert said.rstrip().endswith("checkpoints/best")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resume", "simulate_then_train", "custom_loss"])
def test_an_example_with_the_embedded_task(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    words = [*in_small(tmp_path, model), "reward.function=tests.runtime.local.rewards:evenness"]
    said = run([sys.executable, f"{name}.py", *words], EXAMPLES).splitlines()
    last = said[-1].split()
    if name == "resume":
        assert last[-1] == "True"
        assert any("step 12/12" in line for line in said)
    else:
        assert float(last[-1]) >= 0


def test_the_script_of_the_readme_has_at_most_15_lines_and_trains(chat: Path, tmp_path: Path) -> None:
    script = BLOCKS["python"]
    assert len(script.splitlines()) <= 15
    small = ", ".join(f'"{each}"' for each in [*in_small(tmp_path / "runs", chat), *ON_CPU])
    script, changed = re.subn(r'("model=[^"]+".*)\]', rf"\1, {small}]", script)
    assert changed == 1
    (tmp_path / "train.py").write_text(script)
    questions(tmp_path)
    assert "checkpoints/best" in run([sys.executable, "train.py"], tmp_path).splitlines()[-1]


@pytest.mark.slow
def test_the_file_of_the_readme_has_at_most_15_lines_and_trains(chat: Path, tmp_path: Path) -> None:
    assert len(BLOCKS["yaml"].splitlines()) <= 15
    (tmp_path / "run.yaml").write_text(BLOCKS["yaml"])
    (tmp_path / "my_reward.py").write_text((EXAMPLES / "my_reward.py").read_text())
    questions(tmp_path)
    words = [*in_small(tmp_path / "runs", chat), *ON_CPU]
    assert "step 2/2" in run([sys.executable, "-m", "staleflow", "train", "run.yaml", *words], tmp_path)


def questions(folder: Path) -> None:
    (folder / "train.jsonl").write_text((EXAMPLES / "questions.jsonl").read_text())
