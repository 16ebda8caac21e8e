"""A server that is not ours: it answers requests for an evaluation, by the protocol of OpenAI or of vLLM's tokens.

A response has the tokens of the server's model and nothing about versions, and one that is interrupted is lost: so a
server evaluates, and is refused for training. ::

    server = Server("http://localhost:8000/v1", model_folder)                     # OpenAI's /completions
    server = Server("http://localhost:8000/inference/v1/generate", model_folder)  # tokens in, tokens out
    for name, tokens in server.respond(requests): ...
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from staleflow.rollout.engine import EngineError, Request

TOKENS = "/inference/v1/generate"
AT_ONCE = 32
"""Requests that a server is sent before it has answered."""
LIMIT_S = 600.0
"""Most seconds of one response."""
ATTEMPTS = 3
BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request may succeed."""
KEY = "OPENAI_API_KEY"
"""The environment variable with a key for the server, if it wants one."""


class Server:
    def __init__(self, url: str, folder: Path, model: str | None = None, pause_s: float = 1.0) -> None:
        """``folder``: of the model, for its tokenizer. ``model``: its name on the server; None: the first that the
        server lists. ``pause_s``: between two attempts."""
        self._url = url.rstrip("/")
        self._tokens = self._url.endswith(TOKENS)
        self._folder = folder
        self._pause_s = pause_s
        self.model = model or (None if self._tokens else self._first_model())

    def respond(
        self, requests: Sequence[Request], moved: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, list[int]]]:
        """The name of each request and the tokens of its response, as they come."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = {pool.submit(self._ask, each): each.name for each in requests}
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
                    moved()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, request: Request) -> list[int]:
        sampling = request.sampling
        drawing: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop": list(sampling.stop_strings),
        } | {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        named = {} if self.model is None else {"model": self.model}
        if self._tokens:
            drawing["stop_token_ids"] = list(sampling.stop_tokens)
            found = self._post(self._url, {"token_ids": list(request.prompt), "sampling_params": drawing, **named})
        else:
            asked = {"prompt": list(request.prompt), "return_token_ids": True, **drawing, **named}
            found = self._post(f"{self._url}/completions", asked)
        try:
            (choice,) = found["choices"]
            if choice.get("token_ids") is not None:
                return [int(token) for token in choice["token_ids"]]
            ended = choice["finish_reason"] == "stop" and not sampling.stop_strings
            return self._encoded(choice["text"]) + list(sampling.stop_tokens[:1] if ended else ())
        except (KeyError, TypeError, ValueError):
            raise EngineError(
                f"{self._url} answered {json.dumps(found)[:200]}, which is not a completion: give the address of an "
                f"OpenAI-compatible server, such as http://localhost:8000/v1, or one that ends in {TOKENS}"
            ) from None

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a server that says only what they mean."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    def _first_model(self) -> str:
        found = self._call(urllib.request.Request(f"{self._url}/models", headers=self._headers()))
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"{self._url}/models lists no model: give its name by --served-model") from None

    def _post(self, url: str, body: Any) -> Any:
        return self._call(urllib.request.Request(url, json.dumps(body).encode(), self._headers()))

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(KEY)
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def _call(self, request: urllib.request.Request) -> Any:
        why = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._pause_s * 2**attempt)
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read(200).decode(errors='replace')}"
                if error.code not in BUSY:
                    break
            except (OSError, ValueError) as error:  # not reached, too late, or not JSON
                why = str(getattr(error, "reason", error))
        raise EngineError(f"the server at {request.full_url} does not answer ({why}): correct --server, or start it")
