"""One request inside the built-in engine: its tokens, its pages, and how far its KV entries are computed.

A sequence *decodes* when all but its last token are computed: running that token gives the next one. With more than
one token to compute it *prefills*. ::

    sequence = Sequence(request)
    sequence.append(token=17, logprob=-0.3)
    spans = sequence.close_span(version)
"""

from hashlib import blake2b

from staleflow.rollout.engine import Part, Reason, Request, Result
from staleflow.rollout.pages import Key, digest
from staleflow.types import Spans

NO_ROW = -1


class Sequence:
    __slots__ = (
        "_chain",
        "computed",
        "given",
        "kv_version",
        "limit",
        "logprobs",
        "pages",
        "prompt",
        "pure",
        "request",
        "row",
        "seed",
        "since",
        "spans",
        "stamped",
        "stops",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.request = request
        self.prompt = len(request.prompt)
        self.tokens: list[int] = [*request.prompt, *request.tokens]
        """The prompt and what was generated, or given meanwhile."""
        self.logprobs: list[float] = list(request.logprobs)
        self.spans: list[tuple[int, int]] = list(request.spans)
        self.stamped = len(request.tokens)
        """Generated tokens that are in ``spans`` already."""
        self.given, self.since = _given(self.prompt, request.spans) if request.spans else (0, self.prompt)
        """Tokens behind the prompt that were not drawn, and where the last of them is followed by others."""
        self.limit = self.prompt + self.given + sampling.max_tokens
        self.stops = frozenset(sampling.stop_tokens)
        seed = sampling.seed
        if seed is None:
            seed = int.from_bytes(blake2b(request.name.encode(), digest_size=8).digest(), "little")
        self.seed = seed & (2**64 - 1)
        self.row = NO_ROW
        self.computed = 0
        self.pages: list[int] = []
        self.kv_version = -1
        self.pure = True
        """Whether all its KV entries come from the current weights."""
        self._chain: list[Key] = []

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def made(self) -> int:
        """Tokens that were drawn, here or elsewhere."""
        return len(self.tokens) - self.prompt - self.given

    @property
    def pending(self) -> int:
        """Tokens whose KV entries are not computed."""
        return len(self.tokens) - self.computed

    def chain(self, pages: int, page_size: int) -> list[Key]:
        """The keys of its first ``pages`` pages, which must be full. Kept: tokens never change."""
        while len(self._chain) < pages:
            begin = len(self._chain) * page_size
            before = self._chain[-1] if self._chain else b""
            self._chain.append(digest(before, self.tokens[begin : begin + page_size]))
        return self._chain[:pages]

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def close_span(self, version: int) -> Spans:
        """Stamp the tokens generated since the last call with ``version``."""
        count = len(self.tokens) - self.prompt - self.stamped
        if count:
            self.stamped += count
            if self.spans and self.spans[-1][0] == version:
                count += self.spans.pop()[1]
            self.spans.append((version, count))
        return tuple(self.spans)

    def part(self, start: int, version: int) -> Part | None:
        if self.generated <= start:
            return None
        return Part(self.close_span(version), self.tokens[self.prompt + start :], self.logprobs[start:])

    def result(self, reason: Reason, version: int) -> Result:
        spans = self.close_span(version)
        age = self.kv_version if self.pages else version
        request = self.request
        return Result(request.name, request.epoch, reason, self.tokens[self.prompt :], self.logprobs, spans, age)


def _given(prompt: int, spans: Spans) -> tuple[int, int]:
    """How many tokens were given, and the place after the last of them."""
    given, at, since = 0, prompt, prompt
    for version, count in spans:
        at += count
        if version < 0:
            given, since = given + count, at
    return given, since
