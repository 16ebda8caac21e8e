"""With what a process begins, and how its end is told."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from staleflow.errors import ending
from staleflow.runtime.local.process import spawn
from staleflow.types import Role, Setup

PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"


def test_where_a_gpu_computes_for_several_processes_at_once_a_trainer_lets_instances_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_words, env, **_how: env)

    def environment(role: Role) -> Any:
        setup = Setup(role, role, 1, str(tmp_path), model="", store="", cores=[], threads=1, nice=0)
        return spawn(tmp_path / "door", setup, tmp_path / "log")

    monkeypatch.delenv(PRIORITY, raising=False)
    assert environment("trainer")[PRIORITY] == "1"
    assert PRIORITY not in environment("instance")
    assert environment("instance")["PATH"] == os.environ["PATH"]
    monkeypatch.setenv(PRIORITY, "0")
    assert environment("trainer")[PRIORITY] == "0", "the user's word counts"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-signal.SIGKILL, "killed (SIGKILL; out of memory?)"),
        (-signal.SIGSEGV, "killed (SIGSEGV)"),
        (-250, "killed (signal 250)"),
        (1, "exit code 1"),
        (0, "exit code 0"),
        (None, "closed its connection"),
    ],
)
def test_an_exit_status_in_words(code: int | None, told: str) -> None:
    assert ending(code) == told
