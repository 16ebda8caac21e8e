"""``staleflow train --dash`` as a newcomer starts it: the page of a real run, while it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.page.test_page import opened

STEPS = 30


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_trains_is_followed_to_its_end(browser: Any, tmp_path: Path, picture: Any) -> None:
    words = ["train", f"steps={STEPS}", f"runs={tmp_path}", "--plain", "--dash", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "staleflow", *words], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert process.stdout is not None
    url = next(line.removeprefix("page: ").strip() for line in process.stdout if line.startswith("page: "))
    with opened(browser, url) as page:
        page.set_default_timeout(240_000)
        page.wait_for_selector("#state.running")
        page.wait_for_selector(".buffer .cell.decoding")
        page.wait_for_function("() => document.querySelector('progress')?.value >= 2")
        first = page.evaluate("() => document.querySelector('progress')?.value")
        page.wait_for_function("(first) => document.querySelector('progress')?.value > first + 2", arg=first)
        page.click("nav a[data-view=samples]")
        page.wait_for_selector(".sample .span")
        name = page.locator(".sample a").first.inner_text()
        page.fill("#q", name)
        page.wait_for_function("() => document.querySelectorAll('.sample').length === 1")
        page.click(".sample a")
        page.wait_for_selector(f"h2:has-text('Trajectory {name}')")
        assert "trained at step" in page.locator("ol.events").inner_text()
        page.click("nav a[data-view=learning]")
        page.wait_for_selector(".u-wrap canvas")
        made = "document.querySelector('.u-legend .u-value')?.textContent"  # the latest step in the first chart
        page.wait_for_function(f"() => Number({made}) >= {STEPS - 3}")
        picture(page, "learning")
        assert process.wait(timeout=240) == 0
        page.wait_for_selector("#state.away")  # it ends with the run; staleflow dash shows it again
