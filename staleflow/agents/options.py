"""How episodes are played: the section ``environment`` of the configuration, and the built-in environments.

An environment is ``async def play(task, model, limits, **arguments) -> Outcome``. See ``play.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from staleflow.agents.messages import PARSERS
from staleflow.registry import Entry, Registry
from staleflow.settings import Count, Positive, Section
from staleflow.tasks.options import CALCULATOR

PLAYS = Registry(
    "environment.play",
    {
        CALCULATOR: Entry("staleflow.agents.calculator:play"),
        "gym": Entry("staleflow.agents.gym:play", arguments=True),
        "program": Entry("staleflow.agents.program:play", arguments=True),
        "verifiers": Entry("staleflow.agents.verifiers:play", needs="verifiers", arguments=True),
        "openenv": Entry(
            "staleflow.agents.openenv:play", "openenv", arguments=True, install="pip install openenv-core"
        ),
    },
    takes=("task", "model", "limits"),
    arguments="arguments",
)


@dataclass(frozen=True, slots=True)
class Environment(Section):
    play: Annotated[str | None, PLAYS] = None
    """``calculator``, ``gym``, ``program``, ``verifiers``, ``openenv`` or ``module:function``: plays one episode of
    several turns, and scores it. null: a response is one turn, scored by ``reward.function``."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to it."""
    workers: Count = 1
    """Processes that play episodes."""
    episodes: Count = 256
    """Episodes that a worker plays at once."""
    setup_s: Positive = 60.0
    """Time limit for the set-up of an episode."""
    agent_s: Positive = 600.0
    """Time limit for its turns, without the time that the model takes."""
    score_s: Positive = 60.0
    """Time limit for its scoring."""
    max_turns: Count = 16
    """Calls of the model in an episode; a further one is refused, and the episode can only be scored."""
    max_given: Count = 1024
    """Tokens that the environment may give to one branch of an episode, in all its turns."""
    tool_calls: Annotated[str, PARSERS] = "hermes"
    """How the model writes tool calls: ``hermes`` (as Qwen and Hermes models do), ``none``, or ``module:function``."""
    renderer: str = "builtin"
    """How messages become tokens: ``builtin``, by the model's chat template; or ``qwen3``, ``auto`` or another renderer
    of the package ``renderers``."""
    renderer_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to a renderer of that package, such as ``thinking_retention: all``."""
    appends: tuple[Literal["user", "tool", "system"], ...] = ("user", "tool")
    """Roles of the messages that follow an answer. A chat template that cannot append one of them to the tokens before
    it is refused; a message of another role then opens a branch."""
    tries: Count = 3
    """After this many failures of an episode, its group is released with the reason, and replaced."""
    truncated: Literal["mask", "train"] = "mask"
    """What is done with an episode that a limit ended: its reward counts for the others of its group either way;
    ``mask`` does not train its tokens."""
    environment: tuple[str, ...] = ()
    """Names of further environment variables that its workers see, such as an API key."""

    def contradictions(self) -> Iterator[str]:
        if self.renderer == "builtin" and self.renderer_arguments:
            yield "renderer_arguments are given without a renderer: give environment.renderer, or leave them out"
        if self.renderer != "builtin" and find_spec("renderers") is None:
            yield f"renderer={self.renderer} needs the package renderers: pip install renderers, or give builtin"
        if self.arguments and self.play is None:
            yield "arguments are given without a play: give environment.play, or leave them out"
