"""Commands with vLLM, in processes of their own: ``profile --engine vllm``, and ``evaluate`` by a server of vLLM's."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.server import Server
from staleflow.tasks import adder
from tests.conformance.engines import drained
from tests.vllm.conftest import KINDS
from tests.vllm.test_training import save

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

START_S = 300.0
"""A server of vLLM's answers within this."""


def staleflow(*words: str) -> str:
    command = [sys.executable, "-c", "from staleflow.cli import main; raise SystemExit(main())", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_profile_of_vllm_is_fitted_and_simulated_with(tmp_path: Path) -> None:
    output = tmp_path / "vllm.json"
    size = ["--running", "4", "--context", "256"]
    staleflow("profile", "--engine", "vllm", *size, "--json", "--output", str(output))
    found = json.loads(output.read_text())
    assert found["engine"] == "vllm"
    assert "vLLM" in found["device"]
    assert {(point["running"]) for point in found["points"]} == {1, 2, 4}
    assert found["coefficients"]["floor"] > 0
    assert set(found["error"]) == {"mean", "worst", "unseen"}
    small = ["--instances", "2", "--groups", "2", "--group-size", "2", "--steps", "2", "training_gpus=4"]
    simulated = json.loads(staleflow("simulate", *small, "max_tokens=200", "--json", "--profile", str(output)))
    assert simulated["steps"] == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(KINDS["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-scale-out"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--served-model-name", "mine"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the engine in tests sets the other
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"vLLM's server did not start: {log.read_text()[-2000:]}")


@pytest.mark.parametrize("path", ["/v1", "/inference/v1/generate"])
def test_a_server_of_vllm_answers_with_the_tokens_of_our_engine(path: str, folder: Path, served: str) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_tokens=(adder.END,))
    asked = [Request(str(at), 1, [5 + at, 7, 9], sampling=sampling) for at in range(6)]
    engine = TorchEngine(folder, EngineOptions(kv_tokens=512, max_running=6, threads=1))
    engine.submit(asked)
    expected = {name: result.tokens for name, result in drained(engine).items()}
    assert dict(Server(served + path, folder).respond(asked)) == expected


def test_a_server_of_vllm_is_evaluated_as_our_engine_is(folder: Path, served: str) -> None:
    words = ["evaluate", f"model={folder}", "problems=8", "max_tokens=8", "kv_tokens=512", "--json"]
    words.append("reward.function=tests.runtime.local.rewards:evenness")
    here = json.loads(staleflow(*words))
    there = json.loads(staleflow(*words, "--server", f"{served}/v1"))
    assert there["figures"] == here["figures"]
    assert there["by"] == f"mine at {served}/v1"
