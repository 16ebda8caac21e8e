"""The page's server: files of the page, the API as JSON, and news as server-sent events.

    with Dash(views, host="127.0.0.1", port=8060, token="") as dash:
        dash.url                # what to open
        dash.serve()            # until stop() is called from another thread

One thread follows the runs' files: four times a second while somebody looks, otherwise every two seconds. On loopback
anyone on this machine may look, and requests that name another host are refused, so that no website can read along. Off
loopback every request needs the token: once as ``?token=``, then by a cookie, or by ``Authorization: Bearer``.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from staleflow.dash.api import Api, BadRequestError
from staleflow.dash.run_view import RunView
from staleflow.errors import ConfigError

PAGE = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
FILES = {each.name: each for each in PAGE.iterdir() if each.suffix in TYPES}
COOKIE = "staleflow_token"
LOOKED_AT_S, ALONE_S = 0.25, 2.0
"""Between two looks at the files."""
TOUCH_S = 1.0
"""How often a run is told that somebody looks."""
STAYS_S = 3.0
"""After a request, somebody is taken to look for this long."""
BEAT_S = 10.0
"""A stream without news says so, so that a browser that is gone is noticed."""
MOST_STREAMS = 64
MOST_CONNECTIONS = 256
TIMEOUT_S = 30.0
"""For a request to arrive, and for a piece of an answer to be taken."""
SAFE = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dash:
    def __init__(self, views: Sequence[RunView], host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        self.views = views
        self.api = Api(views)
        self.token = token
        self.streams = 0
        self.looked_at = 0.0
        """When the last request came, by the monotonic clock."""
        self.news = threading.Condition()
        self.stopped = False
        try:
            self._http = _Http((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): {_instead(error)}") from None
        self._http.dash = self
        self.host, self.port = host, self._http.server_address[1]
        self._follower = threading.Thread(target=self._follow, name="follow the run", daemon=True)
        self._touched = 0.0
        self._now: dict[int, tuple[int, bytes]] = {}

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={quote(self.token)}" if self.token else "")

    def serve(self) -> None:
        self._follower.start()
        self._http.serve_forever(poll_interval=0.5)

    def stop(self) -> None:
        self.stopped = True
        self._http.shutdown()
        with self.news:
            self.news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        self._http.server_close()
        if self._follower.is_alive():
            self._follower.join(timeout=10.0)
        for view in self.views:
            view.close()

    @property
    def looked(self) -> bool:
        return self.streams > 0 or time.monotonic() - self.looked_at < STAYS_S

    def now(self, view: RunView) -> tuple[int, bytes]:
        """The state of a run as JSON, made once for all who look."""
        changes, body = self._now.get(view.id, (-1, b""))
        if changes != view.changes:
            changes, body = self._now[view.id] = view.changes, msgspec.json.encode(view.now())
        return changes, body

    def _follow(self) -> None:
        while not self.stopped:
            before, more = [view.changes for view in self.views], False
            for view in self.views:
                with suppress(OSError):  # too many files are open: later again
                    more |= view.follow()
            if before != [view.changes for view in self.views]:
                with self.news:
                    self.news.notify_all()
            if self.looked and time.monotonic() - self._touched > TOUCH_S:
                self._touched = time.monotonic()
                self._touch()
            if more:
                time.sleep(0.001)  # those who ask come first
            else:
                self._pause()

    def _pause(self) -> None:
        until = time.monotonic() + (LOOKED_AT_S if self.looked else ALONE_S)
        while not self.stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOKED_AT_S, left))
            if self.looked:
                return

    def _touch(self) -> None:
        for view in self.views:
            if view.state == "running":
                with suppress(OSError):
                    path = view.directory.watched
                    path.touch(mode=0o600)
                    os.utime(path)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    dash: Dash

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.connections: set[Any] = set()
        self.waiting: dict[socket.socket, float] = {}
        """Connections over which a request may come, each with the time since when."""
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # who wants to connect still waits: do not spin
                time.sleep(LOOKED_AT_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.connections) >= self.most:
            self.shutdown_request(request)
            return
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: whose request has not arrived in time, a byte now and then, is not waited for any longer."""
        now = time.monotonic()
        for connection, since in list(self.waiting.items()):
            if now - since > TIMEOUT_S:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked may be gone at any time: that is nobody's mistake, and nothing is printed of it."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    @property
    def _dash(self) -> Dash:
        return self._http.dash

    @property
    def _http(self) -> _Http:
        assert isinstance(self.server, _Http)
        return self.server

    def handle_one_request(self) -> None:
        self._http.waiting[self.connection] = time.monotonic()
        try:
            super().handle_one_request()
        finally:
            self._http.waiting.pop(self.connection, None)

    def do_GET(self) -> None:
        self._http.waiting.pop(self.connection, None)
        dash = self._dash
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(400, "text/plain", b"this is not an address\n")
            return
        asked = dict(parse_qsl(url.query, keep_blank_values=True))
        dash.looked_at = time.monotonic()
        if not self._may(asked):
            return
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            if url.path == "/api/events":
                self._stream(dash, asked)
            elif url.path.startswith("/api/"):
                status, body = dash.api.answer(url.path, asked)
                self._send(status, "application/json", body)
            else:
                self._file("index.html" if url.path == "/" else url.path.lstrip("/"))

    def _may(self, asked: dict[str, str]) -> bool:
        token = self._dash.token
        if not token:
            if names_loopback(self.headers.get("Host", "")):
                return True
            self._send(403, "text/plain", b"this page answers to localhost only: open http://127.0.0.1:PORT/\n")
            return False
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        given = (
            asked.get("token", ""),
            cookie.value if cookie else "",
            self.headers.get("Authorization", "").removeprefix("Bearer "),
        )
        if any(hmac.compare_digest(each.encode(), token.encode()) for each in given):
            return True
        self._send(401, "text/plain", b"this page needs its token: open the address that staleflow dash printed\n")
        return False

    def _file(self, name: str) -> None:
        if name in FILES:
            self._send(200, TYPES[FILES[name].suffix], FILES[name].read_bytes())
        else:
            self._send(404, "text/plain", b"there is no such page\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self._head(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        for name, value in SAFE.items():
            self.send_header(name, value)
        if token := self._dash.token:
            self.send_header("Set-Cookie", f"{COOKIE}={quote(token)}; HttpOnly; SameSite=Strict; Path=/")

    def _stream(self, dash: Dash, asked: dict[str, str]) -> None:
        """``now`` whenever something has changed, at most four times a second."""
        try:
            view = dash.api.view(asked)
        except BadRequestError as error:
            self._send(400, "application/json", msgspec.json.encode({"error": str(error)}))
            return
        if dash.streams >= MOST_STREAMS:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many pages are open\n")
            return
        dash.streams += 1
        self.close_connection = True
        try:
            self.send_response(200)
            self._head("text/event-stream")
            self.end_headers()
            self.wfile.write(b"retry: 1000\n\n")
            seen = -1
            while not dash.stopped:
                changes, body = dash.now(view)
                self.wfile.write(b": still here\n\n" if changes == seen else b"event: now\ndata: " + body + b"\n\n")
                self.wfile.flush()
                seen = changes
                time.sleep(LOOKED_AT_S / 2)
                with dash.news:
                    if not dash.stopped and view.changes == seen:
                        dash.news.wait(timeout=BEAT_S)
        finally:
            dash.streams -= 1

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed for each request."""


def _instead(error: OSError) -> str:
    """What to give where a server cannot listen."""
    own = error.errno in (errno.EADDRINUSE, errno.EACCES)
    return "give another --port" if own else "give an address of this machine as --host"


def names_loopback(header: str) -> bool:
    """Whether the host that a request names is this machine."""
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:  # it names none
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
