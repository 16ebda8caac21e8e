"""How messages become tokens, so that what the model made is never tokenised again.

A conversation is the rendering of its first messages, then what the model made, then an *extension* for the messages
that came after, and so on. An extension is the difference of two renderings of a stand-in conversation, with the new
messages and without; so only what is new is rendered. ::

    renderer = Renderer(tokenizer, stops={2})
    renderer.prove()                                   # or one line that says what to change
    held = renderer.first(messages, tools)             # then the model makes tokens
    held += made
    held += renderer.extend(held, [{"role": "tool", ...}], tools, message["tool_calls"])

``prove`` holds the template to it: for every role that may be appended, and after answers with text, reasoning or tool
calls, the extended tokens must be those of the whole conversation, except for the model's own text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from staleflow.agents.messages import (
    PARSERS,
    Message,
    MessageError,
    Parser,
    answer,
    digest_of,
    hermes,
    no_calls,
)
from staleflow.agents.options import Environment
from staleflow.agents.words import Words, coders
from staleflow.errors import ConfigError, line_of

Tools = Sequence[Mapping[str, Any]]

APPENDED = ("user", "tool")
"""Roles that every environment may append."""
ASKED: Message = {"role": "user", "content": "zq-asked"}
THOUGHT, SAID, TOLD, OTHER = "zq-thought", "zq-said", "zq-told", "other"
"""Words that stand in for the model's reasoning, its text, and what is appended."""
MOST_BASES = 1024
"""Stand-in conversations that are kept."""
MOST_FIRSTS = 128
"""First prompts that are kept."""
CALL: Message = {"id": "callzq001", "type": "function", "function": {"name": "zq_tool", "arguments": {"zq": 1}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "zq_tool",
        "description": "zq",
        "parameters": {"type": "object", "properties": {"zq": {"type": "integer", "description": "zq"}}},
    },
}
FIX = "give the model's folder a chat_template.jinja that"


class _Base(NamedTuple):
    text: str
    tokens: list[int]
    """Up to the token that ends the answer; empty if there is none."""
    apart: bool
    """Whether what follows it can be encoded apart from it."""
    bare: _Base | None = None
    """The same without tools, if what follows is the same with them."""


class Renderer:
    def __init__(self, words: Words, stops: Collection[int], parser: Parser = hermes, name: str = "the model") -> None:
        """``stops``: the tokens at which the model stops. ``name``: for messages to people."""
        self.words = words
        self.encode, self.decode = coders(words)
        self.stops = frozenset(stops)
        self.parser = parser
        self.name = name
        self.unproven: frozenset[str] = frozenset()
        """Roles that this template cannot append."""
        self.stem: list[int] = []
        """What every rendering begins with."""
        self._bases: dict[bytes, _Base] = {}
        self._firsts: dict[bytes, list[int]] = {}
        """The latest first prompts: all episodes of a group begin with the same."""
        self._ids = True
        """Whether the template writes the ids of tool calls."""

    @classmethod
    def of(cls, folder: Path, stops: Collection[int], parser: Parser = hermes) -> Self:
        """Of a model in Hugging Face format."""
        from transformers import AutoTokenizer

        try:
            words: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds; all mean that the tokenizer cannot be used
            raise ConfigError(f"the tokenizer of {folder} cannot be read ({line_of(error)}): save one there") from None
        if not words.chat_template:
            raise ConfigError(f"{folder} has no chat template, which agents need: save a chat_template.jinja there")
        return cls(words, stops, parser, str(folder))

    def first(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The tokens of a conversation, up to where the model answers. Raises ``MessageError``."""
        about = blake2b(json.dumps(list(messages)).encode() + digest_of(tools), digest_size=16).digest()
        if (found := self._firsts.get(about)) is None:
            try:
                found = self._tokens(messages, tools, answering=True)
            except Exception as error:  # whatever the template does
                raise MessageError(
                    f"the chat template refuses these messages ({line_of(error)}): send others"
                ) from None
            if len(self._firsts) >= MOST_FIRSTS:
                del self._firsts[next(iter(self._firsts))]
            self._firsts[about] = found
        return list(found)

    def extend(
        self,
        held: Sequence[int],
        new: Sequence[Message],
        tools: Tools | None = None,
        calls: Sequence[Message] = (),
        made: int = 0,  # noqa: ARG002
    ) -> list[int] | None:
        """What follows ``held``, which ends with an answer of the model, for these new messages, up to where it answers
        again. ``calls``: the tool calls of that answer; ``made``: the number of its tokens. None where the template
        cannot say it by tokens that follow."""
        if not self.unproven.isdisjoint(message["role"] for message in new):
            return None
        said = _said(SAID)
        if calls or new[0]["role"] == "tool":
            said["tool_calls"], new = _stood_in(calls, new, self._ids)
        try:
            base = self._base(said, new[0]["role"], tools)
            if base.bare is not None:
                base, tools = base.bare, None
            whole = self._text([ASKED, said, *new], tools, answering=True)
        except Exception:  # whatever the template does: it does not take these messages one after the other
            return None
        if not base.tokens or not whole.startswith(base.text):
            return None
        if base.apart:
            found = self.encode(whole[len(base.text) :])
        else:
            tokens = self.encode(whole)
            if tokens[: len(base.tokens)] != base.tokens:
                return None
            found = tokens[len(base.tokens) :]
        end = base.tokens[-1]
        return found if held and held[-1] == end else [end, *found]

    def text(self, tokens: Sequence[int]) -> str:
        """What the model wrote, without the token that ended it."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.stops else tokens)

    def parse(self, tokens: Sequence[int], calls: bool = True, mark: str = "") -> Message:
        """The message that the model made. ``calls``: whether tool calls are read out of it."""
        return answer(self.text(tokens), self.parser if calls else no_calls, mark or self.mark(tokens))

    def mark(self, tokens: Sequence[int]) -> str:
        return blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()

    def prove(self, roles: Collection[str] = APPENDED) -> None:
        """Find out what this template can append; ``ConfigError`` if it cannot append one of ``roles`` exactly."""
        try:
            one, other = self._tokens([ASKED], None, True), self._tokens([told("user")], None, True)
        except Exception as error:  # whatever the template does
            raise ConfigError(
                f"the chat template of {self.name} refuses a user's message ({line_of(error)}): {FIX} takes one"
            ) from None
        if self._dated():
            raise ConfigError(
                f"the chat template of {self.name} writes the date, so that the same messages are other tokens "
                f"tomorrow: {FIX} has a fixed date"
            )
        self.unproven, self._ids = frozenset(), self._writes_ids()
        problems = {role: self._problem(role) for role in {"system", *APPENDED, *roles}}
        self.unproven = frozenset(role for role, problem in problems.items() if problem)
        for role in roles:
            if problems[role]:
                raise ConfigError(f"the chat template of {self.name} {problems[role]}")
        self.stem = one[: shared(one, other)]
        for first in ([{"role": "system", "content": TOLD}, ASKED], [ASKED]):
            try:
                other = self._tokens(first, [TOOL], True)
            except Exception:  # a template without system messages, or tools
                continue
            self.stem = self.stem[: shared(self.stem, other)]
        if not self.stem:
            raise ConfigError(
                f"the chat template of {self.name} begins no two conversations with the same token: {FIX} begins with "
                "one, such as a beginning of text"
            )

    def _problem(self, role: str) -> str | None:
        """Why this role cannot be appended, with the fix; None if it can."""
        if role == "tool":
            answers = [called(""), called(SAID), called(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}")]
        else:
            answers = [_said(SAID), _said(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}")]
        for tools in (None, [TOOL]):
            for said in answers:
                try:
                    problem = self._extends(role, said, tools)
                except Exception as error:  # whatever the template does
                    problem = (
                        f"cannot append a {role} message ({line_of(error)}): {FIX} can, or leave {role} out of "
                        "environment.appends if no environment sends one"
                    )
                if problem:
                    return problem
        return None

    def _extends(self, role: str, said: Message, tools: Tools | None) -> str | None:
        new = told(role)
        before = self._text([ASKED], tools, False)
        whole = self._text([ASKED, said, new], tools, True)
        otherwise = f"or leave {role} out of environment.appends: then each such message opens a branch"
        if not whole.startswith(before):
            return f"writes a message otherwise when others follow it: {FIX} does not"
        if THOUGHT in said["content"] and THOUGHT not in whole:
            return (
                f"drops the reasoning of an answer when a {role} message follows, so that a conversation does not "
                f"extend the one before: {FIX} keeps it, {otherwise}"
            )
        if TOLD not in whole:
            return f"leaves out {role} messages: {FIX} writes them, {otherwise}"
        if not (base := self._base(said, role, tools)).tokens:
            return (
                "does not end an answer by a token at which the model stops "
                f"({', '.join(map(str, sorted(self.stops)))}): {FIX} does, or add its token to eos_token_id in "
                "generation_config.json"
            )
        extension = self.extend(base.tokens, [new], tools, said.get("tool_calls", ()))
        longer = [ASKED, said, new, said, new]
        if (
            extension is None
            or not self._text(longer, tools, True).startswith(self._text([ASKED, said, new], tools, False))
            or self._tokens(longer, tools, True)[-len(extension) :] != extension
        ):
            return f"changes what it wrote when a {role} message follows: {FIX} only appends, {otherwise}"
        return None

    def _writes_ids(self) -> bool:
        other = [called(SAID) | {"tool_calls": [CALL | {"id": OTHER}]}, told("tool") | {"tool_call_id": OTHER}]
        try:
            one = self._text([ASKED, called(SAID), told("tool")], None, True)
            return one != self._text([ASKED, *other], None, True)
        except Exception:  # a template without tools, or that wants its own kind of ids
            return True

    def _dated(self) -> bool:
        """Whether a rendering depends on the clock: the template's clock cannot be called then."""
        try:
            return self._tokens([ASKED], None, True, strftime_now="") != self._tokens([ASKED], None, True)
        except Exception:  # it was called
            return True

    def _base(self, said: Message, role: str, tools: Tools | None) -> _Base:
        """The stand-in conversation up to the token that ends its answer, if a message of this role follows."""
        about = json.dumps([said, role], sort_keys=True).encode(errors="surrogatepass")
        key = blake2b(about + digest_of(tools), digest_size=16).digest()
        if key not in self._bases:
            if len(self._bases) >= MOST_BASES:
                self._bases.clear()
            self._bases[key] = self._found(said, role, tools)
        return self._bases[key]

    def _found(self, said: Message, role: str, tools: Tools | None) -> _Base:
        one, other = self._stand_ins(said, role, tools)
        tokens = self.encode(one)
        both = tokens[: shared(tokens, self.encode(other))]
        ends = [at for at, token in enumerate(both) if token in self.stops]
        if not ends:
            return _Base("", [], False)
        end = self.words.decode(tokens[ends[-1] : ends[-1] + 1])
        text = one[: one.rindex(end, 0, one.rindex(TOLD)) + len(end)]
        apart = tokens == [*self.encode(text), *self.encode(one[len(text) :])]
        bare = self._base(said, role, None) if tools and apart else None
        if bare is not None:
            plain = [each[len(bare.text) :] for each in self._stand_ins(said, role, None)]
            if not bare.apart or plain != [each[len(text) :] for each in (one, other)]:
                bare = None
        return _Base(text, tokens[: ends[-1] + 1], apart, bare)

    def _stand_ins(self, said: Message, role: str, tools: Tools | None) -> list[str]:
        """Two conversations that differ only in what follows the answer."""
        contents = (TOLD, OTHER)
        return [self._text([ASKED, said, told(role) | {"content": each}], tools, answering=True) for each in contents]

    def _tokens(self, messages: Sequence[Message], tools: Tools | None, answering: bool, **arguments: Any) -> list[int]:
        return self.words.apply_chat_template(
            list(messages), tools=tools or None, add_generation_prompt=answering, return_dict=False, **arguments
        )

    def _text(self, messages: Sequence[Message], tools: Tools | None, answering: bool) -> str:
        return self.words.apply_chat_template(
            list(messages), tools=tools or None, add_generation_prompt=answering, tokenize=False
        )


def opened(folder: Path, stops: Collection[int], options: Environment) -> Renderer:
    """The renderer that the configuration names, proven for this model, or ``ConfigError``."""
    if options.renderer == "builtin":
        renderer = Renderer.of(folder, stops, PARSERS.load(options.tool_calls))
    else:
        from staleflow.agents.packaged import PackagedRenderer

        renderer = PackagedRenderer.made(folder, stops, options.renderer, options.renderer_arguments)
    renderer.prove(options.appends)
    return renderer


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low = 0
    while most - low > 1:  # one[:low] == other[:low], one[:most] != other[:most]
        middle = (low + most) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            most = middle
    return low


def _stood_in(calls: Sequence[Message], new: Sequence[Message], ids: bool) -> tuple[list[Message], list[Message]]:
    """Tool calls that stand in for those of the model, and the new messages, which answer them. Without ``ids`` they
    are the same for all calls of the same tools."""
    calls = calls or [CALL | {"id": each.get("tool_call_id", "")} for each in new if each["role"] == "tool"]
    names = {each["id"]: each["id"] if ids else f"callzq{at:03}" for at, each in enumerate(calls)}
    stand_in = [
        CALL | {"id": names[each["id"]], "function": CALL["function"] | {"name": each["function"]["name"]}}
        for each in calls
    ]
    told = [
        each | {"tool_call_id": names.get(each["tool_call_id"], each["tool_call_id"])}
        if "tool_call_id" in each
        else each
        for each in new
    ]
    return stand_in, told


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def called(content: str) -> Message:
    return _said(content) | {"tool_calls": [CALL]}


def told(role: str) -> Message:
    return {"role": role, "content": TOLD} | ({"tool_call_id": CALL["id"], "name": "zq_tool"} if role == "tool" else {})
