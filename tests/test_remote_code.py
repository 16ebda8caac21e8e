"""Code that comes with a model is never run."""

import ast
from pathlib import Path

import pytest

import staleflow

FILES = [path for path in Path(staleflow.__file__).parent.rglob("*.py") if "from_pretrained" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_transformers_is_told_not_to_trust_remote_code(path: Path) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.startswith("Auto")
    ]
    for call in calls:
        said = ast.unparse(call)
        if any(keyword.arg is None for keyword in call.keywords):  # passed on in a mapping
            said += path.read_text()
        assert "trust_remote_code=False" in said or '"trust_remote_code": False' in said, f"{path}: {said}"


def test_there_are_such_calls() -> None:
    assert len(FILES) >= 4
