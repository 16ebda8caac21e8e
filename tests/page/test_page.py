"""The page in a real browser: a run that grows, one trajectory, samples, a server that goes and comes back, how it
looks on a phone and in the dark, and whether everybody can use it.

Without a browser these tests are skipped; ``make test-page`` installs one. ``PICTURES=docs/pictures`` keeps the
screenshots that the documentation shows.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.dash.run_view import RunView
from staleflow.dash.server import Dash
from staleflow.run.directory import RunDirectory
from staleflow.simulate import faults
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import setting_of
from tests.dash.recorded import sample, write_samples
from tests.page.growing import Growing

STEPS, INSTANCES, GROUPS, SIZE, BOUND = 8, 8, 24, 8, 2
DESK, PHONE = {"width": 1200, "height": 780}, {"width": 390, "height": 800}
VIEWS = ("now", "timeline", "learning", "staleness", "samples", "trajectories", "compare")
SECONDS = 20_000
"""Milliseconds that a browser on a busy machine may take for what takes it one tenth of a second."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """With faults, so that trajectories move and instances die."""
    base = setting_of(load(PAPER, []), PAPER)
    setting = replace(base, steps=STEPS, instances=INSTANCES, groups=GROUPS, group_size=SIZE, staleness=BOUND)
    cluster = Cluster(setting, seed=11)
    faults.arm(cluster, 6)
    directory = RunDirectory.at(tmp_path_factory.mktemp("runs") / "recorded", load(PAPER, [f"steps={STEPS}"]))
    recording = Recording(cluster, directory)
    with ThreadPoolExecutor(1) as other:  # Playwright runs an event loop in this one
        other.submit(cluster.run).result()
    recording.close({})
    said = [(f"What is {n} + {n}?", f"First {n}, then {n} again. The answer is {2 * n}.") for n in range(40)]
    write_samples(directory, [sample(at // 5, f"p{at}/0", *each) for at, each in enumerate(said)])
    return directory


@contextmanager
def served(*directories: RunDirectory, port: int = 0) -> Iterator[Dash]:
    views = [RunView(at, each, load(str(each.config_file), [])) for at, each in enumerate(directories)]
    with Dash(views, port=port) as dash:
        thread = threading.Thread(target=dash.serve, daemon=True)
        thread.start()
        yield dash
        dash.stop()
        thread.join(10)


@pytest.fixture(scope="module")
def finished(recorded: RunDirectory) -> Iterator[Dash]:
    with served(recorded, recorded) as dash:
        yield dash


@contextmanager
def opened(browser: Any, url: str, **how: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong unnoticed."""
    context = browser.new_context(**{"viewport": DESK, "color_scheme": "light", **how})
    page = context.new_page()
    page.set_default_timeout(SECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url.split("#")[0]) else wrong.append(request.url))
    page.goto(url)
    yield page
    context.close()
    assert not wrong, wrong


@pytest.fixture
def growing(recorded: RunDirectory, tmp_path: Path) -> Iterator[Growing]:
    with ExitStack() as held:
        growing = Growing(recorded, tmp_path / "live", (GROUPS, BOUND, 0, SIZE, 0))
        held.enter_context(growing.directory.owned())  # it looks alive
        held.callback(growing.close)
        yield growing


def test_the_buffers_of_a_live_run_fill_before_the_eyes(browser: Any, growing: Growing, picture: Any) -> None:
    growing.grow(400)
    with served(growing.directory) as dash, opened(browser, dash.url) as page:
        page.wait_for_selector("#state.running")
        page.wait_for_selector(".buffer .cell.decoding")
        before = page.locator(".buffers, .card").nth(1).inner_html()
        complete = page.locator(".buffer .cell.complete, .buffer .cell.trained").count()
        for _ in range(60):
            growing.grow(150)
            page.wait_for_function("(before) => document.querySelectorAll('.card')[1].innerHTML !== before", arg=before)
            before = page.locator(".card").nth(1).inner_html()
            if page.locator(".buffer .cell.complete").count() > complete + 6 and page.locator(".cell.trained").count():
                break
        else:
            raise AssertionError("no group was seen to become complete")
        assert page.locator("text=waits for").count()
        picture(page, "now")


def test_the_step_count_follows_the_run_to_its_end(browser: Any, growing: Growing) -> None:
    growing.grow(100)
    with served(growing.directory) as dash, opened(browser, dash.url) as page:
        page.wait_for_selector("progress")
        while not growing.over:
            growing.grow(3000)
        page.wait_for_function(f"() => document.querySelector('progress')?.value === {STEPS}")


def test_one_trajectory_can_be_followed_from_the_list(browser: Any, finished: Dash, picture: Any) -> None:
    with opened(browser, f"{finished.url}#trajectories/0") as page:
        page.wait_for_selector("tbody a")
        rows = finished.views[0].index.trajectories(state="trained", limit=5000)[0]
        moved = max(rows, key=lambda row: (row.places, (row.newest or 0) - (row.oldest or 0)))
        page.fill("#name", moved.name)
        page.wait_for_function("(name) => document.querySelector('tbody a')?.textContent === name", arg=moved.name)
        page.click(f"tbody a:text-is('{moved.name}')")
        page.wait_for_selector(f"h2:has-text('Trajectory {moved.name}')")
        assert page.locator(".stay").count() == moved.places + 1
        text = page.locator("ol.events").inner_text()
        for said in ("drawn", "sent to", "scored", "its group is complete", f"trained at step {moved.step}"):
            assert said in text, said
        picture(page, "trajectory")


def test_samples_are_searched_while_typing(browser: Any, finished: Dash, picture: Any) -> None:
    with opened(browser, f"{finished.url}#samples/0") as page:
        page.wait_for_selector(".sample")
        page.fill("#q", "answer is 34")
        page.wait_for_function("() => document.querySelectorAll('.sample').length === 1")
        assert page.locator("mark").first.inner_text() == "answer is 34"
        assert page.locator(".span").count() == 2  # tokens of two versions
        page.fill("#q", "")
        page.fill("#step", "3")
        page.wait_for_function("() => document.querySelectorAll('.sample').length === 5")
        picture(page, "samples")


def test_the_timeline_zooms_and_pans_by_keys_wheel_and_buttons(browser: Any, finished: Dash, picture: Any) -> None:
    with opened(browser, f"{finished.url}#timeline/0") as page:
        window = page.locator("section .muted").first
        page.wait_for_function("() => document.querySelector('section .muted')?.textContent?.includes(' to ')")
        page.wait_for_timeout(300)
        picture(page, "timeline")
        every = window.inner_text()
        page.focus("#lanes")
        for act in (lambda: page.keyboard.press("+"), lambda: page.keyboard.press("ArrowRight"),
                    lambda: page.click("button[aria-label='Earlier']"), lambda: page.mouse.wheel(0, -300)):  # fmt: skip
            before = window.inner_text()
            page.hover("#lanes", position={"x": 400, "y": 36})
            act()
            page.wait_for_function("(old) => document.querySelector('section .muted')?.textContent !== old", arg=before)
        assert re.search(r"i\d|step|·", page.locator(".readout").inner_text())
        page.focus("#lanes")
        page.keyboard.press("0")
        page.wait_for_function("(old) => document.querySelector('section .muted')?.textContent === old", arg=every)


def test_the_page_survives_a_restart_of_the_server(browser: Any, growing: Growing) -> None:
    growing.grow(500)
    with ExitStack() as held:
        dash = held.enter_context(served(growing.directory))
        page = held.enter_context(opened(browser, dash.url))
        page.wait_for_selector("#state.running")
        step = "document.querySelector('.buffer b').textContent"
        page.wait_for_selector(".buffer b")
        before = page.evaluate(step)
        dash.stop()
        dash.__exit__()
        page.wait_for_selector("#state.away")
        while not growing.over:
            growing.grow(3000)
        with served(growing.directory, port=dash.port):
            page.wait_for_selector("#state.running")
            page.wait_for_function(f"() => {step} !== '{before}'")


def test_it_is_dark_where_the_system_is_and_by_the_button(browser: Any, finished: Dash, picture: Any) -> None:
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    with opened(browser, finished.url, color_scheme="dark") as page:
        page.wait_for_selector(".buffer")
        assert page.evaluate(shade) < 120
        page.click("nav a:has-text('Staleness')")
        page.wait_for_selector(".u-wrap")
        picture(page, "dark")
        page.click("#theme")
        assert page.evaluate(shade) > 600
        page.reload()
        page.wait_for_selector("nav a")
        assert page.evaluate(shade) > 600  # it is remembered


HEIGHTS = """(steps) => {
  const canvas = document.querySelector(".u-wrap canvas"), over = document.querySelector(".u-over");
  const ratio = devicePixelRatio, left = over.offsetLeft * ratio, top = over.offsetTop * ratio;
  const [width, height] = [over.offsetWidth * ratio, over.offsetHeight * ratio];
  return Array.from({ length: steps }, (_, step) => {
    const column = canvas.getContext("2d").getImageData(left + (width * (step + 0.5)) / steps, top, 1, height).data;
    const bright = Array.from({ length: height }, (_, y) => Math.max(...column.slice(4 * y, 4 * y + 3)) > 120);
    return bright.indexOf(true) / height;
  });
}"""


def test_every_step_is_drawn_as_high_as_it_is_the_last_one_too(browser: Any, finished: Dash) -> None:
    with opened(browser, f"{finished.url}#staleness/0", color_scheme="dark") as page:
        page.wait_for_selector(".u-wrap canvas")
        page.wait_for_timeout(300)
        drawn = [1 - top for top in page.evaluate(HEIGHTS, STEPS)]
    sums = [sum(row) for row in finished.views[0].staleness(300).ages.tokens]
    assert drawn == pytest.approx([each / (1.05 * max(sums)) for each in sums], abs=0.03)


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(browser: Any, finished: Dash, picture: Any, view: str) -> None:
    with opened(browser, f"{finished.url}#{view}/0", viewport=PHONE, has_touch=True, is_mobile=True) as page:
        page.wait_for_selector("#view > *")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        if view == "staleness":
            picture(page, "phone")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_is_no_serious_obstacle_to_anybody(browser: Any, finished: Dash, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make test-page")
    name = finished.views[0].index.trajectories(limit=1)[0][0].name
    with opened(browser, finished.url, color_scheme=scheme, bypass_csp=True) as page:
        for view in (*VIEWS, "trajectory"):
            page.goto(f"{finished.url}#{view}/0" + (f"/{name.replace('/', '%2F')}" if view == "trajectory" else ""))
            page.wait_for_selector("#view > *")
            page.wait_for_timeout(400)
            found = axe.Axe().run(page).response["violations"]
            grave = [each for each in found if each["impact"] in ("serious", "critical")]
            assert not grave, [(view, each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in grave]


def test_every_view_is_reached_by_the_keyboard_alone(browser: Any, finished: Dash) -> None:
    with opened(browser, finished.url) as page:
        page.wait_for_selector("nav a")
        for view in VIEWS[1:]:
            page.focus(f"nav a[data-view={view}]")
            page.keyboard.press("Enter")
            page.wait_for_function(f"() => document.querySelector('nav a[aria-current]').dataset.view === '{view}'")
            page.wait_for_selector("#view > *")


def test_what_a_model_writes_is_never_run(browser: Any, recorded: RunDirectory, tmp_path: Path) -> None:
    directory = Growing(recorded, tmp_path / "evil", (GROUPS, BOUND, 0, SIZE, 0))
    directory.grow(50)
    evil = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>"
    write_samples(directory.directory, [sample(0, "p0/0", evil, evil)])
    with served(directory.directory) as dash, opened(browser, f"{dash.url}#samples/0") as page:
        page.wait_for_selector(".sample")
        page.wait_for_timeout(200)
        assert "gone" not in page.title()
        assert page.locator("#view img, #view script").count() == 0
    directory.close()
