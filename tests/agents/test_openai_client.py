"""OpenAI's own client, against the endpoint over a real engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.serving import END, TOOLS, USER, local, serving
from tests.agents.test_endpoint import runs, scripted
from tests.tiny_models import save_chat

openai = pytest.importorskip("openai", reason="make sets it up")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"))


def client(url: str, secret: str, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=url, api_key=secret, **options)


@runs
async def test_three_turns_streamed_and_not_are_one_branch_of_exact_tokens(folder: Path) -> None:
    async with local(folder) as (endpoint, episodes), client(endpoint.url, endpoint.open("p0/0")) as agent:
        assert [model.id async for model in agent.models.list()] == ["policy"]
        messages: list[Any] = list(USER)
        for turn in range(3):
            options = {"model": "policy", "messages": messages, "max_completion_tokens": 5, "logprobs": True}
            if turn == 1:
                text, usage = "", None
                async for chunk in await agent.chat.completions.create(
                    **options, stream=True, stream_options={"include_usage": True}
                ):
                    usage = chunk.usage or usage
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                assert usage is not None
                messages.append({"role": "assistant", "content": text})
            else:
                answer = await agent.chat.completions.create(**options)
                (choice,) = answer.choices
                usage = answer.usage
                assert len(choice.logprobs.content) == usage.completion_tokens
                messages.append(choice.message.model_dump(exclude_none=True))
            assert usage.total_tokens == len(episodes.held("p0/0"))
            messages.append({"role": "user", "content": "more"})
        assert episodes.branches("p0/0") == ["p0/0"]
        made = [version for version, _ in episodes.spans("p0/0") if version >= 0]
        assert len(made) == 3
        assert episodes.held("p0/0").count(END) >= 3


@runs
async def test_the_client_reads_tool_calls_and_sends_results_back() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    episodes = scripted(call, "it is 2", call)
    episodes.branches["p0/0"] = episodes.renderer.first(USER, TOOLS)
    async with (
        serving(episodes, episodes.renderer) as endpoint,
        client(endpoint.url, endpoint.open("p0/0")) as agent,
    ):
        answer = await agent.chat.completions.create(model="any", messages=USER, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        (found,) = message.tool_calls
        assert json.loads(found.function.arguments) == {"a": 1}
        result = {"role": "tool", "content": "2", "tool_call_id": found.id}
        answer = await agent.chat.completions.create(model="any", messages=[*USER, message, result], tools=TOOLS)
        assert answer.choices[0].message.content == "it is 2"
        assert [branch for branch, *_ in episodes.turns] == ["p0/0", "p0/0"]
        stream = await agent.chat.completions.create(model="any", messages=USER, tools=TOOLS, stream=True)
        names = [each.function.name async for chunk in stream for each in chunk.choices[0].delta.tool_calls or ()]
        assert names == ["add"]


@runs
async def test_the_clients_retry_after_a_lost_connection_is_not_sampled_again() -> None:
    episodes = scripted("one", "two")
    async with serving(episodes, episodes.renderer) as endpoint:
        port = int(endpoint.root.rpartition(":")[2])
        connections = 0

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Loses the answer of the first connection."""
            nonlocal connections
            connections += 1
            first = connections == 1
            to = await asyncio.open_connection("127.0.0.1", port)

            async def there() -> None:
                while piece := await reader.read(65536):
                    to[1].write(piece)

            sending = asyncio.create_task(there())
            while piece := await to[0].read(65536):
                if first:
                    break
                writer.write(piece)
            sending.cancel()
            to[1].close()
            writer.close()

        lossy = await asyncio.start_server(relay, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{lossy.sockets[0].getsockname()[1]}/v1"
        async with client(url, endpoint.open("p0/0"), max_retries=2) as agent:
            answer = await agent.chat.completions.create(model="any", messages=USER)
        assert connections == 2
        assert answer.choices[0].message.content == "one"
        assert len(episodes.turns) == 1
        lossy.close()


@runs
async def test_the_client_hears_at_once_that_an_episode_is_over_or_a_request_is_wrong() -> None:
    episodes = scripted()
    async with serving(episodes, episodes.renderer) as endpoint:
        secret = endpoint.open("p0/0")
        async with client(endpoint.url, secret) as agent:
            with pytest.raises(openai.BadRequestError, match="n=2 cannot be served exactly"):
                await agent.chat.completions.create(model="any", messages=USER, n=2)
            endpoint.seal("p0/0")
            with pytest.raises(openai.ConflictError) as caught:
                await agent.chat.completions.create(model="any", messages=USER)
            assert caught.value.code == "episode_over"
        async with client(endpoint.url, "sk-wrong") as agent:
            with pytest.raises(openai.AuthenticationError):
                await agent.models.list()
