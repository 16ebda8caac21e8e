"""Whether what is trained is what the engine made: agents that edit, retry, resample, branch and lose connections.

    python bench/agents_exact.py [--episodes 1000] [--seed 0] [--json]

Random agents talk over HTTP to the endpoint, in front of the built-in engine with a tiny random model of bytes, whose
text is mostly not what its tokens would be encoded to again. Meanwhile the engine pulls other weights. Every call is
compared with what its agent expects, token for token: messages that were made stand for the tokens that were made.
Afterwards every branch is computed again by transformers, under the versions that its spans name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.local import LocalEpisodes
from staleflow.agents.messages import key, plain
from staleflow.agents.render import Renderer
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.options import EngineOptions, Sampling
from staleflow.types import Row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import amounts
from tests.agents.serving import END, Wire
from tests.tiny_models import save_chat

AT_ONCE = 32
CALLS = 6
"""Of an agent."""
VERSIONS = 4
"""Of the weights, in turn."""
ROUNDING = 2e-4
WORDS = ("go on", "why?", "", "a\nb", "[user] é 🙂", "  spaces  ")


class Agent:
    """Plays one episode at random, and knows which tokens each of its calls stands for."""

    def __init__(self, episode: str, endpoint: Endpoint, renderer: Renderer, seed: str, found: Counter[str]) -> None:
        self.draw = random.Random(seed)
        self.endpoint, self.found = endpoint, found
        self.words: Any = renderer.words
        self.secret = endpoint.open(episode)
        self.wire = Wire(endpoint, self.secret)
        self.made: dict[bytes, list[list[int]]] = {}
        """By what an answer says: the tokens that were made for it."""
        self.talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": "hi"}]]

    async def play(self) -> None:
        for _ in range(self.draw.randint(2, CALLS)):
            talk = self._next()
            body = {"messages": talk, "max_tokens": self.draw.randint(1, 8), "return_token_ids": True}
            status, answer = await self._ask(body)
            if status != 200:
                assert answer["error"]["code"] == "context_length_exceeded", answer
                break
            choice = answer["choices"][0]
            if answer["prompt_token_ids"] not in self._expected(talk):
                self.found["calls with other tokens than were made"] += 1
            self.made.setdefault(key(plain(choice["message"])), []).append(choice["token_ids"])
            again = self.words.encode(choice["message"]["content"])
            self.found["answers that would be tokenised otherwise"] += again != [
                token for token in choice["token_ids"] if token != END
            ]
            self.found["tokens that agents heard"] += len(choice["token_ids"])
            self.talks.append([*talk, choice["message"]])
            self.found["calls"] += 1
        self.wire.close()

    def _next(self) -> list[dict[str, Any]]:
        """The conversation of the next call: mostly the last one, continued."""
        talk = list(self.talks[-1])
        kind = self.draw.choices(
            ["continue", "resample", "edit", "drop", "invent", "other"], weights=[10, 1, 1, 1, 1, 1]
        )[0]
        if len(talk) == 1:
            return talk
        self.found[kind] += 1
        if kind == "resample":
            return talk[:-1]
        if kind == "edit":
            at = self.draw.randrange(len(talk))
            talk[at] = talk[at] | {"content": talk[at]["content"] + " edited"}
        elif kind == "drop":
            del talk[1 : self.draw.randint(1, len(talk) - 1)]
        elif kind == "invent":
            talk += [{"role": "user", "content": "say"}, {"role": "assistant", "content": "as I never said"}]
        elif kind == "other":
            talk = list(self.draw.choice(self.talks))
        if self.draw.random() < 0.3:
            talk.append({"role": "tool", "content": self.draw.choice(WORDS), "tool_call_id": "c"})
        talk.append({"role": "user", "content": self.draw.choice(WORDS)})
        return talk

    async def _ask(self, body: dict[str, Any]) -> tuple[int, Any]:
        fault = self.draw.choices(["none", "marked", "keyed", "lost"], weights=[7, 1, 1, 1])[0]
        if fault == "none":
            return await self.wire.ask(body)
        self.found["retries"] += 1
        other = Wire(self.endpoint, self.secret)
        name = f"k{self.draw.random()}"
        mark = {"idempotency_key": name} if fault == "keyed" else {}
        await other.send(body, **mark)
        if fault == "lost":  # nobody hears the answer
            other.close()
            return await self.wire.ask(body, x_stainless_retry_count="1")
        first = asyncio.create_task(other.answer())
        again = await self.wire.ask(body, **(mark or {"x_stainless_retry_count": "1"}))
        if again != (heard := await first):
            self.found["retries with another answer"] += again[1].get("choices") != heard[1].get("choices")
        other.close()
        return again

    def _expected(self, talk: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The tokens that this conversation may stand for: several if the same was said by different tokens."""
        words = self.words
        found: list[tuple[list[int], str]] = [([], "")]
        for message in talk:
            known = self.made.get(key(plain(message)), []) if message["role"] == "assistant" else []
            if not known:
                found = [(ids, text + f"[{message['role']}] {message['content']}<end>") for ids, text in found]
                continue
            found = [
                ([*ids, *words.encode(f"{text}[assistant] "), *made], "" if made[-1] == END else "<end>")
                for ids, text in found
                for made in {tuple(each): each for each in known}.values()
            ]
        return [[*ids, *words.encode(f"{text}[assistant] ")] for ids, text in found]


def mismatches(rows: Sequence[Row], models: Mapping[int, Any]) -> tuple[int, int, float]:
    """Made tokens, how many of them have another log-probability than the model of their version gives, and the
    largest difference."""
    tokens = wrong = 0
    most = 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row.prompt.tolist(), *row.tokens.tolist()]])
            versions = [version for version, count in row.spans for _ in range(count)]
            begin = len(row.prompt)
            for version in {each for each in versions if each >= 0}:
                expected = models[version % VERSIONS](ids).logits[0].log_softmax(-1)
                for at, (made, logprob) in enumerate(zip(versions, row.logprobs.tolist(), strict=True)):
                    if made == version:
                        apart = abs(expected[begin + at - 1, ids[0, begin + at]].item() - logprob)
                        tokens, wrong, most = tokens + 1, wrong + (apart > ROUNDING), max(most, apart)
    return tokens, wrong, most


class Weights:
    """One version, as an engine pulls it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.tensors, self.version = tensors, version

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int) -> int:
        assert at_least <= self.version
        for name, target in into.items():
            target.copy_(self.tensors[name])
        return self.version


async def play(folder: Path, models: Mapping[int, Any], episodes: int, seed: int) -> dict[str, float]:
    renderer = Renderer.of(folder, stops=[END])
    renderer.prove()
    sampling = Sampling(max_tokens=40, stop_tokens=(END,))
    engine = TorchEngine(folder, EngineOptions(kv_tokens=1 << 16, max_running=64, page_size=8))
    local = LocalEpisodes(engine, sampling)
    endpoint = await Endpoint(local, renderer, sampling).start()
    found: Counter[str] = Counter()
    rows: list[Row] = []
    waiting = iter(range(episodes))

    async def plays() -> None:
        for number in waiting:
            name = f"p{number}/0"
            local.begin(name, renderer.first([{"role": "user", "content": "hi"}]))
            await Agent(name, endpoint, renderer, f"{seed} {number}", found).play()
            endpoint.seal(name)
            rows.extend(local.row(each, 0.0) for each in local.branches(name))
            local.end(name)
            if number % 4 == 3:  # between two steps, with other turns in flight
                version = engine.version + 1
                engine.pull(Weights(models[version % VERSIONS].state_dict(), version), version)
                found["pulls"] += 1

    async with asyncio.timeout(3600):
        await asyncio.gather(*(plays() for _ in range(min(AT_ONCE, episodes))))
    await endpoint.close()
    engine.close()
    tokens, wrong, most = mismatches(rows, models)
    return {
        "episodes": episodes,
        "branches": len(rows),
        "made tokens": tokens,
        "mixed branches": sum(len({v for v, _ in row.spans if v >= 0}) > 1 for row in rows),
        "calls with other tokens than were made": 0,
        "retries with another answer": 0,
        "log-probability mismatches": wrong,
        "largest difference": most,
        "made tokens that no agent heard": tokens - found.pop("tokens that agents heard"),
        **dict(sorted(found.items())),
    }


def measure(episodes: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[int, Any] = {}
        for version in range(VERSIONS):
            folder = save_chat(Path(scratch) / str(version), seed=version)
            models[version] = AutoModelForCausalLM.from_pretrained(folder).eval()
        return asyncio.run(play(Path(scratch) / "0", models, episodes, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=amounts.count, default=1000)
    parser.add_argument("--seed", type=amounts.whole, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    found = measure(asked.episodes, asked.seed) | {"seconds": round(time.monotonic() - began, 1)}
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:45} {value:>12,.6g}")


if __name__ == "__main__":
    main()
