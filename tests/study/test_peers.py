"""Peer policies: what each promises about the bound, and that comparing them is fair."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.protocol.ledger import LedgerError
from staleflow.simulate import invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.lengths import Bimodal
from staleflow.simulate.setting import Setting, preset
from staleflow.simulate.workload import Sampled, Workload
from staleflow.study.peers import (
    PEERS,
    POLICIES,
    SLOTS_WITH_EXCHANGE,
    SLOTS_WITHOUT_EXCHANGE,
    STALEFLOW,
    VARIANTS,
    Policy,
    chosen,
    chunked,
    named,
)
from staleflow.study.peers.chunked import ChunkedLedger
from staleflow.study.peers.discard import OVER_AGE, DiscardLedger
from staleflow.study.peers.ledger import PeerLedger
from staleflow.study.peers.ordered import OneStepLedger, WindowLedger
from staleflow.study.peers.quota import QuotaLedger
from staleflow.study.peers.slots import LiteralSlotLedger, SlotLedger
from staleflow.study.result import row

SMALL = replace(preset("paper-14b"), instances=6, training_gpus=8, groups=8, group_size=4, steps=8, staleness=1)
EVERY = POLICIES | VARIANTS
PROMISING = [name for name, policy in EVERY.items() if policy.promises_bound]


def run(policy: Policy, setting: Setting = SMALL, seed: int = 3) -> Cluster:
    cluster = Cluster(policy.fit(setting), seed, policy=policy)
    cluster.run()
    return cluster


# In whole runs


@pytest.mark.parametrize("name", PROMISING)
@pytest.mark.parametrize("bound", [1, 2])
def test_who_promises_the_bound_keeps_it_and_loses_no_prompt(name: str, bound: int) -> None:
    policy = EVERY[name]
    cluster = Cluster(policy.fit(replace(SMALL, staleness=bound)), seed=3, policy=policy)
    invariants.watch(cluster)
    cluster.run()
    result = row(cluster, 1.0)
    assert result["violations"] == result["lost_groups"] == result["repeated_groups"] == 0
    assert result["max_staleness"] <= min(bound, policy.most_staleness if policy.most_staleness is not None else bound)
    assert len(cluster.recorder.steps) == SMALL.steps
    assert all(len(step.lengths) == 8 * 4 for step in cluster.recorder.steps)


@pytest.mark.parametrize("name", [name for name, policy in EVERY.items() if not policy.promises_bound])
def test_a_quota_lets_a_slow_group_be_trained_too_late(name: str) -> None:
    slow = Workload(Sampled(Bimodal(100, 12_000, 0.02)), max_tokens=20_000)
    cluster = run(EVERY[name], replace(SMALL, workload=slow, steps=16))
    assert cluster.recorder.violations > 0
    assert max(cluster.recorder.group_staleness) > SMALL.staleness


def test_discarding_wastes_tokens_and_trains_shorter_responses() -> None:
    result = row(run(named("discard")), 1.0)
    assert result["wasted"][OVER_AGE] > 0
    assert result["length_shift"] > row(run(named("window_wait")), 1.0)["length_shift"]


def test_the_pipeline_is_one_step_off_whatever_the_bound() -> None:
    ages = [run(named("one_step"), replace(SMALL, staleness=bound)).recorder.group_staleness for bound in (1, 3)]
    assert ages[0] == ages[1] == {0: 8, 1: 7 * 8}


def test_colocated_gpus_do_both_and_pay_for_the_change() -> None:
    cluster = run(named("synchronous"))
    setting = cluster.setting
    assert (setting.instances, setting.training_gpus, setting.staleness) == (14, 14, 0)
    assert setting.trainer_fixed_s == setting.reshard_s == 15.0
    at_home = preset("laptop", "cluster.trainer_fixed_s=0.5")
    assert named("synchronous").fit(at_home).trainer_fixed_s == 0.5, "nothing changes roles on one machine"
    assert cluster.recorder.token_staleness.keys() == {0}


def test_without_interruption_no_response_mixes_versions() -> None:
    for name in ("quota", "one_step"):
        spans: list[int] = []
        policy = named(name)
        cluster = Cluster(policy.fit(SMALL), seed=3, policy=policy)
        before = cluster.control.server.on_committed
        cluster.control.server.on_committed = lambda step, groups, before=before, spans=spans: (
            spans.extend(len(member.spans) for group in groups for member in group.members),
            before(step, groups),
        )[1]
        cluster.run()
        assert set(spans) == {1}


@pytest.mark.parametrize("name", list(EVERY))
def test_equal_seeds_give_equal_runs_and_pair_the_work(name: str) -> None:
    setting = replace(SMALL, steps=4)
    first, again = run(EVERY[name], setting), run(EVERY[name], setting)
    assert first.journal.digest() == again.journal.digest()
    ours = run(STALEFLOW, setting)
    trained = {prompt for prompt in first.recorder.trained_prompts if prompt in ours.recorder.trained_prompts}
    for prompt in trained:
        assert first.workload.length(prompt, 0) == ours.workload.length(prompt, 0)


def test_streaming_is_worth_nothing_in_chunks_of_a_batch() -> None:
    whole, by_group = run(STALEFLOW.variant("batch")), run(STALEFLOW)
    one_chunk = run(chunked(SMALL.groups))
    assert one_chunk.loop.time() == pytest.approx(whole.loop.time(), rel=0.02)
    assert by_group.loop.time() < whole.loop.time()


@pytest.mark.parametrize("policy", [SLOTS_WITH_EXCHANGE, SLOTS_WITHOUT_EXCHANGE])
def test_ours_runs_on_literal_slots_too(policy: Policy) -> None:
    assert run(policy).recorder.violations == 0


def test_groups_without_signal_are_replaced_under_every_policy() -> None:
    setting = replace(SMALL, filter="no-signal", reward_success=0.7, steps=4)
    for policy in POLICIES.values():
        result = row(run(policy, setting), 1.0)
        assert result["wasted"]["no signal"] > 0
        assert result["lost_groups"] == 0


# The ledgers alone, driven at random

LEDGERS = {
    WindowLedger: True,
    OneStepLedger: True,
    SlotLedger: True,
    LiteralSlotLedger: True,
    DiscardLedger: True,
    QuotaLedger: False,
    ChunkedLedger: True,
}


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(list(LEDGERS)), seed=st.integers(0, 10**6), bound=st.integers(1, 3), stream=st.booleans())
def test_ledgers_fill_every_step_and_keep_what_they_promise(kind, seed: int, bound: int, stream: bool) -> None:
    random, size = Random(seed), 3
    ledger = kind(size, bound)
    versions: dict[str, int] = {}
    flying: list[str] = []
    trained: set[str] = set()
    made = 0
    for _ in range(400):
        act = random.random()
        if act < 0.4 and ledger.reserve(f"g{made}", ledger.version):
            versions[f"g{made}"] = ledger.version
            flying.append(f"g{made}")
            made += 1
        elif act < 0.7 and flying:
            ledger.occupy(flying.pop(random.randrange(len(flying))))
        elif act < 0.75 and flying:
            ledger.release(flying.pop(random.randrange(len(flying))), "failed")
        elif stream and ledger.frontier == ledger.version:
            _train(ledger.take(), ledger.version, versions, trained, bound if LEDGERS[kind] else None)
        if ledger.frontier == ledger.version and ledger.ready():
            before = set(trained)
            batch = ledger.consume()
            fresh = [name for name in batch.groups if name not in before]
            _train(fresh, batch.step, versions, trained, bound if LEDGERS[kind] else None)
            assert len(batch.groups) == size
        if ledger.frontier > ledger.version and random.random() < 0.5:
            ledger.commit(ledger.version)
            if isinstance(ledger, DiscardLedger):
                for name in ledger.over_age():
                    ledger.release(name, OVER_AGE)
                    flying = [each for each in flying if each != name]
        counts = ledger.counts()
        assert counts["admitted"] == counts["live"] + counts["committed"] + sum(counts["released"].values())
    assert ledger.version > 3, "nothing may get stuck"


def _train(names, step: int, versions: dict[str, int], trained: set[str], bound: int | None) -> None:
    for name in names:
        assert name not in trained
        trained.add(name)
        assert bound is None or step - versions[name] <= bound


def test_a_rolled_back_step_is_complete_again() -> None:
    ledger: PeerLedger = QuotaLedger(2, 1)
    for name in ("a", "b", "c"):
        assert ledger.reserve(name, 0)
        ledger.occupy(name)
    assert ledger.take() == ["a", "b"]
    ledger.rollback(0)
    assert ledger.consume().groups == ["a", "b"]


# Names


def test_all_are_the_eight_as_they_ship() -> None:
    assert [policy.name for policy in chosen("all")] == [
        "staleflow", "synchronous", "one_step", "quota", "quota_interrupt", "window_wait", "discard", "psrl_default",
    ]  # fmt: skip
    assert all(peer.strategies["consume"] == "batch" for peer in PEERS)
    assert {policy.name for policy in chosen("every")} == set(EVERY)
    assert [policy.name for policy in chosen("quota, staleflow,quota")] == ["quota", "staleflow"]


@pytest.mark.parametrize("text", ["nope", "", ",", "synchronous+stream", "staleflow+stream"])
def test_unknown_policies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown|empty"):
        chosen(text)


@pytest.mark.parametrize(("text", "policy"), [("verl", "window_wait"), ("TRL", "discard"), ("prime_rl", "discard")])
def test_the_name_of_a_system_says_which_policy_stands_for_it(text: str, policy: str) -> None:
    with pytest.raises(ConfigError, match=f"is a system: what it does by default is like .*{policy}"):
        chosen(text)


def test_redundancy_is_not_what_peers_do() -> None:
    with pytest.raises(LedgerError, match="redundancy=2"):
        Cluster(named("quota").fit(replace(SMALL, redundancy=2)), 0, policy=named("quota"))


def test_variants_of_lengths_change_what_they_say() -> None:
    means = {
        name: preset("paper-14b", f"lengths={name}").workload.mean_tokens()
        for name in ("independent", "correlated", "long")
    }
    assert means["independent"] == means["correlated"]
    assert 5_000 < means["long"] < 6_000


def test_a_step_that_trains_for_hours_is_not_a_stall() -> None:
    """Few GPUs for long responses: there is no news for more than an hour while they are trained."""
    slow = replace(SMALL, training_gpus=1, steps=2, trainer_per_token_gpu_s=1.0)
    cluster = Cluster(slow, 1)
    cluster.run()
    assert cluster.loop.time() > 2 * 3_600
