"""Bound 0 with three turns through the endpoint, from messages to updates, equals a plain loop over tokens."""

import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from staleflow.agents.endpoint import CHAT, Endpoint
from staleflow.agents.http import Asked
from staleflow.agents.outcome import Outcome, scored
from staleflow.agents.render import Renderer
from staleflow.rollout.options import Sampling
from staleflow.runtime.episodes import Episodes
from staleflow.tasks.task import Problem
from tests.runtime import played
from tests.runtime.fakes import virtual
from tests.runtime.plain_episodes import Plain, train
from tests.runtime.played import END, MOST, VOCABULARY, World, save_model
from tests.runtime.test_episodes import reward_of

BEGIN, USER, ANSWER = 2, 3, 4
STEPS, TURNS, LIMIT, RATE = 3, 3, 6, 1e-3
WORDS = ["<pad>", "<end>", "^", ">", "=", *string.ascii_letters][:VOCABULARY]
TEMPLATE = "^{% for each in messages %}{{ '' if each.role == 'assistant' else '>' }}{{ each.content }}"
TEMPLATE += "{% if each.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token is a letter, and nothing is written between them."""
    raw = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    raw.pre_tokenizer = Split(Regex("<pad>|<end>|."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    words = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
    words.chat_template = TEMPLATE
    return words


def question(number: int) -> str:
    return "".join(WORDS[5 + (number * 7 + at) % 40] for at in range(4 + number % 3))


def prompt_of(number: int) -> list[int]:
    return [BEGIN, USER, *map(WORDS.index, question(number))]


def told(tokens: list[int]) -> list[int]:
    """What the agent says about an answer."""
    return [5 + sum(tokens) % 40, 5 + len(tokens)]


def given_after(tokens: list[int]) -> list[int]:
    """An answer that was cut off is ended by the template."""
    return [*([] if tokens[-1] == END else [END]), USER, *told(tokens), ANSWER]


class Heard:
    """The agent's side of a call."""

    begun = gone = delivered = False
    body = b""
    status = 0

    async def send(self, status: int, body: bytes, headers: Any = None) -> None:  # noqa: ARG002
        self.status, self.body = status, body


class Agent:
    """Plays every episode by messages, each time with all of them."""

    def __init__(self) -> None:
        words = tokenizer()
        self.renderer = Renderer(words, [END])
        self.renderer.prove(["user"])
        self.endpoint: Endpoint | None = None
        self.calls = 0

    async def play(self, episodes: Episodes, name: str, problem: Problem) -> Outcome:
        if self.endpoint is None or self.endpoint.episodes is not episodes:
            self.endpoint = Endpoint(episodes, self.renderer, Sampling(max_tokens=MOST, stop_tokens=(END,)))
        secret = self.endpoint.open(name)
        messages: list[Any] = [{"role": "user", "content": question(int(str(problem.prompt)))}]
        made: list[int] = []
        for _ in range(TURNS):
            choice = await self.ask(secret, messages)
            made += choice["token_ids"]
            said = "".join(WORDS[token] for token in told(choice["token_ids"]))
            messages += [choice["message"], {"role": "user", "content": said}]
        return scored(reward_of(made))

    async def ask(self, secret: str, messages: list[Any]) -> dict[str, Any]:
        assert self.endpoint is not None
        body = msgspec.json.encode({"messages": messages, "max_tokens": LIMIT, "return_token_ids": True})
        heard: Any = Heard()
        asked = Asked("POST", CHAT, {"authorization": f"Bearer {secret}"}, body)
        await self.endpoint._handle(asked, heard)
        assert heard.status == 200, heard.body
        self.calls += 1
        return msgspec.json.decode(heard.body)["choices"][0]


@virtual
async def test_bound_0_through_the_endpoint_equals_the_plain_synchronous_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played, "prompt_of", prompt_of)
    folder = save_model(tmp_path / "model")
    agent = Agent()
    world = World(folder, agent.play, staleness=0, trainer={"learning_rate": RATE})
    await world.run(STEPS)
    plain = Plain(folder, prompt_of, [ANSWER], given_after, reward_of, TURNS, 2, 3, LIMIT, END, RATE, 5)
    losses, batches, model = train(plain, STEPS)
    trained = [{row.name: row.tokens.tolist() for group in step for row in group} for step in world.rows]
    assert trained == batches
    assert [report.loss for report in world.reports] == pytest.approx(losses, abs=1e-6)
    for mine, other in zip(world.trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)
    assert agent.calls >= STEPS * 2 * 3 * TURNS
    assert not [event for event in world.journal.events if event[0] in ("branch", "again")]
