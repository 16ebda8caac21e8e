"""``sf.train`` in a real Jupyter kernel: ``pip install nbclient ipykernel datasets``, or these are skipped."""

from pathlib import Path

import pytest

from tests.tiny_models import save_chat

pytestmark = [pytest.mark.processes, pytest.mark.slow]
nbclient = pytest.importorskip("nbclient", reason="needs pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="needs pip install nbclient ipykernel")

SETTINGS = (
    "steps=2", "groups=2", "group_size=2", "rollout.instances=1", "rollout.max_tokens=8", "rollout.kv_tokens=2048",
    "evaluation.problems=4", "evaluation.every=1", "processes.standby=false", "data.chat=true",
    "data.max_prompt_tokens=64", "runs=runs", "cache=cache", "model=model",
)  # fmt: skip
FIRST = f"""
import staleflow as sf
config = sf.load("plain", {list(SETTINGS)})
rows = [{{"prompt": f"Say {{n}}", "answer": str(n)}} for n in range(20)]
seen = []

def correct(problem, response):
    return float(problem.facts["answer"] in response.text)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_chat(tmp_path / "model")
    return tmp_path


def notebook(folder: Path, *cells: str) -> list[str]:
    """What the cells printed, or the exceptions that they ended with."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (FIRST, *cells)])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(made, timeout=300, resources=resources, allow_errors=True).execute()
    return [
        "".join(out.get("text") or f"{out.get('ename')}: {out.get('evalue')}" for out in cell.outputs)
        for cell in made.cells[1:]
    ]


def test_a_run_in_a_kernel_with_a_function_and_a_data_set_of_the_notebook(folder: Path) -> None:
    pytest.importorskip("datasets", reason="needs pip install datasets")
    trained, gone, foreign = notebook(
        folder,
        """import datasets
data = datasets.Dataset.from_list(rows)
both = datasets.DatasetDict(train=data, test=datasets.Dataset.from_list([{"prompt": "Say 99", "answer": "99"}]))
result = sf.train(config, reward=correct, data=both, on_step=seen.append)
print(len(seen), result.run.name.endswith("-notebook"), result.best.is_dir())""",
        "sf.train(config, reward=correct, data='openai/no-such-data')",
        "sf.train(config, reward=lambda completions, answer, **rest: [1.0], data=rows)",
    )
    assert "data: 20 problems to train on, 1 held out" in trained
    assert trained.endswith("2 True True\n")
    *before, refusal = gone.splitlines()
    assert refusal.startswith("TaskError: openai/no-such-data (split train) is not in the cache and cannot be loaded")
    assert before == ["reads the data and tries the reward"], "nothing of what the hub's libraries try"
    assert "as TRL's rewards do" in foreign


def test_the_stop_button_of_a_notebook_ends_the_run_with_a_checkpoint(folder: Path) -> None:
    [stopped] = notebook(
        folder,
        f"""import os, signal
def stop(row):
    if row["step"] == 1:
        os.killpg(os.getpgid(0), signal.SIGINT)  # as the button does
try:
    sf.train(sf.load("plain", {[*SETTINGS, "steps=1000"]}), reward=correct, data=rows, on_step=stop)
except sf.Interrupted as stopped:
    print(2 <= stopped.result.summary["steps"] < 1000, stopped.result.checkpoint.is_dir())""",
    )
    assert stopped.endswith("True True\n")
