"""The model of an episode, as an environment sees it: OpenAI's chat completions over a connection that stays open. ::

    model = Model("http://127.0.0.1:4811/v1", secret)
    message = await model.chat([{"role": "user", "content": "2 + 2?"}], tools=TOOLS)
    message["content"], message.get("tool_calls"), message.finish_reason

A call may take long: weights change, and instances come and go, while it waits. If the connection is lost, the same
call is sent again under its key, and nothing is made twice.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from staleflow.errors import StaleFlowError

LIMITS = ("max_turns", "context_length_exceeded")
"""Codes of errors that say that a limit of the episode was reached."""
ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
"""Before a call is sent again; each time twice as long."""
PIECE = 1 << 16


class ModelError(StaleFlowError):
    """The call cannot be answered."""


class LimitError(StaleFlowError):
    """A limit was reached. In the agent's turns it may be caught, and what there is be scored as truncated."""


class Message(dict[str, Any]):
    """A message in OpenAI's shape, to be appended to the conversation as it is."""

    finish_reason: str = "stop"
    """``stop``, ``tool_calls`` or ``length``."""


class Model:
    def __init__(self, base_url: str, api_key: str, name: str = "policy") -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.name = name
        self._at = urlsplit(base_url)
        self._idle: list[_Connection] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to find the model."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.name}

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Message:
        """The model's next message. ``LimitError`` if a limit of the episode leaves none."""
        asked: dict[str, Any] = {"model": self.name, "messages": list(messages)}
        asked |= {} if tools is None else {"tools": list(tools)}
        asked |= {} if max_tokens is None else {"max_tokens": max_tokens}
        answer = await self._post("/chat/completions", asked)
        try:
            choice = answer["choices"][0]
            message = Message(choice["message"])
            message.finish_reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ModelError(f"the endpoint answered {str(answer)[:200]}, which is not a completion") from None
        return message

    async def close(self) -> None:
        for each in self._idle:
            each.close()
        self._idle.clear()

    async def _post(self, path: str, body: Any) -> Any:
        sent = msgspec.json.encode(body)
        headers = {
            "Host": self._at.netloc,
            "Authorization": f"Bearer {self.api_key}",
            "Content-Type": "application/json",
            "Content-Length": str(len(sent)),
            "Idempotency-Key": uuid.uuid4().hex,
        }
        why = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                headers["X-Stainless-Retry-Count"] = str(attempt)
            try:
                status, answer = await self._send(path, headers, sent)
            except (OSError, EOFError, h11.ProtocolError) as error:
                why = str(error) or type(error).__name__
                continue
            if status == 200:
                return answer
            why = f"status {status}: {_said(answer)}"
            if isinstance(answer, dict) and (answer.get("error") or {}).get("code") in LIMITS:
                raise LimitError(_said(answer))
            if status < 500:
                break
        raise ModelError(f"the endpoint of the model did not answer ({why})")

    async def _send(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, Any]:
        connection = self._idle.pop() if self._idle else _Connection(self._at.hostname or "", self._at.port or 80)
        try:
            status, answer = await connection.exchange(self._at.path + path, headers, body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        try:
            return status, msgspec.json.decode(answer)
        except msgspec.DecodeError:
            return status, answer.decode(errors="replace")


class _Connection:
    """One request after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._http = h11.Connection(h11.CLIENT)
        self._writer: asyncio.StreamWriter | None = None
        self.reusable = False

    async def exchange(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        else:
            self._http.start_next_cycle()
        asked = h11.Request(method="POST", target=path, headers=list(headers.items()))
        for event in (asked, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        status, parts = 0, bytearray()
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts += event.data
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("the connection was closed")
        self.reusable = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        return status, bytes(parts)

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(PIECE))
        return event

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _said(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else answer)[:500]
