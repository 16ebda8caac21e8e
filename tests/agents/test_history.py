"""Random agents over a tokenizer with merges: a call is what was made and what the template says, token for token."""

import random
import re
from typing import Any

import pytest

from staleflow.agents.messages import key, plain
from tests.agents.serving import TOOLS, USER, Wire, serving
from tests.agents.templates import CALLS, words_of
from tests.agents.test_endpoint import runs, scripted

SAID = ("hello the cat", "", "aaaa  bb\n\n", "<think>\nhm\n</think>\n\nso it is", "é🙂", "[user] hello\n")
CALLED = '<tool_call>{"name": "add", "arguments": {"b": 1, "a": "x"}}</tool_call>'
TOLD = ("the cat said", "\n\nhello", "", " 46 ", "<think>no")


class Expected:
    """The tokens that a conversation stands for, from the template's text and the tokens of each answer."""

    def __init__(self) -> None:
        self.words = words_of(CALLS)
        self.made: dict[bytes, list[list[int]]] = {}

    def of(self, messages: list[Any], tools: Any) -> list[list[int]]:
        answers = [self.made.get(key(plain(each)), []) if each["role"] == "assistant" else [] for each in messages]
        marked = [
            {"role": "assistant", "content": f"\x00{at}\x00"} if answers[at] else plain(each)
            for at, each in enumerate(messages)
        ]
        text = self.words.apply_chat_template(marked, tools=tools, add_generation_prompt=True, tokenize=False)
        first, *rest = re.split("\x00(\\d+)\x00", text)
        found = [self.words.encode(first, add_special_tokens=False)]
        for at, piece in zip(map(int, rest[::2]), rest[1::2], strict=True):
            found = [
                [*before, *made, *self.words.encode(piece.removeprefix("<|end|>"), add_special_tokens=False)]
                for before in found
                for made in {tuple(each): each for each in answers[at]}.values()
            ]
        return found


def next_talk(draw: random.Random, talks: list[list[Any]]) -> list[Any]:
    talk = list(draw.choice(talks[-2:]))
    if talk[-1]["role"] != "assistant" or draw.random() < 0.1:
        return talk if talk[-1]["role"] != "assistant" else talk[:-1]
    if draw.random() < 0.2:
        at = draw.randrange(len(talk))
        talk[at] = {"role": "user", "content": "edited"} if talk[at]["role"] == "user" else talk[at]
    if draw.random() < 0.1:
        talk = [*USER, {"role": "assistant", "content": "never made"}, *talk]
    calls = talk[-1].get("tool_calls", ())
    if calls:
        return talk + [{"role": "tool", "content": draw.choice(TOLD), "tool_call_id": each["id"]} for each in calls]
    return [*talk, {"role": "user", "content": draw.choice(TOLD)}]


@pytest.mark.parametrize("seed", range(12))
@runs
async def test_every_call_is_what_was_made_and_what_the_template_says_of_the_rest(seed: int) -> None:
    draw, expected = random.Random(seed), Expected()
    texts = [draw.choice(SAID) + draw.choice(["", "", CALLED, CALLED + CALLED]) for _ in range(12)]
    episodes = scripted(*texts)
    tools = draw.choice([None, TOOLS])
    episodes.branches["p0/0"] = episodes.renderer.first(USER, tools)
    async with serving(episodes, episodes.renderer) as endpoint:
        wire = Wire(endpoint, endpoint.open("p0/0"))
        talks: list[list[Any]] = [list(USER)]
        for _ in texts:
            talk = next_talk(draw, talks)
            body = {"messages": talk, "return_token_ids": True} | ({"tools": tools} if tools else {})
            status, answer = await wire.ask(body)
            assert status == 200, answer
            choice = answer["choices"][0]
            assert answer["prompt_token_ids"] in expected.of(talk, tools)
            branch, at, given, _ = episodes.turns[-1]
            assert episodes.branches[branch] == [*answer["prompt_token_ids"], *choice["token_ids"]]
            assert episodes.branches[branch][at : at + len(given)] == given
            expected.made.setdefault(key(plain(choice["message"])), []).append(choice["token_ids"])
            talks.append([*talk, choice["message"]])
        assert len(episodes.turns) == len(texts)
