"""What the documents say of the tree is true: links, figures of the front page, the citation, the ledger's example.

Code blocks of the README and of docs/extend.md, and command lines, are run or parsed by the tests of what they show.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import staleflow as sf
from staleflow.config.convert import leaves, to_tree

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
MEASURED = re.findall(r"^\|([^|]*)\|([^|]*)\| \[\w+\]\((docs/results/\w+\.md)\), `([^`]+)` \|$",
                      (ROOT / "README.md").read_text(), re.MULTILINE)  # fmt: skip


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}: no such file"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {name for name, _ in leaves(to_tree(sf.load("plain", "model=mine")))}
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    text = page.read_text()
    if page.name == "coming-from.md":  # whose first column has the names of others
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z_]+)(?![\w(/]|\.\w)", text)
    assert {each for each in named if not each.endswith((".md", ".py", ".svg", ".json"))} <= known


def test_every_setting_is_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import write_settings  # pyright: ignore[reportMissingImports]

    assert write_settings.TARGET.read_text() == write_settings.page(), "run python scripts/write_settings.py"


def test_the_front_page_shows_measured_results() -> None:
    assert len(MEASURED) >= 8


@pytest.mark.parametrize(("what", "result", "page", "script"), MEASURED, ids=lambda each: each.strip()[:30])
def test_a_figure_of_the_front_page_stands_on_its_page(what: str, result: str, page: str, script: str) -> None:
    text = (ROOT / page).read_text()
    for figure in re.findall(r"\d+(?:[.,]\d+)*", result):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", text), f"{what}: {page} has no {figure}"
    assert script.startswith("staleflow ") or (ROOT / script).is_file()
    assert script.split("/")[-1] in text, f"{page} does not say that {script} made it"


def test_the_citation_is_complete_and_of_this_version() -> None:
    cited: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what CFF requires"
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == sf.__version__
    assert cited["authors"] == [{"name": "The StaleFlow authors"}]
    [paper] = cited["references"]
    assert {"type", "title", "authors"} <= set(paper)
    assert paper["url"].endswith("/2601.12784")
    assert all(set(each) == {"family-names", "given-names"} for each in paper["authors"])


def test_the_changelog_begins_with_what_is_not_released() -> None:
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == "[Unreleased]"


def test_the_ledger_alone_works_as_the_page_of_the_protocol_shows() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/protocol.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block.replace("batch_size=128", "batch_size=1"), names)
    assert (names["batch"].groups, names["ledger"].version) == (["g7"], 1)
