"""The page's server: what it answers, to whom, and that no answer is without a limit."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.dash import server
from staleflow.dash.run_view import RunView
from staleflow.dash.server import Dash
from staleflow.run.directory import RunDirectory
from tests.dash.recorded import recorded, sample, write_samples
from tests.refusals import refused

DOCS = Path(__file__).parents[2] / "docs/dash.md"


@contextmanager
def served(*directories: RunDirectory, token: str = "") -> Iterator[Dash]:
    views = [RunView(at, each, load(PAPER, ["steps=3"])) for at, each in enumerate(directories)]
    for view in views:
        while view.follow():
            pass
    with Dash(views, token=token) as dash:
        thread = threading.Thread(target=dash.serve, daemon=True)
        thread.start()
        yield dash
        dash.stop()
        thread.join(10)


@pytest.fixture(scope="module")
def dash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dash]:
    directory, _ = recorded(tmp_path_factory.mktemp("run") / "run", seed=2, broken=3)
    write_samples(directory, [sample(1, "p3/0", "What is 2+3?", "It is five.")])
    with served(directory, directory) as dash:
        yield dash


def get(dash: Dash, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{dash.port}{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(dash: Dash, path: str) -> Any:
    status, body = get(dash, path)
    assert status == 200, body
    return json.loads(body)


def test_every_endpoint_answers_and_is_documented(dash: Dash) -> None:
    text = DOCS.read_text()
    for path in dash.api.endpoints:
        assert f"`GET {path}`" in text, f"{path} is not described in docs/dash.md"
        ask(dash, path + ("?name=p0/0" if path == "/api/trajectory" else ""))
    assert "`GET /api/events`" in text


def test_a_run_that_is_removed_while_it_is_watched_takes_no_other_from_the_page(tmp_path: Path) -> None:
    removed, _ = recorded(tmp_path / "removed", seed=1)
    kept, _ = recorded(tmp_path / "kept", seed=2)
    with served(removed, kept) as dash:
        before = ask(dash, "/api/trajectories?run=0&limit=200")
        shutil.rmtree(removed.path)
        assert [each["name"] for each in ask(dash, "/api/runs")] == ["removed", "kept"]
        for path in dash.api.endpoints.keys() - {"/api/trajectory"}:
            for run in (0, 1):
                ask(dash, f"{path}?run={run}")
        assert ask(dash, "/api/trajectories?run=0&limit=200") == before


def test_a_run_whose_path_has_characters_of_an_address_is_shown(tmp_path: Path) -> None:
    (folder := tmp_path / "lr=1e-5?mode=x#2 50%41").mkdir()
    directory, _ = recorded(folder / "a<b>&'\n😀", seed=1)
    with served(directory) as dash:
        assert ask(dash, "/api/runs")[0]["trouble"] == ""
        name = ask(dash, "/api/trajectories?state=trained&limit=1")["trajectories"][0]["name"]
        assert ask(dash, f"/api/trajectory?name={name}")["events"]


def test_a_page_listens_on_an_address_of_ipv6_as_well() -> None:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6), Dash([], "::1") as dash:
        assert dash.url == f"http://[::1]:{dash.port}/"


@pytest.mark.parametrize(("host", "instead"), [("203.0.113.7", "--host"), ("127.0.0.1", "--port")])
def test_where_a_page_cannot_listen_it_says_what_to_change(host: str, instead: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert instead in refused(Dash, [], host, other.getsockname()[1]).partition("give")[2]


def asked_raw(dash: Dash, words: bytes) -> bytes:
    """The first line of the answer to a request that no browser makes."""
    with socket.create_connection(("127.0.0.1", dash.port), timeout=20) as line:
        line.sendall(words)
        return line.makefile("rb").readline().rstrip()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"GET http://[x/ HTTP/1.1\r\nHost: localhost", b"400"),
        (b"GET / HTTP/1.1\r\nHost: [", b"403"),
        (b"GET / HTTP/1.1\r\nHost: [::1", b"403"),
        (b"GET /" + b"a" * 300 + b".js HTTP/1.1\r\nHost: localhost", b"404"),
        (b"GET /../server.py HTTP/1.1\r\nHost: localhost", b"404"),
        (b"GET /api/now?run=\xff\xfe HTTP/1.1\r\nHost: localhost", b"400"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_without_a_traceback(
    dash: Dash, words: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status in asked_raw(dash, words + b"\r\n\r\n")
    assert capfd.readouterr().err == ""


def test_who_goes_away_before_asking_is_no_traceback(dash: Dash, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (b"", b"GET / HT", b"GET /api/learning HTTP/1.1\r\nHost: local"):
        line = socket.create_connection(("127.0.0.1", dash.port), timeout=20)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        line.sendall(words)
        line.close()
    ask(dash, "/api/runs")
    assert capfd.readouterr().err == ""


def connected(dash: Dash) -> socket.socket:
    return socket.create_connection(("127.0.0.1", dash.port), timeout=20)


def test_more_connections_than_the_page_can_bear_are_hung_up_on(tmp_path: Path) -> None:
    """It spun without a file left to open, and could not read the run any more either."""
    directory, _ = recorded(tmp_path / "run", seed=1)
    with served(directory) as dash, ExitStack() as stack:
        dash._http.most = 3  # pyright: ignore[reportPrivateUsage]
        for _ in range(3):
            stack.enter_context(connected(dash))
        assert stack.enter_context(connected(dash)).recv(1) == b""


def test_a_request_that_comes_byte_by_byte_does_not_keep_its_connection_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = recorded(tmp_path / "run", seed=1)
    with served(directory) as dash, connected(dash) as slow:
        monkeypatch.setattr(server, "TIMEOUT_S", 0.0)
        slow.sendall(b"GET /api/n")
        assert slow.recv(1) == b""


def test_a_page_that_could_not_open_a_file_follows_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = recorded(tmp_path / "run", seed=1)
    again, looks = threading.Event(), 0

    def follow(_: RunView) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        again.set()
        return False

    with Dash([RunView(0, directory, load(PAPER, ["steps=3"]))]) as dash:
        monkeypatch.setattr(RunView, "follow", follow)
        dash.looked_at = float("inf")
        threading.Thread(target=dash.serve, daemon=True).start()
        assert again.wait(20)
        dash.stop()


def test_who_asks_one_after_the_other_opens_the_index_once(dash: Dash) -> None:
    """Each thread had a connection of its own, whose files SQLite kept open as long as there was another."""
    before = len(dash.views[0].index._readers)  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        ask(dash, "/api/trajectories?run=0")
    assert len(dash.views[0].index._readers) <= max(1, before)  # pyright: ignore[reportPrivateUsage]


def test_one_trajectory_can_be_followed_from_its_prompt_to_its_step(dash: Dash) -> None:
    row = ask(dash, "/api/trajectories?state=trained&limit=1")["trajectories"][0]
    life = ask(dash, f"/api/trajectory?name={row['name']}")
    kinds = [kind for _, kind, _ in life["events"]]
    assert kinds[0] == "admit"
    for kind in ("reserve", "route", "generated", "score", "occupy"):
        assert kind in kinds, kind
    assert sum(count for stay in life["stays"] for _, count in stay["spans"]) == life["tokens"] == row["tokens"]
    assert life["step"] == row["step"]
    assert [name for name, *_ in life["members"]] == [f"{row['group']}/{each}" for each in range(4)]


def test_a_trajectory_that_moved_has_a_stay_on_each_instance(dash: Dash) -> None:
    rows = ask(dash, "/api/trajectories?limit=200")["trajectories"]
    moved = [row for row in rows if row["places"] > 1]
    assert moved, "no fault of this seed moved anything: take another"
    life = ask(dash, f"/api/trajectory?name={moved[0]['name']}")
    assert len(life["stays"]) == moved[0]["places"]
    assert all(stay["end"] is not None for stay in life["stays"])


def test_what_is_shown_of_the_past_adds_up(dash: Dash) -> None:
    now, staleness, learning = (ask(dash, f"/api/{each}") for each in ("now", "staleness", "learning"))
    assert now["info"]["step"] == 3
    assert now["tokens_trained"] == sum(map(sum, staleness["ages"]["tokens"]))
    assert sum(map(sum, staleness["ages"]["trajectories"])) == 3 * 24
    assert sum(trained for _, _, trained in staleness["lengths"]) == 3 * 24
    assert now["tokens_wasted"] == sum(staleness["wasted"].values())
    assert learning["series"]["step"] == [0, 1, 2]
    timeline = ask(dash, "/api/timeline?columns=50")
    assert [step for _, _, step, _, _ in timeline["trainer"]] == [0, 1, 2]
    assert {lane["name"] for lane in timeline["lanes"]} >= {"i0", "i1"}
    assert any(kind == "pull" for lane in timeline["lanes"] for _, kind, _, _ in lane["marks"])


@pytest.mark.parametrize(
    "path",
    ["now?run=2", "now?run=-1", "now?run=x", "learning?points=100000", "timeline?columns=0", "timeline?from=x",
     "timeline?to=1e99", "trajectories?limit=100000", "samples?before=-3", "samples?step=²",
     "trajectories?state=foo", "trajectories?state=Trained", "timeline?from=5&to=1"],
)  # fmt: skip
def test_impossible_parameters_are_refused_in_one_line(dash: Dash, path: str) -> None:
    status, body = get(dash, f"/api/{quote(path, safe='?=&')}")
    assert status == 400
    assert "give" in json.loads(body)["error"]


def test_what_is_not_there_is_said_so(dash: Dash) -> None:
    for path in ("/api/trajectory?name=p999/1", "/api/nothing", "/nothing.js", "/../server.py", "/%2e%2e/server.py"):
        assert get(dash, path)[0] == 404


def test_no_answer_grows_with_the_run(dash: Dash) -> None:
    """Whatever is asked for, within the limits of parameters."""
    for path in ("trajectories?limit=200", "timeline?columns=1000&lanes=128", "learning?points=2000", "now"):
        assert len(get(dash, f"/api/{path}")[1]) < 2_000_000


def test_a_website_cannot_read_along(dash: Dash) -> None:
    """A name that resolves to 127.0.0.1 is still another host."""
    assert get(dash, "/api/now", {"Host": "evil.example:80"})[0] == 403
    assert get(dash, "/api/now", {"Host": f"localhost:{dash.port}"})[0] == 200


def test_who_does_not_know_the_token_sees_nothing(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    with served(directory, token="abc123") as dash:
        for path in ("/", "/app.js", "/api/now", "/api/events", "/api/now?token=abc12"):
            assert get(dash, path)[0] == 401, path
        assert get(dash, "/api/now?token=abc123")[0] == 200
        assert get(dash, "/api/now", {"Authorization": "Bearer abc123"})[0] == 200
        assert get(dash, "/app.js", {"Cookie": "staleflow_token=abc123"})[0] == 200
        assert "token=abc123" in dash.url


def test_news_come_by_themselves(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    with (
        served(directory) as dash,
        urllib.request.urlopen(f"http://127.0.0.1:{dash.port}/api/events", timeout=20) as news,
    ):
        assert next_now(news)["info"]["heads"]["samples"] == 0
        write_samples(directory, [sample(1, "p3/0", "What is 2+3?", "It is five.")])
        assert next_now(news)["info"]["heads"]["samples"] == 1
        assert dash.streams == 1


def test_the_end_of_a_run_is_news(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    with ExitStack() as held:
        owner = ExitStack()
        owner.enter_context(directory.owned())
        dash = held.enter_context(served(directory))
        news = held.enter_context(urllib.request.urlopen(f"{dash.url}api/events", timeout=20))
        assert next_now(news)["info"]["state"] == "running"
        owner.close()
        assert next_now(news)["info"]["state"] == "finished"


def next_now(news: Any) -> Any:
    for line in news:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream has ended")


def test_the_files_of_the_page_are_small_and_their_own(dash: Dash) -> None:
    page = Path(__file__).parents[2] / "staleflow/dash/page"
    files = list(page.iterdir())
    assert sum(each.stat().st_size for each in files) < 1_000_000
    for each in files:
        if each.name.startswith("uPlot"):
            continue
        assert "//cdn" not in each.read_text()
        assert get(dash, f"/{each.name}")[0] == 200
    assert (page / "uPlot-LICENSE.txt").exists()
