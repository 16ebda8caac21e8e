"""What docs/agents.md shows can be run."""

import re
from pathlib import Path

import pytest

from tests.tiny_models import save_chat

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_the_block_about_the_renderer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_chat(tmp_path / "models" / "chat")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"^<!-- run by tests/agents/test_page.py -->\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    names: dict[str, object] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    renderer, held = names["renderer"], names["held"]
    text = renderer.words.decode(held)  # pyright: ignore[reportAttributeAccessIssue]
    assert text == "[user] 2+2?<end>[assistant] 4<end>[user] Sure?<end>[assistant] "
