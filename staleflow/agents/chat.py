"""What was said in an episode: which tokens a conversation stands for, and on which branch it continues.

A client sends a whole conversation with every call. Those of its messages that the model made stand for the very tokens
that it made; only what is new is rendered. The tokens then say where the call belongs: if they extend all that a branch
holds, they continue it; otherwise the history was edited, asked again, or is another conversation, and a branch opens
where the tokens part. ::

    history = History(renderer, "p7/3", prompt)
    woven = history.weave(messages, tools)
    place = history.place(woven.tokens, woven)         # then the model makes tokens there
    history.end(branch, place, made, woven, message)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from staleflow.agents.messages import Message, MessageError, digest_of, key, keys_of, plain
from staleflow.agents.render import Renderer, Tools, shared


class Woven(NamedTuple):
    """A conversation as tokens, up to where the model answers."""

    tokens: list[int]
    digest: bytes
    """Of everything said."""
    branch: str | None = None
    """Where the beginning of it was made, if it is known, ..."""
    known: int = 0
    """... and how many tokens that is."""


class Place(NamedTuple):
    """Where a call belongs: ``given`` after the first ``at`` tokens of a branch."""

    branch: str
    at: int
    given: list[int]
    fork: bool = False
    """Whether a new branch begins there."""


@dataclass(slots=True)
class _Branch:
    tokens: list[int]
    """The prompt and all turns that have ended."""
    free: bool = True
    """Whether it can be continued: no turn is in flight, and none has failed."""


class _Said(NamedTuple):
    branch: str
    begin: int
    end: int


class History:
    def __init__(self, renderer: Renderer, episode: str, held: Sequence[int]) -> None:
        self.renderer = renderer
        self.branches = {episode: _Branch(list(held))}
        self._after: dict[bytes, _Said] = {}
        """The last answer of each conversation that was had, by the digest of all that was said."""
        self._answers: dict[bytes, _Said] = {}
        """The latest answer that said this."""

    def weave(self, messages: Sequence[Message], tools: Tools | None) -> Woven:
        """``messages``: plain ones, the last not the assistant's. Raises ``MessageError``."""
        chain = [digest_of(tools)]
        for each in keys_of(messages):
            chain.append(_chained(chain[-1], each))
        for count in range(len(messages), 0, -1):
            if (said := self._after.get(chain[count])) is not None:
                held = self.branches[said.branch].tokens[: said.end]
                found = self._extended(held, said.end - said.begin, messages[count - 1 :], tools)
                return Woven(found or self._rendered(messages, tools), chain[-1], said.branch, said.end if found else 0)
        return Woven(self._rendered(messages, tools), chain[-1])

    def _rendered(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """A conversation whose beginning is new, with the answers in it that the model made."""
        made = [at for at, message in enumerate(messages) if self._made(message) is not None]
        if made and made[0] > 0:
            own = self._made(messages[made[0]]) or []
            begin = [*self.renderer.first(messages[: made[0]], tools), *own]
            if found := self._extended(begin, len(own), messages[made[0] :], tools):
                return found
        return self.renderer.first(messages, tools)

    def _extended(
        self, held: list[int], count: int, messages: Sequence[Message], tools: Tools | None
    ) -> list[int] | None:
        """``held`` ends with the first of the messages, an answer of ``count`` tokens; what it is with all of them."""
        answer, new = messages[0], list[Message]()
        for at, message in enumerate(messages[1:], 1):
            made = self._made(message)
            if made is None:
                new.append(message)
            if made is not None or at == len(messages) - 1:
                found = self.renderer.extend(held, new, tools, answer.get("tool_calls", ()), count) if new else None
                if found is None:
                    return None
                held = [*held, *found, *(made or ())]
                answer, new, count = message, [], len(made or ())
        return held

    def _made(self, message: Message) -> list[int] | None:
        """The tokens of this message, if the model made it."""
        said = self._answers.get(key(message)) if message["role"] == "assistant" else None
        return None if said is None else self.branches[said.branch].tokens[said.begin : said.end]

    def place(self, tokens: list[int], woven: Woven | None = None) -> Place:
        """Where these tokens belong. Raises ``MessageError``."""
        if woven is not None and woven.branch is not None:
            branch = self.branches[woven.branch]
            if branch.free and woven.known == len(branch.tokens):
                return Place(woven.branch, woven.known, tokens[woven.known :])
        best, most, fork = "", 0, True
        for name, branch in self.branches.items():
            common = shared(tokens, branch.tokens)
            whole = branch.free and common == len(branch.tokens)
            if (common, whole) > (most, not fork):
                best, most, fork = name, common, not whole
        if not best:
            raise MessageError(
                "the conversation begins with other tokens than the task's prompt: send its messages first, or give "
                "data without messages"
            )
        return Place(best, most, tokens[most:], fork)

    def begin(self, branch: str, parent: str | None = None, shared: int = 0) -> None:
        """A turn begins on this branch, which is new if it has a parent."""
        if parent is not None:
            self.branches[branch] = _Branch(self.branches[parent].tokens[:shared])
        self.branches[branch].free = False

    def end(self, branch: str, place: Place, made: Sequence[int], woven: Woven | None, message: Message) -> None:
        """The turn that began there has made these tokens, and the client hears of it as ``message``."""
        known = self.branches[branch]
        begin = place.at + len(place.given)
        known.tokens[place.at :] = [*place.given, *made]
        known.free = True
        answer = key(plain(message))
        said = self._answers[answer] = _Said(branch, begin, begin + len(made))
        if woven is not None:
            self._after[_chained(woven.digest, answer)] = said


def _chained(before: bytes, message: bytes) -> bytes:
    return blake2b(before + message, digest_size=16).digest()
