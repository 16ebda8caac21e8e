"""A Ray cluster of this machine alone, for one run: ``python -m staleflow.runtime.ray.head RUN``.

It is a process of its own, so that it outlives a control plane that dies, as the processes of the run do. It listens on
the loopback address only, asks for a token that is made for it, and ends when it is asked to, or when nobody has run
the run for a while. What Ray logged is then in ``logs/ray`` of the run.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from staleflow import tcp
from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.link import AWAY_S

MODULE = "staleflow.runtime.ray.head"
ADDRESS = "head.json"
"""In the run directory: where the cluster is."""
ROOM = "staleflow"
"""What processes take of this cluster: there is enough of it for any number of them."""
STORE_BYTES = 80 << 20
"""Of Ray's object store, which is not used here: about the least that it accepts."""
START_S = 120.0
STOP_S = 20.0
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the loopback address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # all see all GPUs, as without Ray
}


def environment(token: str) -> dict[str, str]:
    return ENVIRONMENT | {"RAY_AUTH_TOKEN": token}


def found(run: Path) -> tcp.Address | None:
    """The cluster of this run, if it is alive."""
    if (address := tcp.read(run / ADDRESS)) is not None:
        with suppress(OSError):
            words = Path(f"/proc/{address.about}/cmdline").read_bytes().decode().split("\0")
            if words[-3:-1] == [MODULE, str(run)]:
                return address
    return None


def start(run: Path) -> tcp.Address:
    """Start one, and wait for it."""
    (run / ADDRESS).unlink(missing_ok=True)
    with (run / "logs" / "ray.log").open("ab") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(run)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | environment(secrets.token_hex(32)),
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    while (address := tcp.read(run / ADDRESS)) is None:
        if head.poll() is not None or time.monotonic() > until:
            head.kill()
            raise RunError(f"Ray could not be started on this machine: see {run / 'logs' / 'ray.log'}")
        time.sleep(0.05)
    return address


def stop(address: tcp.Address) -> None:
    """Ask it to end, and wait for that."""
    pid = int(address.about)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while time.monotonic() < until and not _gone(pid):
        time.sleep(0.02)


def _gone(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return not Path(f"/proc/{pid}").exists()


def main(run: Path) -> None:
    ray: Any = importlib.import_module("ray")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = ray.init(
        address="local",
        num_cpus=1,
        resources={ROOM: 10_000.0},
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())  # Ray has set its own
    info = context.address_info
    host, _, port = info["gcs_address"].rpartition(":")
    tcp.write(run / ADDRESS, tcp.Address(host, int(port), os.environ["RAY_AUTH_TOKEN"], str(os.getpid())))
    directory, seen = RunDirectory(run), time.monotonic()
    while not ending.wait(1.0) and time.monotonic() - seen < AWAY_S:
        if directory.running:
            seen = time.monotonic()
    ray.shutdown()
    session = Path(info["session_dir"])
    with suppress(OSError):
        shutil.copytree(session / "logs", run / "logs" / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    shutil.rmtree(session, ignore_errors=True)
    (run / ADDRESS).unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
