"""The endpoint that agents call: OpenAI's chat completions and vLLM's tokens, in front of the episodes of a run.

    endpoint = Endpoint(episodes, renderer, sampling)
    await endpoint.start()
    secret = endpoint.open("p7/3")         # OPENAI_BASE_URL=endpoint.url, OPENAI_API_KEY=secret
    endpoint.seal("p7/3")                  # from now on its calls are answered by 409

A call is one turn of an episode, however long that takes: it goes on when its connection is lost. A retry is answered
by what the call made, or joins it, and is never sampled again. A retry is a call with the same ``Idempotency-Key`` (or
``request_id``); one that OpenAI's client has marked as a retry; or the same call again when nobody was there to hear
the answer of the first. The same call again without any of these is another call: it opens a branch.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Self

import msgspec

from staleflow.agents import wire
from staleflow.agents.chat import History
from staleflow.agents.http import Asked, Reply, Server
from staleflow.agents.messages import Known, MessageError
from staleflow.agents.render import Renderer
from staleflow.agents.turns import EpisodeOverError, Episodes
from staleflow.agents.wire import Answer, ApiError, Ask
from staleflow.errors import StaleFlowError
from staleflow.rollout.options import Sampling

CHAT, MODELS, TOKENS = "/v1/chat/completions", "/v1/models", "/inference/v1/generate"
BEAT_S = 10.0
"""Between two signs of life of a stream that waits."""
MOST_SEALED = 100_000
"""Secrets of episodes that are over, which are remembered so that a late call hears why it is refused."""
OVER = "the episode is over: nothing more is made for it"


class _Call(NamedTuple):
    digest: bytes
    task: asyncio.Task[Answer]
    replies: list[Reply]

    @property
    def lost(self) -> bool:
        """Whether nobody was there, or is, to hear the answer."""
        return all(reply.gone and not reply.delivered for reply in self.replies)


@dataclass(slots=True)
class _Episode:
    name: str
    secret: str
    history: History
    known: Known = field(default_factory=Known)
    turns: int = 0
    by_body: dict[bytes, _Call] = field(default_factory=dict[bytes, _Call])
    by_key: dict[str, _Call] = field(default_factory=dict[str, _Call])
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set[asyncio.Task[Answer]])


class Endpoint:
    def __init__(
        self,
        episodes: Episodes,
        renderer: Renderer,
        sampling: Sampling,
        model: str = "policy",
        max_turns: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        beat_s: float = BEAT_S,
    ) -> None:
        """``sampling``: how the run draws tokens. ``max_turns``: calls of an episode; 0: without limit."""
        self.episodes, self.renderer, self.sampling, self.model = episodes, renderer, sampling, model
        self.max_turns, self.host, self.beat_s = max_turns, host, beat_s
        self._port = port
        self._server = Server(self._handle)
        self._open: dict[bytes, _Episode] = {}
        """By the digest of its secret."""
        self._names: dict[str, _Episode] = {}
        self._sealed: dict[bytes, None] = {}

    async def start(self) -> Self:
        await self._server.start(self.host, self._port)
        return self

    async def close(self) -> None:
        for name in list(self._names):
            self.seal(name)
        await self._server.close()

    @property
    def root(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._server.port}"

    @property
    def url(self) -> str:
        """What ``OPENAI_BASE_URL`` is."""
        return f"{self.root}/v1"

    def open(self, episode: str) -> str:
        """Serve this episode, and only it, to whoever has the secret, which is a new one."""
        self.seal(episode)
        secret = secrets.token_urlsafe(24)
        history = History(self.renderer, episode, self.episodes.held(episode))
        self._names[episode] = self._open[_digest(secret)] = _Episode(episode, secret, history)
        return secret

    def seal(self, episode: str) -> None:
        """Answer nothing more for this episode; calls in flight are cancelled."""
        sealed = self._names.pop(episode, None)
        if sealed is not None:
            digest = _digest(sealed.secret)
            del self._open[digest]
            self._sealed[digest] = None
            if len(self._sealed) > MOST_SEALED:
                del self._sealed[next(iter(self._sealed))]
            for task in sealed.tasks:
                task.cancel()

    def calls(self, episode: str) -> int:
        """Calls of this episode that are in flight."""
        opened = self._names.get(episode)
        return 0 if opened is None else len(opened.tasks)

    async def _handle(self, asked: Asked, reply: Reply) -> None:
        try:
            await self._route(asked, reply)
        except ApiError as error:
            if not reply.begun:
                hint = {"x-should-retry": "false"} if error.status < 500 else {}
                await reply.send(error.status, error.body, hint)
            else:
                await reply.event(b"data: " + error.body + b"\n\n")
                await reply.end()

    async def _route(self, asked: Asked, reply: Reply) -> None:
        methods = {CHAT: "POST", TOKENS: "POST", MODELS: "GET"}
        if asked.path not in methods:
            raise ApiError(404, f"{asked.path} is not served: use {', '.join(methods)}")
        if asked.method != methods[asked.path]:
            raise ApiError(405, f"{asked.path} answers {methods[asked.path]} only")
        episode = self._whose(asked)
        if asked.path == MODELS:
            served = {"id": self.model, "object": "model", "created": 0, "owned_by": "staleflow"}
            await reply.send(200, msgspec.json.encode({"object": "list", "data": [served]}))
            return
        if asked.path == CHAT:
            ask = wire.chat(asked.body, self.sampling, episode.known)
        else:
            ask = wire.tokens(asked.body, self.sampling)
        call = self._call(episode, asked, ask, reply)
        if ask.stream:
            await reply.stream()
            while not (await asyncio.wait({call.task}, timeout=self.beat_s))[0]:
                await reply.event(b": waiting for the model\n\n")
        answer = await _outcome(call)
        if ask.stream:
            await reply.event(b"".join(answer.chunks(ask, self.model)))
            await reply.end()
        else:
            await reply.send(200, answer.chat(ask, self.model) if asked.path == CHAT else answer.tokens(ask))

    def _whose(self, asked: Asked) -> _Episode:
        secret = asked.headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = _digest(secret)
        episode = self._open.get(digest)
        if episode is not None and hmac.compare_digest(episode.secret.encode(), secret.encode("latin-1", "replace")):
            return episode
        if digest in self._sealed:
            raise ApiError(409, OVER, "episode_over")
        raise ApiError(401, "this is not the key of an episode: send it as Authorization: Bearer", "invalid_api_key")

    def _call(self, episode: _Episode, asked: Asked, ask: Ask, reply: Reply) -> _Call:
        """The call that this request is, or repeats."""
        digest = blake2b(asked.path.encode() + asked.body, digest_size=16).digest()
        key = asked.headers.get("idempotency-key") or ask.request
        call = episode.by_key.get(key) if key else None
        if call is not None and call.digest != digest:
            raise ApiError(400, f"the key {key[:60]!r} was used for another request: give each its own")
        if call is None:
            call = episode.by_body.get(digest)
            retried = asked.headers.get("x-stainless-retry-count", "0") != "0" or reply.gone  # or its retry was faster
            if call is not None and not retried and not call.lost:
                call = None
        if call is not None and call.task.done() and (call.task.cancelled() or call.task.exception() is not None):
            call = None
        if call is None:
            task = asyncio.get_running_loop().create_task(self._make(episode, ask))
            call = episode.by_body[digest] = _Call(digest, task, [])
            episode.tasks.add(task)
            task.add_done_callback(episode.tasks.discard)
        if key:
            episode.by_key[key] = call
        call.replies.append(reply)
        return call

    async def _make(self, episode: _Episode, ask: Ask) -> Answer:
        if self.max_turns and episode.turns >= self.max_turns:
            raise ApiError(400, f"the episode has had its {self.max_turns} turns: end it", "max_turns")
        history, made = episode.history, False
        try:
            woven = history.weave(ask.messages, ask.tools) if ask.messages else None
            tokens = list(ask.tokens) if woven is None else woven.tokens
            place = history.place(tokens, woven)
        except MessageError as error:
            raise ApiError(400, str(error)) from None
        episode.turns += 1
        branch = place.branch
        try:
            if place.fork:
                branch = self.episodes.branch(place.branch, place.at)
            history.begin(branch, place.branch if place.fork else None, place.at)
            turn = await self.episodes.turn(branch, place.at, place.given, ask.limit)
            if not turn.tokens and turn.reason == "ended":
                raise EpisodeOverError(OVER)
            if not turn.tokens:
                raise ApiError(400, "there is no room for another token: end the episode", "context_length_exceeded")
            mark = blake2b(f"{branch} {len(tokens)}".encode(), digest_size=6).hexdigest()
            message = self.renderer.parse(turn.tokens, calls=ask.tools is not None, mark=mark)
            history.end(branch, place, turn.tokens, woven, message)
            made = True
        except EpisodeOverError as error:
            raise ApiError(409, str(error), "episode_over") from None
        except ApiError:
            raise
        except StaleFlowError as error:  # what no engine can serve
            raise ApiError(400, str(error)) from None
        finally:
            if not made:
                episode.turns -= 1
        texts = [self.renderer.decode([token]) for token in turn.tokens] if ask.logprobs and woven else []
        return Answer(branch, len(tokens), turn, message, texts, tokens if ask.ids else [])


async def _outcome(call: _Call) -> Answer:
    """Wait for a call, which goes on if whoever waits is gone."""
    try:
        return await asyncio.shield(call.task)
    except asyncio.CancelledError:
        if call.task.cancelled():
            raise ApiError(409, OVER, "episode_over") from None
        raise


def _digest(secret: str) -> bytes:
    return blake2b(secret.encode("latin-1", "replace"), digest_size=16).digest()
