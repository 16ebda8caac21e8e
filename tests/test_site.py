"""The documentation site: it builds without a warning, and every block of code in it is run, or says why it is not.

Above each block stands ``<!-- run by tests/... -->`` or ``<!-- not run: why -->``; ``text`` is for what is not code.
The blocks that name this file are run here, those of a page one after the other.
"""

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from staleflow.cli import main
from staleflow.config import load, to_yaml
from staleflow.run.directory import RunDirectory
from staleflow.run.samples import Sample
from tests.tiny_models import save_tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HERE = f"run by tests/{Path(__file__).name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_code_is_run_or_says_why_not(page: Path) -> None:
    for marker, language, code in BLOCK.findall(page.read_text()):
        if language == "text":
            continue
        assert language in ("python", "sh", "yaml"), f"a block without a language: {code[:60]!r}"
        kind, _, rest = marker.partition(" by " if marker.startswith("run") else ": ")
        assert (kind == "not run" and len(rest) > 10) or (kind == "run" and (ROOT / rest).is_file()), code[:60]


def run_of(folder: Path) -> None:
    """A run with a sample, as ``staleflow samples`` and ``runs`` show it."""
    run = RunDirectory(folder / "20261116-120000-laptop")
    run.path.mkdir(parents=True)
    run.config_file.write_text(to_yaml(load(None, [])))
    sample = Sample(0, "p0/0", "1+1", "2", 1.0, {}, ((0, 1),), tokens=1, cut=False)
    run.samples.write_bytes(msgspec.json.encode(sample) + b"\n")
    (folder / "latest").symlink_to(run.path.name)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if HERE in page.read_text()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "models" / "tiny")
    run_of(tmp_path / "runs")
    names: dict[str, object] = {}
    for marker, language, code in BLOCK.findall(page.read_text()):
        if marker != HERE:
            continue
        if language == "python":
            exec(compile(code, f"{page.name}: {code[:30]!r}", "exec"), names)
        for line in code.splitlines() if language == "sh" else ():
            assert main(shlex.split(line, comments=True)[1:]) == 0, line


def test_the_site_builds_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mkdocs = pytest.importorskip("mkdocs.commands.build", reason="make test installs mkdocs")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    mkdocs.build(config)
    assert not [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    outside = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?://""")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    assert not [page for page in pages if outside.search(page.read_text())], "nothing is loaded from elsewhere"
