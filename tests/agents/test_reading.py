"""A conversation that comes again with every call is read once, and means the same as if it were read each time."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.agents import wire
from staleflow.agents.messages import Conversation, Known, MessageError, ToolList, digest_of, key, keys_of, plain
from staleflow.agents.render import Renderer
from staleflow.agents.wire import ApiError
from staleflow.agents.words import TRIED, coders
from staleflow.rollout.options import Sampling
from tests.agents.serving import TOOLS, USER
from tests.agents.templates import GOOD, PLAIN, stops_of, words_of

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": "é"}'}}
MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "<think>x</think> yes "},
    {"role": "tool", "content": "46", "tool_call_id": "c1"},
]
spellings = st.sampled_from([None, 0, 2])
calls = st.lists(st.lists(st.tuples(st.sampled_from(MESSAGES), spellings), min_size=1, max_size=6), max_size=5)


@given(calls)
def test_what_is_known_means_the_same_as_what_is_read(said: list[list[tuple[Any, int | None]]]) -> None:
    known = Known()
    for each in said:
        parts = [json.dumps(message, indent=indent).encode() for message, indent in each]
        read = Conversation(parts, known)
        expected = [plain(message) for message, _ in each]
        assert read.keys == keys_of(expected) == [key(message) for message in expected]
        assert (len(read), list(read), read[-1], read[1:]) == (len(each), expected, expected[-1], expected[1:])


def test_a_known_message_is_not_read_again() -> None:
    known, parts = Known(), [msgspec.json.encode(each) for each in MESSAGES]
    Conversation(parts, known)
    again = Conversation([*parts, b'{"role": "user", "content": "new"}'], known)
    assert list(again._read) == [len(parts)]


def test_tools_are_read_once_and_are_the_same_however_they_are_spaced() -> None:
    known = Known()
    asked = [json.dumps({"messages": USER, "tools": TOOLS}, indent=indent).encode() for indent in (None, None, 2)]
    one, same, spaced = (wire.chat(each, Sampling(), known).tools for each in asked)
    assert one is same
    assert isinstance(one, ToolList)
    assert isinstance(spaced, ToolList)
    assert one == spaced == TOOLS
    assert digest_of(one) == digest_of(spaced) == digest_of(TOOLS)
    assert wire.chat(json.dumps({"messages": USER, "tools": None}).encode(), Sampling(), known).tools is None
    assert wire.chat(json.dumps({"messages": USER, "tools": []}).encode(), Sampling(), known).tools is None


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b'"x"',
        b'{"messages": [{"role": "user", "content": "a]}',
        b'{"messages": [{"role": "user", "content": tru}]}',
        b'{"messages": {}}',
        b'{"messages": []}',
        b'{"messages": ["x"]}',
        b'{"messages": null}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": 3}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": ["x"]}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": }',
    ],
)
def test_a_part_that_cannot_be_read_is_refused_in_one_line_each_time(body: bytes) -> None:
    known = Known()
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            wire.chat(body, Sampling(), known)
        assert caught.value.status == 400
        assert "\n" not in str(caught.value)


def test_rust_encodes_and_decodes_as_the_tokenizer_does() -> None:
    words: Any = words_of(PLAIN)
    words.backend_tokenizer.enable_truncation(2)
    encode, decode = coders(words)
    assert encode.__name__ == "encode_in_rust"
    for text in (*TRIED, "the cat said hello to the dog, and 46 of them.\n" * 3, "<|end|>a<|end|>"):
        tokens = words.encode(text, add_special_tokens=False)
        assert encode(text) == tokens
        assert decode(tokens) == words.decode(tokens)


def test_a_tokenizer_that_does_more_than_its_part_in_rust_is_asked_itself() -> None:
    class Shouting:
        def __init__(self) -> None:
            self.words: Any = words_of(PLAIN)
            self.backend_tokenizer, self.all_special_ids = self.words.backend_tokenizer, self.words.all_special_ids

        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            return self.words.apply_chat_template(conversation, **options)

        def encode(self, text: str, **options: Any) -> Any:
            return self.words.encode(text, **options)

        def decode(self, token_ids: Any, **options: Any) -> str:
            return self.words.decode(token_ids, **options).upper()

    encode, decode = coders(Shouting())
    assert decode(encode("hello")) == "HELLO"


@pytest.mark.parametrize("name", GOOD)
def test_an_extension_without_the_tools_is_the_one_with_them(name: str) -> None:
    words: Any = words_of(GOOD[name])
    renderer = Renderer(words, stops_of(words))
    renderer.prove()
    held = renderer.first(USER, TOOLS)
    new = [{"role": "user", "content": "and the dog?"}]
    said = {"role": "assistant", "content": "zq-said"}
    whole = words.apply_chat_template([*USER, said, *new], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    extension = renderer.extend([*held, *renderer.stops], new, TOOLS)
    assert extension is not None
    assert whole.endswith(renderer.decode(extension))


def test_a_template_that_tells_of_its_tools_in_every_turn_gets_them() -> None:
    told = "{{ each.content }}{% if tools %} [{{ tools | length }} tools]{% endif %}"
    words: Any = words_of(PLAIN.replace("{{ each.content }}", told))
    renderer = Renderer(words, stops_of(words))
    renderer.prove()
    new = [{"role": "user", "content": "and the dog?"}]
    for tools in (None, TOOLS, [*TOOLS, *TOOLS]):
        extension = renderer.extend([*renderer.stops], new, tools)
        assert extension is not None
        assert f"dog?{f' [{len(tools)} tools]' if tools else ''}<|end|>" in renderer.decode(extension)


def test_episodes_that_begin_alike_are_rendered_once_and_share_no_list() -> None:
    words: Any = words_of(PLAIN)
    renderer = Renderer(words, stops_of(words))
    first = renderer.first(USER, TOOLS)
    words.chat_template = "{{ raise_exception('it is not asked again') }}"
    first.append(1)
    assert renderer.first(USER, ToolList(TOOLS)) == first[:-1]
    with pytest.raises(MessageError, match="refuses these messages"):
        renderer.first(USER)
