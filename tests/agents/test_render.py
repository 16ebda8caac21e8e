"""What the model made is never tokenised again: templates are held to it before anything runs."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.agents.messages import Message, MessageError, answer, hermes, key, plain
from staleflow.agents.render import Renderer, shared
from staleflow.errors import ConfigError
from tests.agents.templates import BAD, CALLS, FORGETS, GOOD, PLAIN, stops_of, words_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def renderer(template: str, prove: bool = True) -> Renderer:
    words = words_of(template)
    made = Renderer(words, stops_of(words), name="m")
    if prove:
        made.prove()
    return made


@pytest.mark.parametrize("name", GOOD)
def test_a_template_that_only_appends_is_proven(name: str) -> None:
    made = renderer(GOOD[name])
    assert made.unproven <= {"system"}
    assert made.stem


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_cannot_append_is_refused_in_one_line_with_the_fix(name: str) -> None:
    template, said = BAD[name]
    with pytest.raises(ConfigError, match=said) as caught:
        renderer(template)
    assert "\n" not in str(caught.value)
    assert "chat_template.jinja" in str(caught.value)


def test_a_template_that_forgets_reasoning_may_still_append_what_tools_say() -> None:
    made = renderer(FORGETS, prove=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match="drops the reasoning"):
            made.prove()
        made.prove(roles=("tool",))
    assert made.unproven == {"user"}
    held = made.first([{"role": "user", "content": "hi"}], TOOLS)
    assert made.extend(held, [{"role": "user", "content": "and?"}], TOOLS) is None
    assert made.extend(held, [{"role": "tool", "content": "46", "tool_call_id": "c"}], TOOLS)


texts = st.text(st.sampled_from("aehlotc dg\n:[]é🙂"), max_size=20)
asides = st.one_of(
    texts.map(lambda text: [{"role": "user", "content": text}]),
    st.lists(texts, min_size=1, max_size=3).map(
        lambda several: [{"role": "tool", "content": text, "tool_call_id": f"c{at}"} for at, text in enumerate(several)]
    ),
)


def split_otherwise(words: Any, text: str, data: st.DataObject) -> list[int]:
    """An encoding of this text that the tokenizer would not give: what a model may make."""
    pieces: list[int] = []
    rest = text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces += words.encode(rest[:cut], add_special_tokens=False)
        rest = rest[cut:]
    return pieces


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", ["plain", "calls", "spaced", "dated-unless"])
def test_a_conversation_is_its_full_rendering_but_for_the_models_own_tokens(name: str, data: st.DataObject) -> None:
    """The same conversation, with answers encoded as the tokenizer would, is token for token what the template renders;
    and with any other encoding of them, what is given stays the same."""
    made = _proven(name)
    words, tools = made.words, data.draw(st.sampled_from([None, TOOLS]))
    messages: list[Message] = [{"role": "user", "content": data.draw(texts)}]
    held = made.first(messages, tools)
    usual = list(held)
    for _ in range(data.draw(st.integers(1, 4))):
        said = data.draw(texts.filter(lambda text: text == text.strip()))
        new = data.draw(asides)
        calls = [_call(each["tool_call_id"]) for each in new if each["role"] == "tool"]
        before = words.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        messages.append({"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {}))
        ended = words.apply_chat_template(
            [*messages, *new], tools=tools, add_generation_prompt=False, return_dict=False
        )
        own = ended[len(before) :]
        own = own[: 1 + next(at for at, token in enumerate(own) if token in made.stops)]
        end = own[-1]
        odd = split_otherwise(words, words.decode(own[:-1]), data)
        extension = made.extend([*usual, *own], new, tools, calls)
        assert extension is not None
        assert made.extend([*held, *odd], new, tools, calls) == [end, *extension]
        held += [*odd, end, *extension]
        usual += [*own, *extension]
        messages += new
    assert usual == words.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert words.decode(held) == words.decode(usual)


_known: dict[str, Renderer] = {}


def _proven(name: str) -> Renderer:
    if name not in _known:
        _known[name] = renderer(GOOD[name])
    return _known[name]


def _call(name: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_made_tokens_that_would_be_encoded_otherwise_stay_as_they_were_made() -> None:
    made = renderer(CALLS)
    words = made.words
    odd = [token for letter in "hello" for token in words.encode(letter)]  # pyright: ignore[reportAttributeAccessIssue]
    assert words.decode(odd) == "hello"
    assert words.encode("hello") != odd  # pyright: ignore[reportAttributeAccessIssue]
    held = [*made.first([{"role": "user", "content": "greet me"}]), *odd]
    extension = made.extend(held, [{"role": "user", "content": "again"}])
    assert extension is not None
    assert words.decode([*held, *extension]).count("hello<|end|>") == 1
    assert extension[0] in made.stops


def test_a_message_that_the_template_refuses_is_one_line() -> None:
    made = renderer(GOOD["spaced"])
    with pytest.raises(MessageError, match="no system"):
        made.first([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}])


def test_an_answer_is_read_with_its_calls_and_its_reasoning() -> None:
    text = '<think>\nhm\n</think>\n\nwait<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    found = answer(text, hermes, "m")
    assert found["content"] == "wait"
    assert found["reasoning_content"] == "hm"
    (call,) = found["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert plain(found)["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "x", "arguments": {}}</tool_call><tool_call>3</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    assert hermes(text) == (text, [])


def test_an_answer_that_comes_back_in_other_words_is_the_same_answer() -> None:
    made = plain(
        answer('<think>hm</think> \n<tool_call>{"name": "f", "arguments": {"b": 1, "a": 2}}</tool_call>', hermes, "m")
    )
    again = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "other", "function": {"name": "f", "arguments": json.dumps({"a": 2, "b": 1})}}],
    }
    assert key(plain(again)) == key(made)
    assert key(plain(again | {"content": "more"})) != key(made)
    assert key({"role": "user", "content": "a "}) != key({"role": "user", "content": "a"})


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"role": "robot", "content": ""},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_a_message_that_no_template_takes_is_refused_in_one_line(message: Any) -> None:
    with pytest.raises(MessageError) as caught:
        plain(message)
    assert "\n" not in str(caught.value)
    assert ": give " in str(caught.value)


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_shared_counts_what_both_begin_with(one: list[int], other: list[int]) -> None:
    expected = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    assert shared(one, other) == expected


def test_the_stem_begins_every_rendering() -> None:
    made = renderer(PLAIN)
    for messages in ([{"role": "system", "content": "a"}], [{"role": "user", "content": "b"}]):
        assert made.first(messages, TOOLS)[: len(made.stem)] == made.stem


def test_ids_of_tool_calls_are_kept_where_the_template_writes_them() -> None:
    assert not renderer(CALLS)._ids  # then all calls of a tool share one stand-in
    made = renderer(CALLS.replace("<tool_response>", "<tool_response>{{ each.tool_call_id }}"))
    assert made._ids
    held = made.first([{"role": "user", "content": "x"}], TOOLS)
    for name in ("c17", "d4"):
        calls = [_call(name)]
        extension = made.extend(held, [{"role": "tool", "content": "2", "tool_call_id": name}], TOOLS, calls)
        assert f"<tool_response>{name}\n2" in made.words.decode(extension)
