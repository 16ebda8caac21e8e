"""A real HTTP server over the built-in engine, which speaks the protocols of servers that are not ours."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Request, Sampling


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.count += 1
            if self.server.count in self.server.busy_at:
                return self._say(503, {"error": "busy"})
            if self.path == "/inference/v1/generate":
                tokens, _ = self._made(asked["token_ids"], asked["sampling_params"])
                return self._say(200, {"choices": [{"index": 0, "token_ids": tokens}]})
            if self.path != "/v1/completions" or asked["model"] != "tiny":
                return self._say(404, {"error": f"no {asked['model']} at {self.path}"})
            tokens, ended = self._made(asked["prompt"], asked)
            choice = {"text": self.server.decode(tokens), "finish_reason": "stop" if ended else "length"}
            if self.server.with_tokens:
                choice["token_ids"] = tokens
            return self._say(200, {"choices": [choice]})

    def _made(self, prompt: list[int], drawing: dict[str, Any]) -> tuple[list[int], bool]:
        sampling = Sampling(
            max_tokens=drawing["max_tokens"], temperature=drawing["temperature"], stop_tokens=self.server.stops
        )
        self.server.engine.submit([Request("one", 1, prompt, sampling=sampling)])
        while True:
            for result in self.server.engine.step().finished:
                return result.tokens, result.reason == "stop"

    def _say(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def served(
    folder: Path, stops: tuple[int, ...], with_tokens: bool = True, busy_at: tuple[int, ...] = ()
) -> Iterator[str]:
    """Its address. ``with_tokens``: whether completions have their tokens too; ``busy_at``: requests, counted from 1,
    that are refused with status 503."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.engine = TorchEngine(folder, EngineOptions(kv_tokens=512, max_running=2, threads=1))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    server.decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
    server.stops, server.with_tokens, server.busy_at = stops, with_tokens, busy_at
    server.count, server.lock = 0, threading.Lock()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
