"""What a process of a run says of an error, and to what end."""

from collections.abc import Callable
from typing import Any

import pytest

from staleflow.errors import ConfigError
from staleflow.rollout.engine import EngineError
from staleflow.runtime.local import child
from staleflow.types import Broken, Setup
from staleflow.workers.link import Gone
from staleflow.workers.own_engine import FirstTokenError


class Ends:
    """A link of which one end sends the set-up and the other keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def receive(self, timeout_s: float) -> list[Any]:  # noqa: ARG002
        return [Setup("instance", "i0", 1, "", "", "", [], 1, 0)]

    def send(self, message: Any) -> None:
        self.sent.append(message)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[Any]]:
    """What is sent by a process that is built so."""

    def serve(build: Callable[..., Any]) -> list[Any]:
        link: Any = Ends()
        monkeypatch.setattr(child, "build", build)
        monkeypatch.setattr(child, "take_place", lambda _: None)
        monkeypatch.setattr(child.signal, "signal", lambda *_: None)
        try:
            child.serve(link)
        except Exception as error:  # the process ends with it
            link.sent.append(type(error))
        return link.sent

    return serve


@pytest.mark.parametrize("error", [EngineError("no such model"), ConfigError("x"), ValueError("x")])
def test_what_is_wrong_when_a_process_is_built_is_told_and_ends_the_run(error: Exception, served: Any) -> None:
    assert served(raising(error)) == [Broken(str(error)), type(error)]


@pytest.mark.parametrize(
    "error", [EngineError("vLLM failed in a step"), ValueError("x"), UnicodeDecodeError("", b"", 0, 1, "")]
)
def test_what_an_engine_raises_at_work_is_not_taken_for_a_bad_setting(error: Exception, served: Any) -> None:
    """vLLM failed in a step, and the run ended instead of another engine taking over."""
    assert served(lambda *_: raising(error)) == [type(error)]


def test_what_the_users_own_code_raises_at_work_is_told_and_ends_the_run(served: Any) -> None:
    assert served(lambda *_: raising(ConfigError("own"))) == [Broken("own"), ConfigError]
    assert served(lambda *_: raising(FirstTokenError("own"))) == [Broken("own", first=True), FirstTokenError]


@pytest.mark.parametrize("build", [raising(Gone()), lambda *_: raising(Gone())])
def test_a_process_without_a_control_plane_ends_in_peace(build: Any, served: Any) -> None:
    assert served(build) == []
