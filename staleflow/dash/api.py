"""The HTTP API of the page: every endpoint, its parameters and limits, and which question it asks of a run.

    status, body = Api([view]).answer("/api/now", {"run": "0"})         # 200, JSON

``docs/dash.md`` describes the answers; a test holds the two together. Whatever is asked, an answer is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from staleflow.config.text import one_line
from staleflow.dash.run_view import RunView
from staleflow.errors import StaleFlowError

Parameters = Mapping[str, str]
ENDS = "trained", "dropped"
"""States of a trajectory that ended."""
_encode = msgspec.json.Encoder().encode


class BadRequestError(StaleFlowError, ValueError):
    """A parameter that cannot be; the message says what to give instead."""


class Api:
    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = views
        self.endpoints: dict[str, Callable[[Parameters], Any]] = {
            "/api/runs": lambda _: [view.info() for view in views],
            "/api/now": lambda asked: self.view(asked).now(),
            "/api/learning": lambda asked: self.view(asked).learning(number(asked, "points", 600, 1, 2_000)),
            "/api/staleness": lambda asked: self.view(asked).staleness(number(asked, "points", 300, 1, 2_000)),
            "/api/timeline": self._timeline,
            "/api/samples": self._samples,
            "/api/trajectories": self._trajectories,
            "/api/trajectory": lambda asked: self.view(asked).trajectory(asked.get("name", "")),
        }

    def answer(self, path: str, asked: Parameters) -> tuple[int, bytes]:
        """HTTP status, and JSON. What cannot be answered is ``{"error": ...}`` in one line."""
        if path not in self.endpoints:
            return 404, _encode({"error": f"there is no {path}: endpoints are {', '.join(self.endpoints)}"})
        try:
            return 200, _encode(self.endpoints[path](asked))
        except BadRequestError as error:
            return 400, _encode({"error": one_line(error)})
        except StaleFlowError as error:
            return 404, _encode({"error": one_line(error)})

    def view(self, asked: Parameters) -> RunView:
        return self._views[number(asked, "run", 0, 0, len(self._views) - 1)]

    def _timeline(self, asked: Parameters) -> Any:
        begin, end = decimal(asked, "from", 0.0) or 0.0, decimal(asked, "to", None)
        if end is not None and begin > end:
            raise BadRequestError(f"from={begin:g} is after to={end:g}: give a time that is no later than the other")
        return self.view(asked).timeline(
            begin,
            end,
            number(asked, "columns", 400, 1, 1_000),
            number(asked, "lane", 0, 0, 1_000_000),
            number(asked, "lanes", 32, 1, 128),
            asked.get("name", ""),
        )

    def _samples(self, asked: Parameters) -> Any:
        step = number(asked, "step", 0, 0, 1 << 31) if asked.get("step") else None
        before, limit = number(asked, "before", 0, 0, 1 << 53), number(asked, "limit", 20, 1, 100)
        return self.view(asked).samples(asked.get("q", ""), step, before, limit)

    def _trajectories(self, asked: Parameters) -> Any:
        return self.view(asked).trajectories(
            state=one_of(asked, "state", ENDS),
            reason=asked.get("reason", ""),
            step=number(asked, "step", 0, 0, 1 << 31) if asked.get("step") else None,
            name=asked.get("name", ""),
            before=number(asked, "before", 0, 0, 1 << 53),
            limit=number(asked, "limit", 50, 1, 200),
        )


def number(asked: Parameters, name: str, default: int, least: int, most: int) -> int:
    text = asked.get(name) or str(default)
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= most:
        raise BadRequestError(f"{name}={text[:40]} is not possible: give a whole number from {least} to {most}")
    return int(text)


def one_of(asked: Parameters, name: str, choices: Sequence[str]) -> str:
    text = asked.get(name, "")
    if text and text not in choices:
        raise BadRequestError(f"{name}={text[:40]} is not possible: give {' or '.join(choices)}, or leave it out")
    return text


def decimal(asked: Parameters, name: str, default: float | None) -> float | None:
    if not (text := asked.get(name, "")):
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e15:
        raise BadRequestError(f"{name}={text[:40]} is not possible: give seconds, such as 12.5")
    return value
