"""OpenAI's chat completions, and vLLM's tokens in and out, as they cross the wire: what is asked, checked, and the
shape of answers.

What a run cannot serve exactly is refused in one line: several answers to one call, another temperature than the one
that tokens are trained with, a grammar.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from staleflow.agents.messages import Conversation, Known, Message, MessageError, ToolList
from staleflow.agents.turns import Turn
from staleflow.errors import StaleFlowError, shown
from staleflow.rollout.options import Sampling

ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "prompt_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "echo": (False,),
}
"""Fields that are served only with these values, or null."""
DRAWN = ("temperature", "top_p", "top_k", "min_p")
"""Fields that must say what the run has."""
UNHEARD = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority")
UNHEARD += ("prompt_cache_retention", "cache_salt", "skip_special_tokens", "spaces_between_special_tokens")
"""Fields that change nothing about an answer."""
CHAT = ("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop")
CHAT += ("logprobs", "top_logprobs", "return_token_ids")
TOKENS = ("token_ids", "sampling_params", "request_id", "stream")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PARAMETERS = ("max_tokens", "logprobs", "stop", "stop_token_ids", "detokenize", "output_kind")


class ApiError(StaleFlowError):
    """An answer in OpenAI's shape that says what was wrong."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode(
            {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}},
        )


class Ask(NamedTuple):
    """One call, checked."""

    limit: int = 0
    messages: Sequence[Message] = ()
    tools: ToolList | None = None
    tokens: tuple[int, ...] = ()
    """Of a call by tokens."""
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    logprobs: bool = False
    ids: bool = False
    """Whether the answer has the ids of tokens."""
    request: str = ""


def chat(body: bytes, sampling: Sampling, known: Known) -> Ask:
    """``known``: what the episode has said before, which is not read again."""
    parts = _parts(body)
    messages, tools = parts.pop("messages", None), parts.pop("tools", None)
    asked: dict[str, Any] = {name: _read(part) for name, part in parts.items()}
    _served(asked, sampling, CHAT)
    said = _conversation(messages, known)
    if said[-1]["role"] == "assistant":
        raise ApiError(400, "the last message is the assistant's: end with one that it answers")
    if asked.get("top_logprobs"):
        raise ApiError(400, f"top_logprobs={shown(asked['top_logprobs'])}: only drawn tokens have one: leave it out")
    options = asked.get("stream_options") or {}
    return Ask(
        limit=_limit(asked, "max_completion_tokens") or _limit(asked, "max_tokens"),
        messages=said,
        tools=None if tools is None else known.tools_of(tools, _tools),
        stream=bool(asked.get("stream")),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(asked.get("logprobs")),
        ids=bool(asked.get("return_token_ids")),
    )


def tokens(body: bytes, sampling: Sampling) -> Ask:
    asked = _object(body)
    _served(asked, sampling, TOKENS)
    if asked.get("stream"):
        raise ApiError(400, "stream=true: tokens are answered at once: leave it out")
    ids = asked.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise ApiError(400, "token_ids is missing or wrong: give a list of token ids")
    parameters = asked.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise ApiError(400, f"sampling_params is {shown(parameters)}: give an object")
    _served(parameters, sampling, PARAMETERS)
    if set(parameters.get("stop_token_ids") or ()) - set(sampling.stop_tokens):
        raise ApiError(400, "stop_token_ids has others than the model's own: leave it out")
    logprobs = parameters.get("logprobs")
    if logprobs not in (None, 0, 1, False, True):
        raise ApiError(400, f"logprobs={shown(logprobs)}: only drawn tokens have one: give 0 or 1")
    return Ask(
        limit=_limit(parameters, "max_tokens"),
        tokens=tuple(ids),
        logprobs=logprobs is not None and logprobs is not False,
        request=str(asked.get("request_id") or ""),
    )


def _conversation(part: bytes | None, known: Known) -> Conversation:
    try:
        if part is not None and (messages := msgspec.json.decode(part, type=list[msgspec.Raw])):
            return Conversation(messages, known)
    except MessageError as error:
        raise ApiError(400, str(error)) from None
    except msgspec.ValidationError:
        pass  # it is not a list
    except UNREADABLE as error:
        raise _no_json(error) from None
    raise ApiError(400, "messages is missing: give a list of at least one message")


def _tools(part: bytes) -> list[dict[str, Any]] | None:
    tools = _read(part)
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise ApiError(400, f"tools is {shown(tools)}: give a list of objects")
    return tools or None


def _object(body: bytes) -> dict[str, Any]:
    found = _read(body)
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {shown(found)}: send an object")
    return found


def _parts(body: bytes) -> dict[str, msgspec.Raw]:
    """The JSON of each field of an object."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        _object(body)  # says what is wrong
        raise


def _read(part: bytes) -> Any:
    try:
        return msgspec.json.decode(part)
    except UNREADABLE as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> ApiError:
    return ApiError(400, f"the body is not JSON ({error}): send an object")


def _served(asked: Mapping[str, Any], sampling: Sampling, known: Sequence[str]) -> None:
    for name, value in asked.items():
        if value is None or name in known or name in UNHEARD:
            continue
        if name in DRAWN:
            run = getattr(sampling, name)
            if value != run and not (name == "top_k" and run == 0 and value == -1):
                raise ApiError(
                    400, f"{name}={shown(value)} is not the run's {run}: leave it out, or give rollout.{name}={value}"
                )
        elif value not in ONLY.get(name, ()):
            raise ApiError(400, f"{name}={shown(value)} cannot be served exactly: leave it out")
    stop = asked.get("stop") or []
    if set([stop] if isinstance(stop, str) else stop) - set(sampling.stop_strings):
        raise ApiError(400, f"stop={shown(stop)} is not the run's: leave it out, or give rollout.stop_strings")


def _limit(asked: Mapping[str, Any], name: str) -> int:
    value = asked.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ApiError(400, f"{name}={shown(value)}: give a whole number of at least 1")
    return value or 0


class Answer(NamedTuple):
    """What came of a call."""

    branch: str
    asked: int
    """Tokens before it."""
    turn: Turn
    message: Message
    texts: list[str]
    """Of each token, if log-probabilities were asked for."""
    prompt: list[int]
    """The tokens before it, if ids were asked for: a call is kept until its episode ends."""

    @property
    def reason(self) -> str:
        if self.turn.reason != "stop":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    @property
    def _head(self) -> dict[str, Any]:
        name = f"chatcmpl-{self.branch}-{self.asked}"
        return {"id": name, "created": int(time.time())}

    @property
    def _usage(self) -> dict[str, int]:
        made = len(self.turn.tokens)
        return {"prompt_tokens": self.asked, "completion_tokens": made, "total_tokens": self.asked + made}

    def _logprobs(self) -> dict[str, Any]:
        texts = self.texts or [f"token_id:{token}" for token in self.turn.tokens]
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, self.turn.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def chat(self, ask: Ask, model: str) -> bytes:
        choice: dict[str, Any] = {"index": 0, "message": self.message, "finish_reason": self.reason}
        choice["logprobs"] = self._logprobs() if ask.logprobs else None
        found = self._head | {"object": "chat.completion", "model": model, "choices": [choice], "usage": self._usage}
        if ask.ids:
            choice["token_ids"], found["prompt_token_ids"] = self.turn.tokens, self.prompt
        return msgspec.json.encode(found)

    def chunks(self, ask: Ask, model: str) -> list[bytes]:
        """The answer as events."""
        head = self._head | {"object": "chat.completion.chunk", "model": model}
        said = {name: self.message[name] for name in ("reasoning_content", "content") if self.message.get(name)}
        calls = [{"index": at, **each} for at, each in enumerate(self.message.get("tool_calls", ()))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, said]
        deltas += [{"tool_calls": [each]} for each in calls]
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas if delta]
        choices[-1]["logprobs"] = self._logprobs() if ask.logprobs else None
        if ask.ids:
            choices[-1]["token_ids"] = self.turn.tokens
        choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.reason})
        found: list[dict[str, Any]] = [head | {"choices": [choice]} for choice in choices]
        if ask.usage:
            found.append(head | {"choices": [], "usage": self._usage})
        return [b"data: " + msgspec.json.encode(each) + b"\n\n" for each in found] + [b"data: [DONE]\n\n"]

    def tokens(self, ask: Ask) -> bytes:
        choice = {"index": 0, "token_ids": self.turn.tokens, "finish_reason": self.reason}
        choice["logprobs"] = self._logprobs() if ask.logprobs else None
        request = ask.request or f"{self.branch}-{self.asked}"
        return msgspec.json.encode({"request_id": request, "choices": [choice], "prompt_logprobs": None})
