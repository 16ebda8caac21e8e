"""The endpoint: one call is one turn, a retry is never sampled again, an edit opens a branch, the end is the end."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from staleflow.agents.render import Renderer
from staleflow.rollout.engine import Request
from staleflow.rollout.options import Sampling
from staleflow.rollout.server import Server
from tests.agents.serving import TOOLS, USER, Scripted, Wire, error, local, said, serving
from tests.agents.templates import CALLS, stops_of, words_of
from tests.tiny_models import save_chat


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"))


def scripted(*texts: str) -> Scripted:
    words = words_of(CALLS)
    renderer = Renderer(words, stops_of(words))
    episodes = Scripted(renderer, texts)
    episodes.begin("p0/0", renderer.first(USER))
    return episodes


@runs
async def test_turns_of_a_conversation_extend_one_branch_by_what_is_new(folder: Path) -> None:
    async with local(folder) as (endpoint, episodes):
        wire = Wire(endpoint, endpoint.open("p0/0"))
        messages: list[Any] = list(USER)
        made: list[int] = []
        for turn in range(3):
            answer = await wire.ask({"messages": messages, "max_tokens": 6, "return_token_ids": True, "logprobs": True})
            status, body = answer
            choice = body["choices"][0]
            assert status == 200
            assert body["prompt_token_ids"] + choice["token_ids"] == episodes.held("p0/0")
            assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(
                episodes.row("p0/0", 0.0).logprobs[-len(choice["token_ids"]) :].tolist()
            )
            assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
            assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == 256 else "length")
            made += choice["token_ids"]
            messages += [said(answer), {"role": "user", "content": f"more {turn}"}]
        row = episodes.row("p0/0", 1.0)
        mask = [version for version, count in row.spans for _ in range(count)]
        assert [token for token, version in zip(row.tokens, mask, strict=True) if version >= 0] == made
        assert [logprob for logprob, version in zip(row.logprobs, mask, strict=True) if version < 0].count(0.0) > 0
        assert episodes.branches("p0/0") == ["p0/0"]


@runs
async def test_an_edited_history_opens_a_branch_where_the_tokens_part() -> None:
    episodes = scripted("first", "second", "third", "fourth")
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        one = said(await wire.ask({"messages": USER}))
        talk = [*USER, one, {"role": "user", "content": "go on"}]
        two = said(await wire.ask({"messages": talk}))
        edited = [*talk, two | {"content": "I said otherwise"}, {"role": "user", "content": "really?"}]
        await wire.ask({"messages": edited})
        branch, at, given, _ = episodes.turns[-1]
        assert branch == "p0/0~1"
        assert episodes.branches[branch][: at + len(given)] == [
            *episodes.branches["p0/0"][:at],
            *given,
        ]
        text = episodes.renderer.words.decode(episodes.branches[branch])
        assert "first<|end|>" in text
        assert "I said otherwise<|end|>" in text
        assert "second" not in text
        # an answer that is kept stands for the tokens that were made, also where what came before it was edited
        before = [{"role": "user", "content": "hello"}, *talk[1:]]
        await wire.ask({"messages": before})
        branch, at, given, _ = episodes.turns[-1]
        assert branch == "p0/0~2"
        odd = [token for letter in "first" for token in words_of(CALLS).encode(letter)]
        held = [*episodes.branches[branch][:at], *given]
        assert any(held[start : start + len(odd)] == odd for start in range(len(held)))


@runs
async def test_the_same_call_again_is_another_sample_on_a_branch() -> None:
    episodes = scripted("one", "two")
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        assert said(await wire.ask({"messages": USER}))["content"] == "one"
        assert said(await wire.ask({"messages": USER}))["content"] == "two"
        assert [branch for branch, *_ in episodes.turns] == ["p0/0", "p0/0~1"]


@runs
async def test_a_conversation_of_its_own_is_a_branch() -> None:
    episodes = scripted("main", "sub", "more", "sub again")
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        main = [*USER, said(await wire.ask({"messages": USER})), {"role": "user", "content": "b"}]
        sub: list[Any] = [{"role": "system", "content": "You summarise."}, {"role": "user", "content": "this"}]
        sub += [said(await wire.ask({"messages": sub})), {"role": "user", "content": "shorter"}]
        await wire.ask({"messages": main})
        await wire.ask({"messages": sub})
        assert [branch for branch, *_ in episodes.turns] == ["p0/0", "p0/0~1", "p0/0", "p0/0~1"]


@pytest.mark.parametrize(
    "mark",
    [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}],
    ids=["of OpenAI's client", "idempotency key"],
)
@runs
async def test_a_marked_retry_is_answered_by_what_was_made(mark: dict[str, str]) -> None:
    episodes = scripted("one", "two")
    async with serving(episodes, episodes.renderer) as endpoint:
        secret = endpoint.open("p0/0")
        first = mark if "idempotency_key" in mark else {}
        one = await Wire(endpoint, secret).ask({"messages": USER}, **first)
        again = await Wire(endpoint, secret).ask({"messages": USER}, **mark)
        assert one == again
        assert len(episodes.turns) == 1


@runs
async def test_a_retry_joins_the_call_that_is_still_in_flight() -> None:
    episodes = scripted("one", "two")
    episodes.gate.clear()
    async with serving(episodes, episodes.renderer) as endpoint:
        secret = endpoint.open("p0/0")
        one, again = Wire(endpoint, secret), Wire(endpoint, secret)
        await one.send({"messages": USER})
        await again.send({"messages": USER}, x_stainless_retry_count="1")
        while len(endpoint._names["p0/0"].by_body) < 1:
            await asyncio.sleep(0)
        assert endpoint.calls("p0/0") == 1
        episodes.gate.set()
        assert said(await one.answer()) == said(await again.answer())
        assert len(episodes.turns) == 1
        assert endpoint.calls("p0/0") == 0


@runs
async def test_the_same_call_after_a_lost_connection_is_not_sampled_again() -> None:
    episodes = scripted("one", "two")
    episodes.gate.clear()
    async with serving(episodes, episodes.renderer) as endpoint:
        secret = endpoint.open("p0/0")
        lost = Wire(endpoint, secret)
        await lost.send({"messages": USER})
        while not episodes.turns:
            await asyncio.sleep(0)
        lost.close()
        (call,) = endpoint._names["p0/0"].by_body.values()
        while not call.lost:
            await asyncio.sleep(0)
        again = Wire(endpoint, secret)
        await again.send({"messages": USER})
        episodes.gate.set()
        assert said(await again.answer())["content"] == "one"
        assert len(episodes.turns) == 1
        # and once it was delivered, the same call is another one
        assert said(await again.ask({"messages": USER}))["content"] == "two"


@runs
async def test_a_key_that_was_used_for_another_request_is_refused() -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        await wire.ask({"messages": USER}, idempotency_key="k")
        status, message, _ = error(await wire.ask({"messages": USER, "max_tokens": 3}, idempotency_key="k"))
        assert status == 400
        assert "another request" in message


@runs
async def test_nothing_is_made_for_a_sealed_episode_and_calls_in_flight_end() -> None:
    episodes = scripted()
    episodes.gate.clear()
    async with serving(episodes, episodes.renderer) as endpoint:
        secret = endpoint.open("p0/0")
        wire, stream = Wire(endpoint, secret), Wire(endpoint, secret)
        await wire.send({"messages": USER})
        await stream.send({"messages": USER, "stream": True})
        while len(episodes.turns) < 2:
            await asyncio.sleep(0)
        endpoint.seal("p0/0")
        assert error(await wire.answer())[::2] == (409, "episode_over")
        assert "episode_over" in (await stream.answer())[1]
        assert error(await wire.ask({"messages": USER}))[::2] == (409, "episode_over")
        assert error(await Wire(endpoint, "sk-other").ask({"messages": USER}))[::2] == (401, "invalid_api_key")
        again = endpoint.open("p0/0")
        assert again != secret
        assert error(await wire.ask({"messages": USER}))[::2] == (409, "episode_over")


@runs
async def test_a_secret_opens_only_its_own_episode() -> None:
    episodes = scripted("a", "b")
    episodes.begin("p1/0", episodes.renderer.first(USER))
    async with serving(episodes, episodes.renderer) as endpoint:
        one, other = endpoint.open("p0/0"), endpoint.open("p1/0")
        await Wire(endpoint, other).ask({"messages": USER})
        await Wire(endpoint, one).ask({"messages": USER})
        assert [branch for branch, *_ in episodes.turns] == ["p1/0", "p0/0"]


@runs
async def test_tool_calls_are_read_and_their_results_appended() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    episodes = scripted(f"let me see {call}", "2", call)
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        episodes.branches["p0/0"] = episodes.renderer.first(USER, TOOLS)
        wire = Wire(endpoint, endpoint.open("p0/0"))
        status, body = await wire.ask({"messages": USER, "tools": TOOLS})
        message = said((status, body))
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] == "let me see"
        (found,) = message["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"a": 1}
        messages = [*USER, message, {"role": "tool", "content": "2", "tool_call_id": found["id"]}]
        assert said(await wire.ask({"messages": messages, "tools": TOOLS}))["content"] == "2"
        assert {branch for branch, *_ in episodes.turns} == {"p0/0"}
        # without tools nothing is read out of the text
        assert said(await wire.ask({"messages": [{"role": "user", "content": "x"}]}))["content"] == call


@runs
async def test_a_stream_says_that_it_waits_and_then_the_same_as_an_answer() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    episodes = scripted(f"<think>\nhm\n</think>\n\nso {call}")
    episodes.gate.clear()
    async with serving(episodes, episodes.renderer, beat_s=0.001) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        await wire.send({"messages": USER, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}})
        assert wire.reader is not None
        await wire.reader.readuntil(b": waiting for the model")
        episodes.gate.set()
        text = (await wire.reader.readuntil(b"data: [DONE]\n\n")).decode()
        chunks = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "so"
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
        assert [each["function"]["name"] for delta in deltas for each in delta.get("tool_calls", ())] == ["add"]
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "tool_calls"
        assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "said_of_it"),
    [
        ({"n": 2}, "n=2 cannot be served exactly"),
        ({"best_of": 2}, "best_of=2"),
        ({"temperature": 0.5}, "temperature=0.5 is not the run's 1.0"),
        ({"top_p": 0.9}, "rollout.top_p=0.9"),
        ({"stop": ["x"]}, "rollout.stop_strings"),
        ({"seed": 3}, "seed=3"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs=3"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": "many"}, "max_tokens='many'"),
        ({"messages": []}, "messages is missing"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content of a message"),
        ({"guided_json": {}}, "guided_json={} cannot be served exactly"),
        ({"tools": {}}, None),
        ({"tools": [3]}, "tools is [3]"),
    ],
)
@runs
async def test_what_cannot_be_served_exactly_is_refused_in_one_line(body: dict[str, Any], said_of_it: str) -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        answer = await wire.ask({"messages": USER} | body)
        if said_of_it is None:
            assert answer[0] == 200
            return
        status, message, _ = error(answer)
        assert status == 400
        assert said_of_it in message
        assert not episodes.turns


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff"])
@runs
async def test_a_body_that_is_not_a_request_is_refused_in_one_line(body: bytes) -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        assert error(await wire.ask(body))[0] == 400
        assert error(await wire.ask({"messages": USER}, "/v1/nothing"))[0] == 404
        assert error(await wire.ask({"messages": USER}, "/v1/models"))[0] == 405
        await wire.send(b"", "/v1/models", "GET")
        status, found = await wire.answer()
        assert (status, found["data"][0]["id"]) == (200, "policy")


@runs
async def test_something_that_is_not_http_ends_its_connection_and_nothing_else() -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert (await wire.ask({"messages": USER}))[0] == 200


@runs
async def test_a_further_turn_than_allowed_is_refused_and_a_retry_is_not_a_turn() -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer, max_turns=2) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        await wire.ask({"messages": USER})
        await wire.ask({"messages": USER}, x_stainless_retry_count="1")
        await wire.ask({"messages": USER})
        assert error(await wire.ask({"messages": USER}))[::2] == (400, "max_turns")
        assert len(episodes.turns) == 2


@runs
async def test_an_episode_without_room_for_a_token_says_so_as_openai_does(folder: Path) -> None:
    async with local(folder, max_tokens=4) as (endpoint, _):
        wire = Wire(endpoint, endpoint.open("p0/0"))
        messages: list[Any] = list(USER)
        while (answer := await wire.ask({"messages": messages}))[0] == 200:
            messages += [said(answer), {"role": "user", "content": "x"}]
        assert error(answer)[::2] == (400, "context_length_exceeded")


@runs
async def test_tokens_in_and_out_continue_the_branch_that_they_extend(folder: Path) -> None:
    async with local(folder) as (endpoint, episodes):
        wire = Wire(endpoint, endpoint.open("p0/0"))
        tokens = episodes.held("p0/0")
        for _ in range(2):
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 4, "logprobs": 0, "temperature": 1.0}}
            status, found = await wire.ask(body, "/inference/v1/generate")
            choice = found["choices"][0]
            assert status == 200
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            tokens = [*tokens, *choice["token_ids"]]
            assert episodes.held("p0/0") == tokens
            tokens = [*tokens, 5, 6]
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 4}, "request_id": "r"}
        one = await wire.ask(body, "/inference/v1/generate")
        assert await wire.ask(body, "/inference/v1/generate") == one
        assert one[1]["request_id"] == "r"
        assert episodes.branches("p0/0") == ["p0/0"]


@runs
async def test_the_evaluators_client_of_token_servers_can_talk_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local(folder) as (endpoint, episodes):
        monkeypatch.setenv("OPENAI_API_KEY", endpoint.open("p0/0"))
        server = Server(f"{endpoint.root}/inference/v1/generate", folder)
        request = Request("x", 1, episodes.held("p0/0"), sampling=Sampling(max_tokens=5, stop_tokens=(256,), seed=None))
        ((_, tokens),) = await asyncio.to_thread(lambda: list(server.respond([request])))
        assert episodes.held("p0/0")[-len(tokens) :] == tokens


@runs
async def test_a_conversation_that_no_engine_can_hold_is_refused_and_the_next_is_served(folder: Path) -> None:
    async with local(folder) as (endpoint, _):
        wire = Wire(endpoint, endpoint.open("p0/0"))
        first = said(await wire.ask({"messages": USER, "max_tokens": 2}))
        long = [*USER, first, {"role": "user", "content": "x" * 600}]
        status, message, _code = error(await wire.ask({"messages": long}))
        assert status == 400
        assert "p0/0" in message
        assert said(await wire.ask({"messages": [*long[:-1], {"role": "user", "content": "x"}], "max_tokens": 2}))
