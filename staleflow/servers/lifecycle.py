"""The states of a trajectory, and the only ways from one to the next.

::

    queued -> running -> generated -> scored -> complete -> consumed
     ^  ^        |  |        ^
     |  |        v  v        |
     |  +-- interrupted      |     aborted: from any state before consumed
     |              |        |
     +----------- waiting ---+

*Complete* and *consumed* are states of its whole group: every member that is needed is scored, and the group's step is
committed. ``running -> queued`` is a trajectory whose instance died: it resumes elsewhere from the last token that was
streamed. An interrupted trajectory may still be reported as generated: it ended before the command reached it.

*Waiting* is what an environment has in hand: between two turns of an episode, and before the first. It holds no place
on any instance. An episode ends when its environment says so, whatever its branches do at that moment.
"""

from dataclasses import dataclass, field
from typing import Literal

from staleflow.types import Spans, token_count

State = Literal["queued", "running", "interrupted", "waiting", "generated", "scored", "complete", "consumed", "aborted"]

NEXT: dict[State, tuple[State, ...]] = {
    "queued": ("running", "waiting", "generated", "aborted"),
    "running": ("interrupted", "queued", "waiting", "generated", "aborted"),
    "interrupted": ("queued", "waiting", "generated", "aborted"),
    "waiting": ("queued", "generated", "aborted"),
    "generated": ("scored", "aborted"),
    "scored": ("complete", "aborted"),
    "complete": ("consumed", "aborted"),
    "consumed": (),
    "aborted": (),
}
"""``queued -> generated`` and ``queued -> waiting``: its instance was taken for dead, and finished it after all before
it went elsewhere."""
TRAINED: tuple[State, ...] = ("complete", "consumed")
"""Of a group whose step is being committed, or is: those that it was trained on."""


@dataclass(slots=True)
class Branch:
    """What a trajectory has besides if an environment plays it."""

    parent: str = ""
    """The branch that it was cut from; empty for the first of its episode."""
    shared: int = 0
    """Tokens, prompt included, that it has in common with its parent."""
    prompt: int = 0
    """How many of them are of the group's prompt."""
    until: int = 0
    """Made tokens at which the present turn ends."""
    turns: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Of each finished turn: how many tokens there were after it, and why it ended."""
    opened: int = 0
    """Branches that the episode has opened, in all its tries; kept by the first."""
    tries: int = 0
    """How often the episode has begun anew; kept by the first branch."""
    masked: bool = False
    """Whether the episode was cut off, and its tokens are not to be trained."""


@dataclass(slots=True, eq=False)
class Trajectory:
    name: str
    group: "Group"
    state: State = "queued"
    epoch: int = 0
    """How often it was sent to an instance. What an earlier epoch reports is refused."""
    instance: str | None = None
    spans: Spans = ()
    generated: int = 0
    """Tokens in ``spans``; kept because it is asked for far more often than it changes."""
    moves: int = 0
    faults: int = 0
    """Reports about it whose content could not be true."""
    reward: float | None = None
    branch: Branch | None = None
    """None where no environment plays."""

    def stamp(self, spans: Spans) -> None:
        self.spans, self.generated = spans, token_count(spans)

    @property
    def context(self) -> int:
        return self.group.prompt_tokens + self.generated

    @property
    def prompt_tokens(self) -> int:
        """Fewer than the group's for a branch that differs within the prompt."""
        return self.branch.prompt if self.branch is not None and self.branch.parent else self.group.prompt_tokens

    def go(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise ValueError(f"trajectory {self.name} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(slots=True, eq=False)
class Group:
    name: str
    prompt: int
    """Which prompt of the source it is."""
    attempt: int
    prompt_tokens: int
    needed: int
    """Members that make the group complete; with group redundancy there are more."""
    members: list[Trajectory] = field(default_factory=list[Trajectory])
    version: int | None = None
    """The version it is reserved with; None while no member has been sent to an instance."""
    scored: int = 0
    complete: bool = False

    @property
    def begun(self) -> bool:
        """Whether any member has a token."""
        return any(member.spans for member in self.members)
