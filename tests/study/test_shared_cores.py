"""Cores are shared as they were measured, and where there are enough of them nothing changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shared_cores import Overlap, SharedCluster, Shares, Sharing, calibrated
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.lengths import Lognormal
from staleflow.simulate.setting import Setting, preset
from staleflow.simulate.workload import Sampled, Workload

PLENTY = Sharing(1000, 1.0, 1.0)
SETTING = replace(
    preset("paper-14b"),
    groups=4,
    group_size=4,
    instances=2,
    training_gpus=1,
    steps=8,
    kv_tokens=20_000,
    max_running=16,
    trainer_per_token_gpu_s=0.002,
    trainer_fixed_s=0.5,
    push_s=0.1,
    reward_s=0.05,
    cycle_s=0.1,
    workload=Workload(Sampled(Lognormal.from_mean(300, 1.0)), max_tokens=2_000),
)


def shared(setting: Setting, sharing: Sharing, seed: int = 1) -> SharedCluster:
    cluster = SharedCluster(setting, seed, sharing, lambda _: True)
    cluster.run()
    return cluster


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_with_a_core_for_everyone_a_run_is_the_plain_one(bound: int, seed: int) -> None:
    setting = replace(SETTING, staleness=bound)
    plain = Cluster(setting, seed)
    plain.run()
    cluster = shared(setting, PLENTY, seed)
    assert [mark.time for mark in cluster.marks] == pytest.approx([step.time for step in plain.recorder.steps])
    assert cluster.recorder.token_staleness == plain.recorder.token_staleness
    assert cluster.marks[-1].tokens == plain.recorder.trained_tokens
    assert cluster.overlap() == (0.0, 0.0), "nobody was in anybody's way"


def test_half_a_core_for_everyone_takes_twice_as_long() -> None:
    computing = replace(SETTING, push_s=0.0, reward_s=0.0, cycle_s=1e-6, weight_bytes=1.0)
    whole, half = (shared(computing, Sharing(1000, alone, alone)) for alone in (1.0, 0.5))
    assert half.marks[-1].time == pytest.approx(2 * whole.marks[-1].time, rel=0.02)


def test_fewer_cores_are_slower_and_all_of_the_time_is_accounted_for() -> None:
    cluster = shared(SETTING, Sharing(2, 0.9, 0.5))
    assert cluster.marks[-1].time > shared(SETTING, PLENTY).marks[-1].time
    end = cluster.marks[-1]
    assert 0 < end.trainer_idle_s < end.time
    assert 0 < end.instances_running_s <= SETTING.instances * end.time
    assert cluster.recorder.violations == 0


def test_groups_that_teach_nothing_take_the_trainer_no_time() -> None:
    cluster = SharedCluster(SETTING, 1, PLENTY, lambda _: False)
    cluster.run()
    end = cluster.marks[-1]
    assert end.time - end.trainer_idle_s == pytest.approx(SETTING.steps * SETTING.trainer_fixed_s)


shares = st.floats(0.1, 1.0)


@given(shares, st.floats(0.1, 0.95), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(1, 4))
def test_what_was_measured_is_solved_for(alone: float, part: float, met: float, instance: float, cores: int) -> None:
    trainer = min(0.95 * alone, max(0.05, alone * part))
    measured = Shares(alone - met * (alone - trainer), alone - instance * trainer / cores, 0.9, 0.9)
    found = Sharing.measured(measured, cores, Overlap(met, instance))
    assert (found.alone, found.trainer) == pytest.approx((alone, trainer), rel=1e-6, abs=1e-6)


@given(shares, shares, shares, shares, st.integers(1, 4), st.integers(1, 8))
def test_speeds_are_possible_whatever_was_measured(
    trainer: float, instance: float, training: float, running: float, cores: int, instances: int
) -> None:
    measured = Shares(trainer, instance, training, running)
    sharing = Sharing.measured(measured, cores, Overlap.guessed(measured, cores, instances))
    for count in range(instances + 1):
        for busy in (False, True):
            each, trains = sharing.speeds(count, busy)
            assert 0 < each <= 1
            assert 0 < trains <= 1
            assert count * each + busy * trains <= cores + 1e-9 or count < cores


def test_a_calibration_finds_the_shares_that_a_run_had() -> None:
    """The run is simulated here too, so that what it measured has no noise."""
    true = Sharing(2, 0.9, 0.6)
    cluster = shared(SETTING, true, seed=0)
    overlap = cluster.overlap()
    measured = Shares(
        true.alone - overlap.trainer * (true.alone - true.trainer),
        true.alone - overlap.instance * true.trainer / true.cores,
        trainer_busy=0.7,
        instance_busy=0.7,
    )
    found = calibrated(measured, SETTING, 2, lambda _: True)
    assert (found.alone, found.trainer) == pytest.approx((true.alone, true.trainer), rel=0.05)
