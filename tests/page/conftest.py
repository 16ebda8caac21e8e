"""A browser for the tests of the page: Debian's Chromium by Playwright. Where there is none, they say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDS = "make test-page installs what is missing"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For a module, not longer: Playwright keeps an event loop running, beside which no other can run."""
    playwright = pytest.importorskip("playwright.sync_api", reason=f"Playwright is not installed: {NEEDS}")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as started:
        try:  # Debian's, or the one that Playwright has installed
            found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip(f"there is no Chromium on this machine: {NEEDS}")
        yield found
        found.close()


@pytest.fixture
def picture() -> Any:
    """Keeps a screenshot for the documentation if ``PICTURES`` names a folder."""

    def keep(page: Any, name: str) -> None:
        if folder := os.environ.get("PICTURES"):
            page.wait_for_timeout(500)
            page.screenshot(path=Path(folder) / f"dash-{name}.png")

    return keep
