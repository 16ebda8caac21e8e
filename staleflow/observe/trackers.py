"""The built-in trackers: TensorBoard, Weights & Biases, trackio and Prometheus.

Each is one class over the program's own package, which is imported when the run starts and not before. Arguments of the
setting ``track_arguments`` go to that package as they are.
"""

from __future__ import annotations

import re
from typing import Any

from staleflow.observe.tracking import TrackedRun, Values

PROJECT = "staleflow"


class TensorBoard:
    """Event files in ``RUN/tensorboard``: ``tensorboard --logdir runs`` shows every run."""

    def __init__(self, run: TrackedRun, **arguments: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        folder = str(run.path / "tensorboard")
        self._writer: Any = SummaryWriter(**{"log_dir": folder, "purge_step": run.first_step or None, **arguments})

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """``track_arguments={project: mine, mode: offline}``; its own environment variables count too."""

    def __init__(self, run: TrackedRun, **arguments: Any) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        given = {"project": PROJECT, "name": run.name, "dir": str(run.path), "config": dict(run.settings)}
        self._run: Any = wandb.init(**{**given, "id": plain_name(run.name), "resume": "allow", **arguments})
        self._step = 0

    def log(self, step: int, values: Values) -> None:
        self._step = max(self._step, step)  # it takes no step before the last: evaluations come late
        self._run.log(dict(values), step=self._step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Kept on this machine; ``trackio show`` opens it."""

    def __init__(self, run: TrackedRun, **arguments: Any) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        given = {"project": PROJECT, "name": run.name, "config": dict(run.settings), "resume": "allow"}
        self._trackio: Any = trackio
        trackio.init(**{**given, **arguments})

    def log(self, step: int, values: Values) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


class Prometheus:
    """``RUN/metrics.prom`` for the node exporter's textfile collector; with ``track_arguments={port: 9464}`` also at
    ``http://127.0.0.1:9464/metrics``."""

    def __init__(self, run: TrackedRun, port: int | None = None, host: str = "127.0.0.1") -> None:
        import prometheus_client  # pyright: ignore[reportMissingImports]

        self._client: Any = prometheus_client
        self._registry: Any = prometheus_client.CollectorRegistry()
        self._file = str(run.path / "metrics.prom")
        self._run = run.name
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        if port is not None:
            self._server, _ = prometheus_client.start_http_server(port, host, self._registry)

    def log(self, step: int, values: Values) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in self._gauges:
                known = f"staleflow_{plain_name(name)}", f"{name} of the latest step", ["run"]
                self._gauges[name] = self._client.Gauge(*known, registry=self._registry)
            self._gauges[name].labels(self._run).set(value)
        self._client.write_to_textfile(self._file, self._registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", text)
