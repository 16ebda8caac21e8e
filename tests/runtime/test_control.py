"""The control plane in small simulated clusters: the synchronous loop, streaming, deaths, the end of the data."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from staleflow.coordinator import decide, routing
from staleflow.coordinator.decide import Decision
from staleflow.coordinator.situation import Pull
from staleflow.runtime import control
from staleflow.runtime.control import StalledError
from staleflow.runtime.situate import MOST_QUEUED
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.invariants import check_all, lost_prompts, watch
from staleflow.simulate.setting import Setting, preset, with_strategies

SMALL = replace(preset("paper-14b"), instances=4, groups=4, group_size=2, steps=4, staleness=1)


def cluster_of(setting: Setting = SMALL, seed: int = 1, **more: Any) -> Cluster:
    cluster = Cluster(setting, seed, keep_journal=True, **more)
    watch(cluster)
    return cluster


def at(cluster: Cluster, seconds: float, happen: Callable[[], object]) -> None:
    cluster.on_start.append(lambda: cluster.loop.at(seconds, happen))


def finish(cluster: Cluster) -> Cluster:
    """Run it, and see that every step was trained and nothing was lost or trained twice."""
    cluster.run()
    recorder, setting = cluster.recorder, cluster.setting
    check_all(cluster)
    assert [step.step for step in recorder.steps] == list(range(setting.steps))
    assert sum(recorder.trained_prompts.values()) == len(recorder.trained_prompts) == setting.steps * setting.groups
    assert not lost_prompts(cluster)
    assert max(recorder.token_staleness) <= setting.staleness
    return cluster


def events(cluster: Cluster, kind: str) -> list[tuple[Any, ...]]:
    return [event[1:] for event in cluster.journal.events if event[0] == kind]


# Bound and consumption


@pytest.mark.parametrize("consume", ["stream", "batch"])
@pytest.mark.parametrize("more", [{}, {"redundancy": 1}, {"extra_members": 1}])
def test_bound_0_never_generates_for_the_next_step_while_a_step_trains(consume: str, more: dict[str, int]) -> None:
    setting = replace(SMALL, staleness=0, trainer_fixed_s=5.0, **more)
    cluster = finish(cluster_of(with_strategies(setting, consume=consume)))
    assert set(cluster.recorder.token_staleness) == {0}
    taken = 0
    for kind, *values in cluster.journal.events:
        if kind in ("lease", "consume"):
            taken = len(values[0]) + (taken if kind == "lease" else 0)
        elif kind == "commit":
            taken = 0
        assert taken < setting.groups or kind not in ("reserve", "route")


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_streaming_is_never_slower_than_waiting_for_the_whole_batch(staleness: int, seed: int) -> None:
    setting = replace(SMALL, staleness=staleness, trainer_per_token_gpu_s=0.1)
    ends = {
        consume: finish(cluster_of(with_strategies(setting, consume=consume), seed)).loop.time()
        for consume in ("stream", "batch")
    }
    assert ends["stream"] <= ends["batch"]


# Deaths


def test_work_of_an_instance_that_dies_for_good_goes_on_elsewhere() -> None:
    cluster = cluster_of()
    held: list[tuple[str, int]] = []

    def kill() -> None:
        held.extend(cluster.rollouts[0].held())
        cluster.rollouts[0].crash()

    at(cluster, 4.3, kill)
    finish(cluster)
    routes = {(name, epoch): instance for name, instance, epoch in events(cluster, "route")}
    given_back = {name for (name,) in events(cluster, "requeue")}
    assert held
    for name, epoch in held:
        assert name in given_back
        assert routes[name, epoch] == "i0"
        assert routes[name, epoch + 1] != "i0"
    kept = Counter(name for name, _ in events(cluster, "stream"))
    assert all(kept[name] for name, _ in held), "the tokens that were streamed are not made again"


@pytest.mark.parametrize("kill", ["crash", "hang"])
def test_a_fleet_that_is_dead_for_good_is_a_named_stall_and_not_a_hang(kill: str) -> None:
    cluster = cluster_of()
    cluster.control.settings = replace(cluster.control.settings, stall_s=300.0)

    def happen() -> None:
        for rollout in cluster.rollouts:
            if kill == "crash":
                rollout.crash()
            else:
                rollout.hang(1e6)

    at(cluster, 4.3, happen)
    with pytest.raises(StalledError, match=r"step 0 waits for \d of 8 groups: p0 .*; 0 of 4 instances are alive"):
        cluster.run()
    assert cluster.loop.time() < 700
    check_all(cluster)
    assert not lost_prompts(cluster)


@pytest.mark.parametrize("down_s", [1.0, 30.0])
def test_a_control_plane_that_dies_while_the_trainer_pushes_trains_every_step_once(down_s: float) -> None:
    cluster = cluster_of(replace(SMALL, trainer_fixed_s=20.0))
    for seconds in (20.0, 90.0):
        at(cluster, seconds, lambda: cluster.kill_control(down_s))
    finish(cluster)
    assert cluster.control.term == 3


@pytest.mark.parametrize("after_push", [False, True])
def test_a_trainer_that_dies_costs_time_but_no_group(after_push: bool) -> None:
    cluster = cluster_of(replace(SMALL, trainer_fixed_s=5.0))
    for seconds in (9.0, 40.0):
        at(cluster, seconds, lambda: cluster.kill_trainer(7.0, after_push))
    finish(cluster)
    assert bool(events(cluster, "rollback")) != after_push


# Data and rewards


@pytest.mark.parametrize("more", [{}, {"redundancy": 2}])
def test_the_last_prompt_of_the_data_is_enough_whatever_is_given_up_before(more: dict[str, Any]) -> None:
    cluster = finish(cluster_of(replace(SMALL, prompts=SMALL.groups * SMALL.steps, **more)))
    assert cluster.control.server.next_prompt == SMALL.groups * SMALL.steps
    assert bool(events(cluster, "release") or cluster.recorder.wasted["redundant"]) == bool(more)


def test_a_reward_worker_that_is_silent_costs_a_prompt_its_first_attempt_but_not_its_place() -> None:
    cluster = cluster_of()
    cluster.rewards.silent = 1.0
    at(cluster, 700.0, lambda: setattr(cluster.rewards, "silent", 0.0))
    finish(cluster)
    released = events(cluster, "release")
    assert {reason for _, reason, _ in released} == {"reward timed out"}
    again = {prompt for prompt, attempt, _ in events(cluster, "admit") if attempt > 0}
    assert again == {int(name[1:]) for name, *_ in released if "." not in name}


# Decisions and repetition


def test_decisions_are_told_with_plain_inputs_at_most_once_a_cycle() -> None:
    cluster = cluster_of()
    decisions: list[tuple[float, Decision]] = []
    cluster.control.on_decision = lambda now, decision: decisions.append((now, decision))
    finish(cluster)
    times = [now for now, _ in decisions]
    assert all(later - earlier >= SMALL.cycle_s - 1e-9 for earlier, later in pairwise(times))
    for now, decision in decisions:
        inputs = json.loads(json.dumps(decision.inputs, allow_nan=False))
        assert inputs["now"] == now
        assert {"newest", "room", "queued", "alive", "versions", "routing"} <= set(inputs)
    routed = sum(decision.inputs["routing"]["routes"] for _, decision in decisions)
    assert routed == len(events(cluster, "route")), "a command that was decided was carried out"


@pytest.mark.parametrize("shuffle", [False, True])
def test_equal_seeds_give_equal_journals(shuffle: bool) -> None:
    one, again, other = (
        finish(cluster_of(replace(SMALL, reward_s=2.0), seed, shuffle=shuffle)).journal.digest() for seed in (3, 3, 4)
    )
    assert one == again != other


def test_round_robin_does_not_send_everything_to_the_first_instance() -> None:
    setting = replace(SMALL, groups=1, group_size=1, staleness=0, steps=8)
    cluster = finish(cluster_of(with_strategies(setting, routing="round_robin")))
    assert Counter(instance for _, instance, _ in events(cluster, "route")) == {f"i{row}": 2 for row in range(4)}


def test_a_trainer_that_is_dead_when_the_control_plane_returns_publishes_nothing() -> None:
    cluster = cluster_of(replace(SMALL, trainer_fixed_s=20.0))
    at(cluster, 15.0, lambda: cluster.kill_control(30.0))
    at(cluster, 16.0, lambda: cluster.kill_trainer(100.0, after_push=False))
    published: list[int] = []
    at(cluster, 110.0, lambda: published.append(cluster.weights.version))
    finish(cluster)
    assert published == [0], "the trainer was dead from 16 s to 116 s"


def test_a_slow_instance_is_known_by_its_own_measurements() -> None:
    cluster = Cluster(replace(preset("paper-14b"), instances=2, groups=4, group_size=4, steps=3), seed=1)
    cluster.rollouts[1].engine.instance.speed = 0.5
    cluster.run()
    table = cluster.control.watch.table
    assert table.fleet.speed.tolist() == pytest.approx([1.0, 0.5], rel=0.1)
    assert cluster.control.cost_error == pytest.approx(0.5, rel=0.2)


def test_a_fleet_is_filled_by_decisions_of_bounded_size_that_do_not_wait_for_the_next_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 16
    for module in (routing, control):
        monkeypatch.setattr(module, "MOST_ROUTES", most)
    cluster = cluster_of(replace(SMALL, groups=16, group_size=4, steps=2))
    placed: list[tuple[float, int]] = []
    waiting: list[int] = []

    def look(now: float, decision: Decision) -> None:
        placed.append((now, decision.inputs["routing"]["routes"]))
        waiting.append(decision.inputs["waiting"])

    cluster.on_decision = look
    finish(cluster)
    assert not any(waiting), "what was sent a moment ago is not taken for what waits for memory"
    first = [routes for now, routes in placed if now == placed[0][0]]
    assert max(routes for _, routes in placed) == most
    assert sum(first) == 2 * 16 * 4, "all that the bound admits, at the start"


def test_one_cycle_draws_no_more_prompts_than_one_decision_looks_at() -> None:
    cluster = Cluster(replace(preset("paper-14b"), instances=4, groups=400, steps=1), seed=1)
    most = 0

    def look(_now: float, _decision: object) -> None:
        nonlocal most
        most = max(most, cluster.control.server.fresh)

    cluster.control.on_decision = look
    cluster.run()
    assert 0 < most <= MOST_QUEUED // 16


def test_a_version_is_pulled_by_decisions_of_bounded_size_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MOST_PULLS", 3)
    cluster = cluster_of(replace(SMALL, instances=8))
    pulls = dict[tuple[float, int], list[int]]()

    def look(now: float, decision: Decision) -> None:
        versions = Counter(each.version for each in decision.commands if isinstance(each, Pull))
        for version, count in versions.items():
            pulls.setdefault((now, version), []).append(count)

    cluster.on_decision = look
    finish(cluster)
    assert [3, 3, 2] in pulls.values(), "all pull at once, three in a decision"
    assert max(count for counts in pulls.values() for count in counts) == 3
