"""What no scheduler can beat: computed figures against their definition, and against runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.config import PRESETS
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.lengths import Constant
from staleflow.simulate.setting import preset, with_split
from staleflow.simulate.workload import Sampled, Workload
from staleflow.study.law import balance, ceiling, even_ceiling, in_turn, law, limit, splits, work_of
from staleflow.study.peers import POLICIES, VARIANTS
from staleflow.study.result import throughput

PAPERS = [name for name in PRESETS if name.startswith("paper")]
BASE = with_split(preset("paper-14b"), 32)
SMALL = replace(BASE, instances=6, training_gpus=8, groups=8, group_size=4, steps=12, staleness=1)


def test_terms_of_constant_lengths_can_be_done_by_hand() -> None:
    setting = replace(BASE, workload=Workload(Sampled(Constant(1_000), prompt=Constant(100))), staleness=2)
    work = work_of(setting)
    assert work.tokens == pytest.approx(128 * 16 * 1_000)
    assert work.longest_tokens == pytest.approx(1_000)
    cost = setting.rollout
    alone = cost.steps(1_000, 1, 100) + cost.fixed + 100 * cost.per_prefill_token
    assert work.longest_s == pytest.approx(29.5e9 / 40e9 + alone)
    terms = law(setting, streamed=False, work=work)
    assert terms.train_s == pytest.approx(128 * 16 * 1_100 / 500 / 32)
    assert terms.tail_s == pytest.approx((terms.train_s + work.longest_s) / 3)
    assert terms.binds == "training"
    assert law(setting, streamed=True, work=work).tail_s < terms.tail_s


@pytest.mark.parametrize("name", PAPERS)
def test_presets_split_all_their_gpus_and_the_best_split_is_the_limit(name: str) -> None:
    setting = preset(name)
    assert setting.gpus == (128 if name.endswith("-128") else 64)
    setting.check()
    work = work_of(setting)
    assert all(split.gpus == setting.gpus for split in splits(setting))
    best = limit(setting, work)
    for split in splits(setting):
        each = law(split, streamed=True, work=work)
        assert each.tokens / max(each.train_s, each.rollout_s) <= best * (1 + 1e-12)
    assert balance(setting, work).gpus == setting.gpus


def test_a_larger_bound_never_lowers_the_ceiling_and_streaming_raises_it() -> None:
    setting = preset("paper-30b-a3b-128", "lengths=independent")
    work = work_of(setting)
    for streamed in (False, True):
        laws = [ceiling(replace(setting, staleness=bound), streamed, work).tokens_per_s for bound in range(5)]
        assert laws == sorted(laws)
    assert ceiling(setting, True, work).tokens_per_s > ceiling(setting, False, work).tokens_per_s
    assert ceiling(setting, True, work).tokens_per_s <= limit(setting, work)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("streamed", [True, False])
def test_an_even_fleet_is_no_faster_than_the_law_allows(name: str, streamed: bool) -> None:
    setting = preset(name)
    work = work_of(setting)
    even, law_ = even_ceiling(setting, streamed, work), ceiling(setting, streamed, work).tokens_per_s
    assert 0.5 * law_ < even <= law_ * (1 + 1e-12)


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from([name for name, policy in (POLICIES | VARIANTS).items() if policy.promises_bound]),
    seed=st.integers(0, 1_000),
    bound=st.integers(1, 3),
)
def test_nobody_who_keeps_the_bound_is_faster_than_the_limit(name: str, seed: int, bound: int) -> None:
    policy = (POLICIES | VARIANTS)[name]
    setting = replace(SMALL, workload=replace(SMALL.workload, source=Sampled(Constant(800))), staleness=bound)
    cluster = Cluster(policy.fit(setting), seed, policy=policy)
    cluster.run()
    allowed = in_turn(policy.fit(setting)).tokens_per_s if policy.colocated else limit(setting)
    assert throughput(cluster, bound + 1) <= allowed * 1.01


def test_a_split_without_instances_is_refused() -> None:
    with pytest.raises(ValueError, match="training_gpus=64 of 64 leaves no instance"):
        with_split(BASE, 64)


def test_the_even_ceiling_counts_the_pulls_and_prefills_that_the_longest_goes_through() -> None:
    setting = replace(preset("paper-14b-128"), staleness=2)
    work = work_of(setting)
    once = even_ceiling(setting, True, work)
    slow_pulls = replace(setting, link_bandwidth=setting.link_bandwidth / 10)
    assert even_ceiling(slow_pulls, True, work) < once, "work knows the first pull only"
    dear = replace(setting.rollout, per_prefill_token=2 * setting.rollout.per_prefill_token)
    assert even_ceiling(replace(setting, rollout=dear), True, work) < once
    assert once < ceiling(setting, True, work).tokens_per_s
