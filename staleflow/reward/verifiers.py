"""The built-in rewards: 1 for a right answer and 0 for a wrong one, unless a service decides otherwise.

``exact-match`` compares the stripped text with ``facts["answer"]``; ``last-number`` the last number of both (GSM8K,
word problems); ``adder`` is the embedded task's own verifier; ``math-verify`` compares as mathematics;
``reasoning-gym`` asks the data set that the problem came from; an address gets ``{"prompt", "text", "tokens",
"cut", "facts"}`` by POST and answers ``{"reward": number}``::

    exact_match(Problem("2 + 2", {"answer": "4"}), Response("4"))
    await http_service(problem, response, address="http://127.0.0.1:8000/score", timeout_s=5)
"""

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from staleflow.reward.function import Response, RewardError, ServiceAwayError
from staleflow.tasks.adder import Adder
from staleflow.tasks.sources import require
from staleflow.tasks.task import Problem

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)
ADDER = Adder()
AWAY = (429, 502, 503, 504)
"""Answers of a service that is overloaded or being restarted."""
MOST_BYTES = 1_000_000
"""A longer answer of a reward service is refused."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its body, and any answer to that would be taken for the reward."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def exact_match(problem: Problem, response: Response) -> float:
    return float(response.text.strip() == _answer(problem).strip())


def last_number(problem: Problem, response: Response) -> float:
    right = _last(_answer(problem))
    if right is None:
        raise RewardError(f"the right answer {_answer(problem)[-60:]!r} has no number: correct the data")
    return float(_last(response.text) == right)


def adder(problem: Problem, response: Response) -> float:
    return ADDER.verify(problem, response.tokens)


def math_verify(problem: Problem, response: Response) -> float:
    package = require("math_verify", "math-verify", "math-verify rewards")
    # The package's own time limits need signals; here the pool's limit holds for any reward, so they are off.
    gold = package.parse(_answer(problem), parsing_timeout=None)
    if not gold:
        raise RewardError(f"math-verify cannot read the right answer {_answer(problem)!r}: correct the data")
    given = package.parse(response.text, parsing_timeout=None)
    return float(package.verify(gold, given, timeout_seconds=None))


def reasoning_gym(problem: Problem, response: Response) -> float:
    package = require("reasoning_gym", "reasoning-gym", "reasoning-gym rewards")
    judge: Callable[..., float] = package.get_score_answer_fn(_fact(problem, "gym"))
    return judge(response.text.strip(), _fact(problem, "entry"))


async def http_service(problem: Problem, response: Response, *, address: str, timeout_s: float) -> float:
    def ask() -> float:
        body = {"prompt": problem.prompt, "facts": problem.facts, **response._asdict()}
        head = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), head, method="POST")
        try:
            with _opener.open(request, timeout=timeout_s) as answer:
                content = answer.read(MOST_BYTES)
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400:
                to = error.headers.get("Location")
                raise RewardError(f"reward service {address} has moved to {to}: give that as reward.function") from None
            kind = ServiceAwayError if error.code in AWAY else RewardError
            raise kind(f"reward service {address} answered {error.code} {error.reason}") from None
        except (OSError, urllib.error.URLError) as error:
            why = getattr(error, "reason", error)
            raise ServiceAwayError(f"reward service {address} did not answer: {why}") from None
        return _reward_in(content, address)

    # urllib's limit is per read; this one stops a service that trickles. The thread ends by itself.
    try:
        return await asyncio.wait_for(asyncio.to_thread(ask), timeout_s)
    except TimeoutError:
        raise ServiceAwayError(f"reward service {address} did not answer within {timeout_s:g} s") from None


def _reward_in(content: bytes, address: str) -> float:
    try:
        return json.loads(content)["reward"]
    except (ValueError, KeyError, TypeError, RecursionError):
        start = content[:60].decode(errors="replace")
        raise RewardError(f'reward service {address} answered {start!r}: it must answer {{"reward": number}}') from None


def _last(text: str) -> Decimal | None:
    """The last number in a text; commas between digits do not count."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _answer(problem: Problem) -> str:
    return str(_fact(problem, "answer"))


def _fact(problem: Problem, name: str) -> Any:
    if name not in problem.facts:
        known = ", ".join(map(repr, problem.facts)) or "none"
        raise RewardError(f"the problem has no fact {name!r} (it has {known}): name the column in the data settings")
    return problem.facts[name]
