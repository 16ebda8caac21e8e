"""The trainer: the same update however a step arrives, nothing beyond the bound, and a model that learns."""

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.training import gathering
from staleflow.training.clock import CpuClock
from staleflow.training.micro_batches import forward, micro_batches
from staleflow.training.pieces import Sizes
from staleflow.training.rehearsal import _group, rehearse  # pyright: ignore[reportPrivateUsage]
from staleflow.training.trainer import GroupRows, StalenessError, Trainer, TrainerOptions
from staleflow.types import Row

VOCABULARY = 12


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny()


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config).double()  # Adam turns the rounding of a tiny gradient into a whole step


def groups_of(count: int, members: int, seed: int = 0, version: int = 0) -> list[GroupRows]:
    random = np.random.default_rng(seed)

    def row(group: int, member: int) -> Row:
        size = int(random.integers(1, 9))
        return Row.of(
            f"p{group}/{member}",
            random.integers(0, VOCABULARY, 3).astype("<i4"),
            random.integers(0, VOCABULARY, size).astype("<i4"),
            np.log(random.uniform(0.05, 0.12, size)).astype("<f4"),
            ((version, size),),
            float(random.integers(0, 2)),
        )

    return [[row(group, member) for member in range(members)] for group in range(count)]


def updated(
    base: Any, options: TrainerOptions, groups: list[GroupRows], pieces: list[int]
) -> tuple[list[torch.Tensor], Any]:
    trainer = Trainer(copy.deepcopy(base), options)
    begin = 0
    for size in pieces:
        trainer.feed(0, groups[begin : begin + size])
        begin += size
    assert begin == len(groups)
    report = trainer.finish(0)
    return [each.detach().clone() for each in trainer.parameters], report


class BusyClock(CpuClock):
    """A device that works as long as the test says."""

    busy = True


def test_groups_gather_while_the_device_is_busy_and_go_at_once_when_it_is_not(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of(6, 3)
    options = TrainerOptions(0, learning_rate=1e-2, micro_tokens=60, skip_no_signal=False)
    whole, _ = updated(base, options, groups, [6])
    trainer, passes, clock = Trainer(copy.deepcopy(base), options), list[int](), BusyClock()
    accumulate = trainer._accumulate
    monkeypatch.setattr(trainer, "_clock", clock)
    monkeypatch.setattr(trainer, "_accumulate", lambda work: (passes.append(len(work.groups)), accumulate(work))[1])
    trainer.feed(0, groups[:1])
    assert (passes, trainer.waiting) == ([], True)
    clock.busy = False
    trainer.advance()
    assert (passes, trainer.waiting) == ([1], False)
    clock.busy = True
    trainer.feed(0, groups[1:5])
    assert passes == [1, 4], "what fills a pass does not wait"
    trainer.feed(0, groups[5:])
    trainer.finish(0)
    assert passes == [1, 4, 1]
    for one, other in zip(whole, trainer.parameters, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=10), st.sampled_from([24, 60, 10**6]))
def test_where_instances_compute_on_the_same_gpu_as_many_groups_gather_as_are_still_to_come(
    arrivals: list[tuple[int, bool]], micro_tokens: int
) -> None:
    """How many come together, and whether the device is busy then. Each is begun with once and in order; few passes."""
    passes, clock = list[Sequence[GroupRows]](), BusyClock()
    options = TrainerOptions(0, micro_tokens=micro_tokens, skip_no_signal=False, shares_gpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "WORTH_A_PASS", 20)
        trainer = Trainer(tiny(), options)
        trainer._clock = clock  # type: ignore[assignment]
        patch.setattr(trainer, "_accumulate", lambda work: (passes.append(work.groups), 0.0)[1])
        trainer._open.loss = 0.0  # type: ignore[assignment]
        total = sum(count for count, _ in arrivals)
        groups, at = groups_of(total, 3), 0
        for count, busy in arrivals:
            clock.busy = busy
            trainer.feed(0, groups[at : at + count], missing=total - at - count)
            at += count
            waiting = [row for group in trainer._open.waiting for row in group]
            tokens = Sizes.of(waiting, True).total
            assert tokens == trainer._open.tokens < micro_tokens, "what fills a pass does not wait"
            enough = len(trainer._open.waiting) >= total - at and (tokens >= 20 or at == total)
            assert busy or not waiting or not enough, "nor what there is no more to wait for"
            assert trainer.due == (bool(waiting) and enough)
        trainer.flush()
    assert [group for each in passes for group in each] == groups
    if micro_tokens == 10**6:
        assert len(passes) <= 2 + math.log2(total), "halves of what is missing"


COMBINATIONS = list(
    itertools.product(
        ("grpo", "dr_grpo", "rloo", "reinforce++", "gae"),
        ("ppo", "dapo", "gspo", "cispo"),
        ("none", "truncated", "masked", "decoupled"),
    )
)
TERMS: list[dict[str, Any]] = [
    {"entropy_coefficient": 0.01},
    {"kl_coefficient": 0.1},
    {"kl_coefficient": 0.1, "lora_rank": 2},
    {"skip_no_signal": False},
    {"overlong_buffer": 6, "max_tokens": 8},
    {"whiten_advantages": True},
    {"updates_per_step": 2},
    {"train_only": ("model.layers.1.*", "lm_head.*")},
    {"activation_checkpointing": True},
    {"micro_tokens": 16},
]


def assert_the_same_in_pieces(base: Any, options: TrainerOptions) -> None:
    groups = groups_of(6, 3)
    whole, report = updated(base, options, groups, [6])
    pieces, again = updated(base, options, groups, [1, 3, 2])
    for one, other in zip(whole, pieces, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert again.loss == pytest.approx(report.loss, abs=1e-5)
    assert again.metrics == pytest.approx(report.metrics, abs=1e-4)
    assert again.updates == report.updates == options.updates_per_step


@pytest.mark.parametrize(("advantage", "loss", "correction"), COMBINATIONS)
def test_a_streamed_step_makes_the_same_update_as_a_whole_one(
    base: Any, advantage: Any, loss: Any, correction: Any
) -> None:
    assert_the_same_in_pieces(base, TrainerOptions(0, advantage, loss, correction, learning_rate=1e-2, max_tokens=50))


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: "-".join(term))
def test_a_step_with_more_terms_makes_the_same_update_in_pieces(base: Any, advantage: Any, term: Any) -> None:
    assert_the_same_in_pieces(base, TrainerOptions(0, advantage, correction="decoupled", learning_rate=1e-2, **term))


@pytest.mark.parametrize("budget", [1, 20, 40, 10_000])
def test_the_size_of_a_forward_pass_changes_nothing(base: Any, budget: int) -> None:
    groups = groups_of(4, 4)
    expected, _ = updated(base, TrainerOptions(0, learning_rate=1e-2), groups, [4])
    found, _ = updated(base, TrainerOptions(0, learning_rate=1e-2, micro_tokens=budget), groups, [4])
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_each_row_alone(base: Any, temperature: float) -> None:
    rows = [row for group in groups_of(3, 3) for row in group]
    (batch,) = micro_batches(rows, 10_000)
    found, entropy, _ = forward(base, batch, temperature)
    at = 0
    for row in rows:
        tokens = torch.from_numpy(np.concatenate([row.prompt, row.tokens]).astype(np.int64))
        every = torch.log_softmax(base(tokens[None]).logits[0] / temperature, -1)[row.prompt.size - 1 : -1]
        alone = every.gather(1, tokens[row.prompt.size :, None])[:, 0]
        here = slice(at, at + row.tokens.size)
        assert torch.allclose(found[here], alone, atol=1e-5)
        assert torch.allclose(entropy[here], -(every.exp() * every).sum(-1), atol=1e-5)
        at += row.tokens.size
    assert at == len(found)


def test_a_pass_in_half_precision_gives_probabilities_in_full(base: Any) -> None:
    rows = [row for group in groups_of(3, 3) for row in group]
    (batch,) = micro_batches(rows, 10_000)
    single = copy.deepcopy(base).float()
    full, half = (forward(single, batch, 1.0, half=each) for each in (False, True))
    assert half.logprobs_T.dtype == half.entropy_T.dtype == torch.float32
    assert 0 < float((full.logprobs_T - half.logprobs_T).detach().abs().max()) < 0.02


def test_the_gradient_of_an_on_policy_step_is_the_plain_policy_gradient(base: Any) -> None:
    groups = groups_of(3, 4, seed=5)
    (batch,) = micro_batches([row for group in groups for row in group], 10_000)
    logprobs = forward(base, batch, 1.0)[0].detach().numpy()
    at, honest = 0, list[GroupRows]()
    for group in groups:
        rows: list[Row] = []
        for row in group:
            rows.append(replace(row, logprob_bytes=logprobs[at : at + row.tokens.size].astype("<f4").tobytes()))
            at += row.tokens.size
        honest.append(rows)
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, "dr_grpo", "ppo", clip_norm=1e9, max_tokens=50))
    trainer.feed(0, honest)
    model = copy.deepcopy(base)
    total = torch.zeros(())
    for group in honest:
        mean = sum(row.reward for row in group) / len(group)
        for row in group:
            tokens = torch.from_numpy(np.concatenate([row.prompt, row.tokens]).astype(np.int64))
            every = torch.log_softmax(model(tokens[None]).logits[0], -1)[row.prompt.size - 1 : -1]
            total = total - (row.reward - mean) * every.gather(1, tokens[row.prompt.size :, None]).sum()
    total.backward()
    for one, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


# The bound


def test_a_trajectory_beyond_the_bound_stops_the_trainer_by_name(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(1), version=3)
    trainer.feed(3, groups_of(1, 2, version=2))
    late = groups_of(2, 2, version=3)
    late[1][1] = replace(late[1][1], name="p9/1", spans=((1, 2), (3, 4)))  # type: ignore[index]
    with pytest.raises(
        StalenessError, match=r"trajectory p9/1 has 2 tokens of version 1, 2 steps old at step 3; the bound is 1"
    ):
        trainer.feed(3, late)
    with pytest.raises(StalenessError, match="of version 4, -1 steps old"):
        trainer.feed(3, groups_of(1, 1, version=4))


def test_the_report_counts_the_age_of_every_token(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(2), version=5)
    groups = [*groups_of(2, 2, version=5), *groups_of(1, 3, seed=7, version=3)]
    trainer.feed(5, groups)
    report = trainer.finish(5)
    old = sum(row.tokens.size for row in groups[2])
    assert report.token_staleness == {0: report.tokens - old, 2: old}
    assert report.trajectory_staleness == {0: 4, 2: 3}
    assert (report.max_staleness, report.groups, trainer.version) == (2, 3, 6)


def test_a_trajectory_is_as_old_as_its_oldest_token(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(2), version=5)
    (group,) = groups_of(1, 1, version=5)
    size = group[0].tokens.size
    trainer.feed(5, [[replace(group[0], spans=((3, 1), (5, size - 1)))]])
    report = trainer.finish(5)
    assert (report.trajectory_staleness, report.token_staleness) == ({2: 1}, {2: 1, 0: size - 1})


@pytest.mark.parametrize("term", [{}, {"updates_per_step": 2}, {"advantage": "gae", "whiten_advantages": True}])
def test_a_step_that_is_held_is_checked_when_it_is_fed(base: Any, term: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, **term), version=1)
    before = [each.detach().clone() for each in trainer.parameters]
    with pytest.raises(StalenessError, match="trajectory p0/0 has"):
        trainer.feed(1, groups_of(2, 2, version=0))
    for one, other in zip(before, trainer.parameters, strict=True):
        assert torch.equal(one, other)
        assert other.grad is None


# Resets and what is refused


def test_a_step_that_is_fed_again_after_a_reset_makes_the_same_update(base: Any) -> None:
    options, groups = TrainerOptions(0, learning_rate=1e-2), groups_of(4, 2)
    expected, _ = updated(base, options, groups, [4])
    trainer = Trainer(copy.deepcopy(base), options)
    trainer.feed(0, groups_of(3, 2, seed=9))
    trainer.reset()
    trainer.feed(0, groups)
    trainer.finish(0)
    for one, other in zip(expected, trainer.parameters, strict=True):
        assert torch.equal(one, other)


def test_steps_out_of_order_and_empty_steps_are_refused(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0))
    with pytest.raises(ValueError, match="groups of step 1 were fed while step 0 is trained"):
        trainer.feed(1, groups_of(1, 2))
    with pytest.raises(ValueError, match="step 0 cannot be finished: step 0 has 0 groups"):
        trainer.finish(0)


def test_a_gradient_that_is_not_a_number_changes_nothing(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0))
    with torch.no_grad():
        trainer.parameters[0][0, 0] = float("nan")
    before = [each.detach().clone() for each in trainer.parameters]
    trainer.feed(0, groups_of(2, 3))
    with pytest.raises(FloatingPointError, match="the gradient of step 0 is not finite"):
        trainer.finish(0)
    assert trainer.version == 0
    for one, other in zip(before, trainer.parameters, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1 is too low: give 0 or more"),
        ({"temperature": 0.0}, "temperature=0.0 is too low"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is too low"),
        ({"micro_tokens": 0}, "micro_tokens=0 is too low"),
        ({"schedule": "cosine"}, "give total_steps too"),
        ({"advantage": "ppo"}, "advantage=ppo: write one of grpo, dr_grpo"),
        ({"correction": "some"}, "correction=some: write one of none, truncated"),
        ({"autocast": "on"}, "autocast=on: write one of auto, off"),
        ({"updates_per_step": 0}, "updates_per_step=0 is too low: give 1 or more"),
        ({"kl_coefficient": -1.0}, "kl_coefficient=-1.0 is too low: give 0 or more"),
        ({"gae_lambda": 1.5}, "gae_lambda=1.5 is too high: give at most 1"),
        ({"sequence_band": (1.5, 2.0)}, r"sequence_band=\[1.5, 2\]: give 0 < low <= 1 <= high"),
        ({"overlong_buffer": 5}, "give max_tokens too"),
        ({"overlong_buffer": 5, "max_tokens": 4}, "give max_tokens too, at least the buffer"),
        ({"lora_rank": 2, "train_only": ("*",)}, "leave one out"),
        ({"lora_rank": 2, "lora_targets": ()}, "lora_targets is empty"),
        ({"lora_targets": ("lm_head",)}, "lora_targets has lm_head: adapt matrices inside the layers"),
        ({"value_learning_rate": 0.1}, "given without a value head: give training.advantage=gae"),
        ({"advantage": "reinforce++", "whiten_advantages": True}, "is whitened already"),
        ({"loss": "sft"}, "loss=sft: write one of ppo, dapo, gspo, cispo, or module:function"),
        ({"eps_low": 1.5}, "eps_low=1.5 is too high: give at most 1"),
        ({"eps_high": -0.1}, "eps_high=-0.1 is too low: give 0 or more"),
        ({"eps_high": math.nan}, "eps_high=nan is not finite"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 is too low: give a number above 1"),
        ({"loss": "gspo", "dual_clip": 3.0}, "loss=gspo has no dual_clip: leave it out, or give one of ppo, dapo"),
        ({"loss": "cispo", "dual_clip": 3.0}, "loss=cispo has no dual_clip"),
    ],
)
def test_contradictory_options_are_refused_at_the_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerOptions(**{"max_staleness": 0, **wrong})


def test_clip_ranges_reach_the_loss(base: Any) -> None:
    groups = groups_of(4, 3)

    def made(**options: Any) -> tuple[list[torch.Tensor], Any]:
        return updated(base, TrainerOptions(0, learning_rate=1e-2, **options), groups, [4])

    assert all(map(torch.equal, made(loss="ppo", eps_high=0.28)[0], made(loss="dapo")[0]))
    for loss in ("ppo", "dapo", "gspo", "cispo"):
        _, without = made(loss=loss, eps_low=1.0, eps_high=math.inf)
        _, narrow = made(loss=loss, eps_low=0.0, eps_high=0.0)
        assert without.metrics["clip_fraction"] == 0 < narrow.metrics["clip_fraction"]
    assert "clip_dual" not in made(loss="ppo")[1].metrics
    for loss in ("ppo", "dapo"):
        assert made(loss=loss, dual_clip=1.01)[1].metrics["clip_dual"] > 0


def test_the_learning_rate_warms_up_and_falls() -> None:
    linear = TrainerOptions(0, learning_rate=1.0, warmup_steps=4, schedule="linear", total_steps=14)
    assert [linear.rate(step) for step in (0, 1, 3, 4, 9, 14, 99)] == pytest.approx([0.25, 0.5, 1, 1, 0.5, 0, 0])
    cosine = TrainerOptions(0, learning_rate=1.0, schedule="cosine", total_steps=10)
    assert [cosine.rate(step) for step in (0, 5, 10)] == pytest.approx([1, 0.5, 0])


def test_a_model_learns_what_is_rewarded(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, learning_rate=1e-2))
    random = np.random.default_rng(1)
    prompt = np.array([1, 2, 3], "<i4")

    def chance() -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(trainer.model(torch.tensor([[1, 2, 3]])).logits[0, -1], -1)

    before = float(chance()[7])
    for step in range(12):
        probabilities = chance().double().numpy()
        drawn = random.choice(VOCABULARY, 32, p=probabilities / probabilities.sum())
        rows = [
            Row.of(
                f"p{step}/{at}",
                prompt,
                np.array([token], "<i4"),
                np.array([math.log(probabilities[token])], "<f4"),
                ((step, 1),),
                float(token == 7),
            )
            for at, token in enumerate(drawn)
        ]
        trainer.feed(step, [rows])
        report = trainer.finish(step)
        if report.updates:  # once all are rewarded, none is computed
            assert report.metrics["logprob_difference_max"] < 1e-3
    assert float(chance()[7]) > max(0.5, 3 * before)


@pytest.mark.parametrize("tokens", [512, 4096, 8192, 16_384])
def test_a_full_pass_is_rehearsed_full_where_rows_share_their_prompts(tokens: int) -> None:
    """It held half as many tokens: all rows had one prompt."""
    assert 0.85 * tokens < Sizes.of(_group(tokens, 512, version=0)).total <= tokens


@pytest.mark.parametrize("more", [{}, {"updates_per_step": 2}, {"whiten_advantages": True}])
def test_a_trainer_that_needs_the_whole_batch_rehearses_as_others_do(base: Any, more: dict[str, Any]) -> None:
    """It rehearsed nothing: everything was compiled and recorded in its first step."""
    trainer, passes = Trainer(copy.deepcopy(base), TrainerOptions(0, micro_tokens=600, **more)), list[None]()
    trainer.on_pass = lambda: passes.append(None)
    rehearse(trainer)
    assert len(passes) > 10
    assert not trainer.waiting
    assert all(each.grad is None for each in trainer.parameters)


def test_a_rehearsed_trainer_makes_the_same_update(base: Any) -> None:
    options = TrainerOptions(max_staleness=0, learning_rate=1e-2, micro_tokens=64)
    groups = groups_of(4, 4)
    expected, report = updated(base, options, groups, [4])
    trainer = Trainer(copy.deepcopy(base), options)
    rehearse(trainer)
    trainer.feed(0, groups)
    found = trainer.finish(0)
    assert (found.loss, found.tokens, found.groups) == (report.loss, report.tokens, report.groups)
    for mine, other in zip(trainer.model.parameters(), expected, strict=True):
        assert torch.equal(mine, other)
