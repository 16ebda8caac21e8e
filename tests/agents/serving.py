"""An endpoint over a tiny engine or over texts that a test gives, and the agent's side of the wire."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.local import LocalEpisodes
from staleflow.agents.render import Renderer
from staleflow.agents.turns import Turn
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.options import EngineOptions, Sampling

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
END = 256
"""The token that ends a text of the tiny model of bytes."""


class Scripted:
    """Episodes whose turns are texts that the test gives, or waits with. Each letter is a token."""

    def __init__(self, renderer: Renderer, texts: Sequence[str] = ()) -> None:
        self.renderer = renderer
        self.texts = list(texts)
        self.branches: dict[str, list[int]] = {}
        self.turns: list[tuple[str, int, list[int], int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def begin(self, episode: str, prompt: Sequence[int]) -> None:
        self.branches[episode] = list(prompt)

    def held(self, branch: str) -> list[int]:
        return self.branches[branch]

    def branch(self, parent: str, shared: int) -> str:
        name = f"{parent.partition('~')[0]}~{len(self.branches)}"
        self.branches[name] = self.branches[parent][:shared]
        return name

    async def turn(self, branch: str, at: int, given: Sequence[int], limit: int) -> Turn:
        self.turns.append((branch, at, list(given), limit))
        assert len(self.branches[branch]) == at
        await self.gate.wait()
        words: Any = self.renderer.words
        text = self.texts.pop(0) if self.texts else "ok"
        tokens = [token for letter in text for token in words.encode(letter, add_special_tokens=False)]
        tokens.append(words.eos_token_id)
        self.branches[branch] += [*given, *tokens]
        return Turn(tokens, [-0.5] * len(tokens), ((0, len(tokens)),), "stop")


@asynccontextmanager
async def serving(episodes: Any, renderer: Renderer, **options: Any) -> AsyncIterator[Endpoint]:
    endpoint = await Endpoint(episodes, renderer, options.pop("sampling", Sampling()), **options).start()
    try:
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def local(folder: Path, max_tokens: int = 64, **options: Any) -> AsyncIterator[tuple[Endpoint, LocalEpisodes]]:
    """An endpoint over the real engine, with one episode ``p0/0`` for USER."""
    renderer = Renderer.of(folder, stops=[END])
    renderer.prove()
    sampling = Sampling(max_tokens=max_tokens, stop_tokens=(END,))
    engine = TorchEngine(folder, EngineOptions(kv_tokens=8192, page_size=8))
    episodes = LocalEpisodes(engine, sampling)
    episodes.begin("p0/0", renderer.first(USER))
    async with serving(episodes, renderer, sampling=sampling, **options) as endpoint:
        yield endpoint, episodes
    engine.close()


class Wire:
    """One connection, by plain HTTP."""

    def __init__(self, endpoint: Endpoint | int, secret: str) -> None:
        """``endpoint``: or its port."""
        self.port = endpoint if isinstance(endpoint, int) else int(endpoint.root.rpartition(":")[2])
        self.secret = secret
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, body: Any, path: str = "/v1/chat/completions", method: str = "POST", **headers: str) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = {"authorization": f"Bearer {self.secret}", "content-length": str(len(raw)), "host": "x"}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw)
        await self.writer.drain()

    async def answer(self) -> tuple[int, Any]:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split(" ", 2)[1])
        if "chunked" in head:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
            return status, body.decode()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return status, json.loads(await self.reader.readexactly(length) or b"null")

    async def ask(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        await self.send(body, path, **headers)
        return await self.answer()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.reader = self.writer = None


def said(answer: tuple[int, Any]) -> dict[str, Any]:
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def error(answer: tuple[int, Any]) -> tuple[int, str, str | None]:
    status, body = answer
    assert "\n" not in body["error"]["message"]
    return status, body["error"]["message"], body["error"]["code"]
