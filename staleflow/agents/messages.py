"""Messages of a conversation, in OpenAI's shape: checked, compared, and read out of what the model wrote.

``plain`` makes of a client's message what a chat template takes. ``key`` is equal for messages that say the same: a
client may send an answer back without its reasoning, with other white space around it, or with the arguments of a tool
call written differently, and has not edited it. ``answer`` makes a message of the model's text; how tool calls are
written there is a *parser*: ``(text) -> (content, [(name, arguments), ...])``, ``hermes`` or the user's own.

A client sends its whole conversation with every call. A ``Conversation`` reads only what is new in it::

    known = Known()                                    # of an episode
    messages = Conversation(parts, known)              # their JSON, one after the other
    messages.keys, messages[-1]
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, overload

import msgspec

from staleflow.errors import StaleFlowError, shown
from staleflow.registry import Entry, Registry

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
Parser = Callable[[str], tuple[str, list[Call]]]

PARSERS = Registry(
    "environment.tool_calls",
    {"hermes": Entry("staleflow.agents.messages:hermes"), "none": Entry("staleflow.agents.messages:no_calls")},
    takes=("text",),
)
ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHT = "</think>"
"""Ends the reasoning of an answer."""
HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class MessageError(StaleFlowError, ValueError):
    """A message that no template can take, in one line with the fix."""


def plain(message: Any) -> Message:
    """A client's message as a chat template takes it: content as text, arguments of tool calls as values."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise MessageError(f"a message is {shown(message)}: give an object with a role of {', '.join(ROLES)}")
    role = message["role"]
    found: Message = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    found |= {name: str(message[name]) for name in ("name", "tool_call_id") if message.get(name) is not None}
    if role == "assistant":
        if thought := message.get("reasoning_content"):
            found["reasoning_content"] = str(thought)
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_call(each) for each in calls]
    return found


def key(message: Message) -> bytes:
    """Of a plain message: equal for those that say the same."""
    content = message["content"]
    if message["role"] != "assistant":
        said: list[Any] = [content, message.get("name"), message.get("tool_call_id")]
    else:
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
        said = [content.rpartition(THOUGHT)[2].strip(), calls]
    text = json.dumps([message["role"], said], sort_keys=True, separators=(",", ":"))
    return _digest(text.encode(errors="surrogatepass"))


class ToolList(list[dict[str, Any]]):
    """Tools that a client gave, and a digest of them."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.digest = digest_of(tools)


def digest_of(tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    return tools.digest if isinstance(tools, ToolList) else _digest(msgspec.json.encode(tools))


@dataclass(slots=True)
class Known:
    """What an episode's calls have said before, by digests of their bytes."""

    keys: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """Of messages."""
    tools: dict[bytes, ToolList] = field(default_factory=dict[bytes, ToolList])

    def tools_of(self, part: bytes, read: Callable[[bytes], list[dict[str, Any]] | None]) -> ToolList | None:
        """Tools by their JSON, which is ``read`` once."""
        at = _digest(part)
        if at not in self.tools and (tools := read(part)) is not None:
            self.tools[at] = ToolList(tools)
        return self.tools.get(at)


class Conversation(Sequence[Message]):
    """Plain messages by their JSON. Those that are not known are read, and refused, at once; others when asked for."""

    def __init__(self, parts: Sequence[bytes], known: Known) -> None:
        self._parts = parts
        self._read: dict[int, Message] = {}
        self.keys: list[bytes] = []
        """Of each message."""
        for at, part in enumerate(parts):
            digest = _digest(part)
            if (found := known.keys.get(digest)) is None:
                found = known.keys[digest] = key(self[at])
            self.keys.append(found)

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        if at not in self._read:
            self._read[at] = plain(msgspec.json.decode(self._parts[at]))
        return self._read[at]


def keys_of(messages: Sequence[Message]) -> list[bytes]:
    return messages.keys if isinstance(messages, Conversation) else [key(each) for each in messages]


def _digest(about: bytes) -> bytes:
    return blake2b(about, digest_size=16).digest()


def answer(text: str, parser: Parser, mark: str) -> Message:
    """The model's text as a message. ``mark`` makes the ids of its tool calls."""
    thought, ended, said = text.rpartition(THOUGHT)
    content, calls = parser(said)
    message: Message = {"role": "assistant", "content": content or None if calls else content}
    if ended:
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{mark}_{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for at, (name, arguments) in enumerate(calls)
        ]
    return message


def hermes(text: str) -> tuple[str, list[Call]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen models write it. If one of them
    cannot be read, all of it is text."""
    calls: list[Call] = []
    for each in HERMES.findall(text):
        try:
            found = json.loads(each)
            arguments = found["arguments"]
            if not isinstance(found["name"], str) or not isinstance(arguments, dict):
                return text, []
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        calls.append((found["name"], arguments))
    return (HERMES.sub("", text).strip(), calls) if calls else (text, [])


def no_calls(text: str) -> tuple[str, list[Call]]:
    return text, []


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise MessageError(f"the content of a message is {shown(content)}: give text, or a list of parts of type text")


def _call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        said = {"name": str(function["name"]), "arguments": arguments}
        return {"id": str(call.get("id", "")), "type": "function", "function": said}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise MessageError(
            f"a tool call is {shown(call)}: give an id and a function with a name and arguments as JSON"
        ) from None
