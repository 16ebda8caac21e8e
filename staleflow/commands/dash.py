"""``staleflow dash``: the live page of a run, also of a finished or a simulated one; of several, side by side.

staleflow dash                                      the latest run, on http://127.0.0.1:8060/
staleflow dash runs/a runs/b --port 9000
staleflow dash --host 0.0.0.0                       others may look, by the token that is printed
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from staleflow.commands.common import LATEST, Subparsers
from staleflow.errors import ConfigError
from staleflow.observe.output import Output
from staleflow.run.directory import RunDirectory

if TYPE_CHECKING:
    from staleflow.dash.run_view import RunView
    from staleflow.dash.server import Dash

PORT, MOST_PORT = 8060, 65535
MOST_RUNS = 8
AGAIN_S = 5.0
END_S = 20.0
"""For the page of ``train --dash`` to end."""
NICE = 19
"""Of that page: where cores are scarce, training comes first."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("dash", help="show a run as a live page in the browser", allow_abbrev=False)
    parser.add_argument(
        "directories", nargs="*", metavar="RUN", help=f"its directory (default: {LATEST}); several are compared"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"of the page; 0: any that is free (default: {PORT})")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--token", help="that everybody must know who looks; off loopback one is made if none is given")
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    parser.add_argument("--attached", action="store_true", help=argparse.SUPPRESS)  # ends with its standard input
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_port(options.port)
    if options.token is not None and not (options.token.isascii() and options.token.isalnum()):
        raise ConfigError("--token may have letters and digits only")
    found = [RunDirectory.existing(Path(each)) for each in options.directories or [LATEST]]
    if len(found) > MOST_RUNS:
        raise ConfigError(f"{len(found)} runs are given: at most {MOST_RUNS} can be compared")
    from staleflow.dash.run_view import RunView
    from staleflow.dash.server import is_loopback

    token = options.token or ("" if is_loopback(options.host) else secrets.token_hex(16))
    views = [RunView(at, directory, config) for at, (directory, config) in enumerate(found)]
    with _listening(views, options.host, options.port, token, AGAIN_S if options.attached else 0.0) as dash:
        print(json.dumps({"url": dash.url}) if options.json else f"open {dash.url} (Ctrl-C ends the page)", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: threading.Thread(target=dash.stop).start())
        if options.attached:
            os.nice(NICE)
            threading.Thread(target=lambda: (sys.stdin.read(), dash.stop()), daemon=True).start()
        dash.serve()
    return 0


def check_port(port: int) -> None:
    if not 0 <= port <= MOST_PORT:
        raise ConfigError(f"--port {port} is impossible: give one from 0 to {MOST_PORT}; 0 is any that is free")


def _listening(views: Sequence[RunView], host: str, port: int, token: str, again_s: float) -> Dash:
    """``again_s``: how long the page of a control plane that died may still have the port."""
    from staleflow.dash.server import Dash

    until = time.monotonic() + again_s
    while True:
        try:
            return Dash(views, host, port, token)
        except ConfigError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.2)


@contextmanager
def beside(directory: RunDirectory, port: int | None, out: TextIO | Output) -> Iterator[None]:
    """The page of a run in a process of its own, while this process trains it. ``port`` None: none is wanted.

    A page that cannot be shown is said so and does not end the run."""
    if port is None:
        yield
        return
    words = [sys.executable, "-m", "staleflow", "dash", str(directory.path), "--port", str(port), "--attached"]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as page:
        assert page.stdin is not None
        assert page.stdout is not None
        reader = threading.Thread(target=_pass_on, args=(page.stdout, out), daemon=True)
        reader.start()
        try:
            yield
        finally:
            page.stdin.close()
            try:
                page.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                page.kill()


def _pass_on(lines: Sequence[str] | TextIO, out: TextIO | Output) -> None:
    for line in lines:
        said = line.removeprefix("staleflow: error: ").removesuffix("(Ctrl-C ends the page)\n").strip()
        print(f"page: {said.removeprefix('open ')}", file=out, flush=True)
