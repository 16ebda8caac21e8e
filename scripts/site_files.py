"""For ``mkdocs``: files of the repository that pages link to are part of the site, and its home is the README.

A page under ``docs/`` may link to any file beside it, such as a bench script or the licence, as it is read on a code
host. The site has these under ``repository/``: Markdown as pages, everything else as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOME = ROOT / "README.md"
REPOSITORY = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Whatever is linked to, starting from the pages, and from what these link to."""
    known = {file.src_uri for file in files}
    pages = [HOME, *sorted(DOCS.rglob("*.md"))]
    while pages:
        page = pages.pop()
        uri = place_of(page)
        if uri not in known:
            files.append(File.generated(config, uri, content=page.read_text()))
            known.add(uri)
        for target in targets(page):
            if place_of(target) in known:
                continue
            if target.suffix == ".md":
                pages.append(target)
            else:
                known.add(place_of(target))
                files.append(File.generated(config, place_of(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:  # noqa: ARG001
    """Links as they are between the places of the site."""
    source = source_of(page.file.src_uri)
    depth = page.file.src_uri.count("/")

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if "://" in link[2] or not target.is_file():
            return link[0]
        return f"{link[1]}{'../' * depth}{place_of(target)}{link[3] or ''}{link[4]}"

    return LINK.sub(moved, markdown)


def targets(page: Path) -> list[Path]:
    """Files that a page links to."""
    links = [(page.parent / path).resolve() for _, path, _, _ in LINK.findall(page.read_text()) if "://" not in path]
    return [path for path in links if path.is_file()]


def place_of(file: Path) -> str:
    """Where a file of the repository is on the site."""
    if file == HOME:
        return "index.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"{REPOSITORY}/{file.relative_to(ROOT).as_posix()}"


def source_of(uri: str) -> Path:
    """The file of the repository that is at this place."""
    if uri == "index.md":
        return HOME
    inside, _, path = uri.partition("/")
    return ROOT / path if inside == REPOSITORY else DOCS / uri
