"""The seam between episodes and whoever plays them: a turn of the model, and where turns come from.

An *episode* is one member of a group, played to its end by an environment. It has one or more *branches*, each a
trajectory: the first has the episode's name (``p7/3``), later ones ``p7/3~1``, ``p7/3~2``. A *turn* is one call of the
model: given tokens go in, made tokens come out. ::

    at = len(episodes.held("p7/3"))
    turn = await episodes.turn("p7/3", at, given, limit=0)     # at + given + turn.tokens is now held
    other = episodes.branch("p7/3", shared=at)                 # begins with held("p7/3")[:at]
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from staleflow.errors import StaleFlowError
from staleflow.tasks.task import Problem
from staleflow.types import Spans


class EpisodeOverError(StaleFlowError, RuntimeError):
    """The episode was sealed, or its group was released: nothing more is made for it."""


class Turn(NamedTuple):
    """What the model made in one turn."""

    tokens: list[int]
    logprobs: list[float]
    spans: Spans
    """Of these tokens: the versions that made them."""
    reason: Literal["stop", "length", "capacity", "ended"]
    """A stop token or string; a limit of tokens; no room in KV memory or no position left; the episode was ended from
    outside, and this is what there was."""


class Episodes(Protocol):
    """Where turns are made: the control plane of a run, or an engine in the same process (``local.py``)."""

    def held(self, branch: str) -> Sequence[int]:
        """The prompt and all tokens of the turns that have ended, given and made."""
        ...

    async def turn(self, branch: str, at: int, given: Sequence[int], limit: int) -> Turn:
        """Append ``given`` to the branch's first ``at`` tokens, and let the model make at most ``limit`` more (0: what
        the run allows).

        A call whose tokens are those that the branch's latest turn began with samples nothing: it joins that turn, or
        gives what it made. Raises ``EpisodeOverError``.
        """
        ...

    def branch(self, parent: str, shared: int) -> str:
        """A new branch of the parent's episode that begins with the parent's first ``shared`` tokens, all of them
        given. ``shared`` is at least 1 and may be less than the group's prompt: another conversation, such as a
        sub-agent's."""
        ...


class EnvironmentPort(Protocol):
    """Plays episodes, as the control plane sees it."""

    def play(self, episode: str, attempt: int, problem: Problem) -> None: ...

    def cancel(self, episode: str) -> None: ...
