"""The states of a trajectory, and the only ways from one to the next.

::

    queued -> running -> generated -> scored -> complete -> consumed
      ^          |
      |          v
      +---- interrupted            aborted: from any state before consumed

*Complete* and *consumed* are states of its whole group: every member that is needed is scored, and the group's step is
committed. ``running -> queued`` is a trajectory whose instance died: it resumes elsewhere from the last token that was
streamed. An interrupted trajectory may still be reported as generated: it ended before the command reached it.
"""

from dataclasses import dataclass, field
from typing import Literal

from staleflow.types import Spans, token_count

State = Literal["queued", "running", "interrupted", "generated", "scored", "complete", "consumed", "aborted"]

NEXT: dict[State, tuple[State, ...]] = {
    "queued": ("running", "generated", "aborted"),
    "running": ("interrupted", "queued", "generated", "aborted"),
    "interrupted": ("queued", "generated", "aborted"),
    "generated": ("scored", "aborted"),
    "scored": ("complete", "aborted"),
    "complete": ("consumed", "aborted"),
    "consumed": (),
    "aborted": (),
}
"""``queued -> generated``: its instance was taken for dead, and finished it after all before it went elsewhere."""
TRAINED: tuple[State, ...] = ("complete", "consumed")
"""Of a group whose step is being committed, or is: those that it was trained on."""


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

    def stamp(self, spans: Spans) -> None:
        self.spans, self.generated = spans, token_count(spans)

    @property
    def context(self) -> int:
        return self.group.prompt_tokens + self.generated

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
