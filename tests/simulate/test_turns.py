"""Simulated episodes of several turns: the production control plane plays them, and every invariant holds."""

from dataclasses import replace

import pytest

from staleflow.servers.lifecycle import Group
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.invariants import watch
from staleflow.simulate.setting import Setting, preset
from staleflow.study.law import law
from staleflow.types import GIVEN

SHAPE = ("steps=4", "groups=8", "group_size=4", "rollout.instances=4", "cluster.training_gpus=4")


def setting(turns: int = 4, tool_s: float = 20.0, staleness: int = 2) -> Setting:
    base = preset("paper-14b", *SHAPE, f"staleness={staleness}")
    return replace(base, turns=turns, tool_s=tool_s, tool_tokens=200) if turns > 1 else base


def ran(setting: Setting, seed: int = 1, kills: tuple[float, ...] = ()) -> Cluster:
    cluster = Cluster(setting, seed, keep_journal=True)
    watch(cluster, every=16)
    if kills:
        cluster.journal_faults()

        def kill() -> None:
            for at in kills:
                cluster.loop.call_later(at, cluster.kill_control, 5.0)

        cluster.on_start.append(kill)
    cluster.run()
    return cluster


def test_episodes_have_their_turns_and_the_tokens_that_tools_give() -> None:
    cluster = Cluster(setting(), 1, keep_journal=True)
    given: list[list[int]] = []
    made: list[int] = []
    cluster.on_step.append(
        lambda _, groups: given.extend(
            [count for version, count in each.spans if version == GIVEN] for group in groups for each in group.members
        )
    )
    cluster.on_step.append(lambda _, groups: made.extend(len(group.members) for group in groups))
    cluster.run()
    assert sum(made) == 4 * 8 * 4
    assert given == [[200, 200, 200]] * (4 * 8 * 4)
    assert not cluster.recorder.wasted


def test_the_same_seed_plays_the_same_episodes() -> None:
    assert ran(setting()).journal.digest() == ran(setting()).journal.digest()


def test_as_many_tokens_are_made_in_turns_as_without() -> None:
    assert ran(setting()).recorder.trained_tokens == ran(setting(turns=1)).recorder.trained_tokens


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_tool_time_counts_against_the_bound_and_no_step_beats_the_law(staleness: int) -> None:
    slow = setting(tool_s=300.0, staleness=staleness)
    steps = ran(slow).recorder.steps
    assert law(slow, streamed=True).binds == "tail"
    # The law is for the long run: the last steps are made faster than the longest trajectory takes, not all of them.
    assert steps[-1].time >= law(slow, streamed=True).step_s * (len(steps) - staleness)


def test_a_turn_is_sent_where_its_prefix_is() -> None:
    """Without that, each turn would prefill everything before it."""
    cluster = Cluster(setting(tool_s=0.0), 1, keep_journal=True)
    whole: list[int] = []

    def count(_step: int, groups: list[Group]) -> None:
        for each in (each for group in groups for each in group.members):
            ends = [0] if each.branch is None else [0, *(end for end, _ in each.branch.turns[:-1])]
            whole.append(sum(each.group.prompt_tokens + end for end in ends))

    cluster.on_step.append(count)
    cluster.run()
    assert sum(each.engine.instance.prefilled_tokens for each in cluster.rollouts) < 0.6 * sum(whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_control_plane_that_dies_replays_what_environments_asked_for(seed: int) -> None:
    cluster = ran(setting(), seed, kills=(40.0, 90.0, 200.0))
    assert cluster.control.term > 1
    assert not [event for event in cluster.journal.events if event[0] == "again"]
    assert cluster.recorder.violations == 0
