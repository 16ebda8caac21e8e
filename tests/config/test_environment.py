"""The section ``environment``, and what must go with it."""

import pytest

from staleflow.agents.options import Environment
from staleflow.config import load
from staleflow.config.checks import check
from staleflow.errors import ConfigError


def test_the_preset_of_several_turns_is_in_order() -> None:
    config = load("agent", [])
    check(config, room=False)
    assert config.longest_response == config.rollout.max_tokens + config.environment.max_given
    assert load(None, []).longest_response == load(None, []).rollout.max_tokens, (
        "without an environment nothing is given"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["data.chat=false"], "its conversations need a chat template: give data.chat=true"),
        (["environment.play=null"], "is played, and not only answered: give environment.play=calculator"),
        (["environment.play=calculater"], "environment.play=calculater: write calculator"),
        (["environment.play=tests.agents.environments:nothing"], "has no nothing"),
        (["environment.arguments={a: 1}"], "arguments are for module:function"),
        (["environment.max_given=4096"], "environment.max_given=4096"),
        (["environment.truncated=drop"], "write one of mask, train"),
        (["data.source=adder"], "data.source=adder"),
        (["data.source=examples.agents.guess:problems"], "model=calculator knows nothing but its own task"),
        (["environment.play=verifiers"], "needs the package verifiers"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("agent", changes), room=False)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_arguments_without_a_play_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"give environment\.play, or leave them out"):
        Environment(arguments={"a": 1})
