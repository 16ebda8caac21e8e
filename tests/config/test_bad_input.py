"""Whatever is wrong with the settings themselves: one line, with what to write instead."""

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.config import ConfigError, convert, load
from staleflow.config.field_names import ELSEWHERE
from staleflow.config.text import render
from tests import refusals


def refused(overrides: list[str], source: str | None = None) -> str:
    return refusals.refused(load, source, overrides)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stalenes=1", "stalenes is unknown: write staleness"),
        ("rolout.instances=3", "rolout.instances is unknown: write rollout.instances"),
        ("instnces=3", "instnces is unknown: write rollout.instances"),
        ("temperature=1", "temperature may be rollout.temperature or evaluation.temperature: write one of them"),
        ("chunk=1", "chunk is now rollout.prefill_tokens"),
        ("training.lr=3", "training.lr is unknown: write training.learning_rate"),
        ("training.learning_rat=3", "training.learning_rat is unknown: write training.learning_rate"),
        ("checkpoints.evry=3", "checkpoints.evry is unknown: write checkpoints.every"),
        ("evaluation.evry=3", "evaluation.evry is unknown: write evaluation.every"),
        ("training.gradient_accumulation_steps=4", "is unknown: a step is always cut into micro-batches"),
        ("gradient_accumulation_steps=4", "is unknown: a step is always cut into micro-batches"),
        ("rollout.n=4", "rollout.n is unknown: write group_size"),
        ("actor_rollout_ref.rollout.n=4", "is unknown: write group_size"),
        ("report_to=wandb", "report_to is unknown: write track=wandb"),
        ("training.loss=grpo", "(grpo is for training.advantage)"),
        ("staleness.x=1", "staleness.x is unknown: "),
        ("rollout.instances.x=1", "rollout.instances.x is unknown: rollout.instances is a whole number"),
        ("staleness", "staleness is not a setting: write key=value"),
        ("=1", "=1 is not a setting: write key=value"),
        ("rollout=3", "write rollout.NAME=value"),
        ("preset=laptop", "name the preset before"),
    ],
)
def test_unknown_names_propose_the_nearest(override: str, line: str) -> None:
    assert line in refused([override])


def test_no_name_of_another_system_is_taken_for_one_that_only_shares_a_word() -> None:
    """``gradient_accumulation_steps`` was answered with ``warmup_steps``."""
    for name, hint in ELSEWHERE.items():
        said = refused([f"{name}=1"])
        assert said == f"{name} is unknown: {hint}"
        named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", hint)) - {"metrics.jsonl", "sf.train"}
        assert named <= set(convert.NAMES), "it names settings that there are"


@pytest.mark.parametrize("name", ["quantum_entanglement", "training.colour", "rollout.steps_of_the_moon", "num_stages"])
def test_a_name_that_nobody_knows_is_answered_with_those_that_there_are(name: str) -> None:
    assert f"{name} is unknown: choose one of " in refused([f"{name}=1"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("staleness=two", "staleness=two: write a whole number"),
        ("staleness=1.5", "staleness=1.5: write a whole number"),
        ("staleness=", "staleness=null: write a whole number"),
        ("stop_at=high", "stop_at=high: write a number, or null"),
        ("data.chat=1", "data.chat=1: write true or false"),
        ("training.loss=sft", "training.loss=sft: write one of ppo, dapo, gspo, cispo"),
        ("training.loss=dapoo", "training.loss=dapoo: write dapo"),
        ("strategies.routing=best", "strategies.routing=best: write one of waterfall,"),
        ("training.schedule=never", "training.schedule=never: write one of constant, linear, cosine"),
        ("filter=some", "filter=some: write one of none, no-signal, or module:function"),
        ("rollout.engine=sglang", "rollout.engine=sglang: write one of builtin, vllm, or module:Class"),
        ("data.source=mystery", "data.source=mystery: write one of adder, calculator, a .jsonl file"),
        ("reward.function=rouge", "reward.function=rouge: write one of adder, exact-match"),
        ("reward.function=http://", "reward.function=http:// has no host"),
        ("rollout.stop_strings=a", "rollout.stop_strings=a: write a list of texts"),
        ("training.betas=[1, 2, 3]", "training.betas=[1, 2, 3]: write a list of 2 numbers"),
        ("data.arguments=3", "data.arguments=3: write names and values"),
        ("data.prompt=[a]", "data.prompt=[a]: write a text"),
    ],
)
def test_wrong_types_say_the_value_and_what_to_write(override: str, line: str) -> None:
    assert line in refused([override])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("staleness=-1", "staleness=-1 is too low: give 0 or more"),
        ("groups=0", "groups=0 is too low: give 1 or more"),
        ("rollout.instances=0", "rollout.instances=0 is too low"),
        ("training.learning_rate=0", "training.learning_rate=0.0 is too low: give a number above 0"),
        ("training.learning_rate=.nan", "is not finite"),
        ("training.betas=[0.9, .inf]", "training.betas=inf is not finite"),
        ("training.clip_norm=.nan", "is not finite"),
        ("training.eps_low=2", "training.eps_low=2.0 is too high: give at most 1"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5 is too high: give at most 1"),
        ("steps=99999999999999999999", "steps=99999999999999999999"),
        ("strategies.mu=3", "strategies.mu=3.0 is too high: give at most 1"),
        ("rollout.device=tpu", "rollout.device=tpu is unknown: give cpu, cuda or cuda:0"),
        ("data.held_out_count=0", "data.held_out_count=0 is too low"),
        ("rollout.max_running=100000000000000", "is more than the tokens of rollout.kv_tokens: give at most"),
        ("evaluation.problems=100000000000", "is too high: give at most 1000000"),
        ("processes.threads=100000000", "is too high: give at most 1024"),
    ],
)
def test_a_bound_below_zero_and_other_values_out_of_range(override: str, line: str) -> None:
    assert line in refused([override])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["redundancy=32"], "give at most 31"),
        (["extra_members=8"], "give at most 7"),
        (["filter=no-signal", "group_size=1", "training.advantage=reinforce++"], "filter=no-signal drops every group"),
        (["group_size=1"], "give 2 or more"),
        (["rollout.kv_tokens=200"], "rollout.kv_tokens=200 cannot hold"),
        (["rollout.temperature=0"], "the same response"),
        (["rollout.stop_strings=['']"], "remove it"),
        (["data.template=hello"], "has no {prompt}"),
        (["data.system=hello"], "data.chat=true"),
        (["data.held_out=a.jsonl", "data.held_out_count=3"], "leave one out"),
        (["training.lora_rank=4", "training.train_only=['*']"], "leave one out"),
        (["training.lora_rank=4", "training.lora_targets=[]"], "name a matrix"),
        (["training.lora_rank=4", "training.lora_targets=[lm_head]"], "such as q_proj"),
        (["training.value_learning_rate=1e-3"], "training.advantage=gae"),
        (["training.advantage=reinforce++", "training.whiten_advantages=true"], "whitened already"),
        (["training.dual_clip=1"], "give a number above 1"),
        (["training.dual_clip=3", "training.loss=gspo"], "has no dual_clip: leave it out, or give one of ppo, dapo"),
        (["training.loss_arguments.x=3"], "training.loss_arguments are for module:function: leave them out"),
        (["reward.arguments.x=3"], "reward.arguments are for module:function: leave them out"),
        (["filter_arguments.x=3"], "filter_arguments are for module:function: leave them out"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9 draws from fewer tokens than the trainer's log-probabilities"),
        (["rollout.top_k=50"], "leave it at 0, or give evaluation.top_k"),
        (["rollout.min_p=0.1"], "leave it at 0, or give evaluation.min_p"),
        (["data.held_out=none.csv"], "give a .jsonl or .parquet file"),
        (["training.overlong_buffer=121"], "give at most 120"),
        (["training.updates_per_step=33"], "give at most 32"),
        (["training.sequence_band=[2, 3]"], "such as [0.5, 2]"),
        (["training.betas=[0.9, 1]"], "such as [0.9, 0.95]"),
    ],
)
def test_contradictions_are_refused_with_the_fix(overrides: list[str], line: str) -> None:
    assert line in refused(overrides)


@pytest.mark.parametrize("override", ["a\nb", "=\n", "steps='\n\n'", "training.loss='a\n\nb'"])
def test_a_line_stays_one_line(override: str) -> None:
    refused([override])


def test_a_section_that_is_a_value_and_an_override_inside_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("rollout: 3\n")
    assert "leave one out" in refused(["rollout.instances=2"], str(tmp_path / "a.yaml"))
    assert "leave one out" in refused(["data.arguments=3", "data.arguments.x=1"])


def test_whole_batch_modes_may_be_streamed_to() -> None:
    assert load(None, ["training.updates_per_step=4", "strategies.consume=stream"]).training.updates_per_step == 4


DEEP = "values are nested too deeply: write them flat"
LEVELS = "abcdefghi"
BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise(LEVELS)
)
"""Nine levels of ten aliases: 200 million values in 400 bytes."""
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n" for before, name in pairwise(LEVELS)
)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.yaml", "a: [", r"line 1"),
        ("a.yaml", "staleness: 1\nstaleness: 2\n", "'staleness' is given twice"),
        ("a.yaml", "- 1\n", "write settings such as"),
        ("a.yaml", "rollout: 3\n", "it is a group of settings"),
        ("a.yaml", "preset: desktop\n", "preset desktop is unknown: choose one of laptop"),
        ("a.yaml", "1: 2\n", "1 is unknown"),
        ("a.yaml", "? [a]\n: 2\n", "cannot be read"),
        ("a.yaml", "data: {arguments: &a {b: *a}}\n", "contains itself"),
        (
            "a.yaml",
            f"data: {{arguments: {'{a: ' * 5000}1{'}' * 5000}}}",
            DEEP,
        ),
        ("a.yaml", f"data: {{arguments: {'[' * 5000}{']' * 5000}}}", DEEP),
        ("a.toml", f"a = {'[' * 5000}{']' * 5000}", DEEP),
        ("a.yaml", BOMB, "aliases stand for more than 100,000 values"),
        ("a.yaml", f"data:\n  arguments: {{a: *i}}\n{BOMB}", "cannot be read"),
        ("a.yaml", MERGES, "aliases stand for more than 100,000 values"),
        ("a.yaml", f"seed: {'9' * 5000}", "cannot be read"),
        ("a.yaml", "data: {arguments: {1: 2}}\n", "write names and values"),
        ("a.yaml", "training: {betas: {a: 1}}\n", "write a list of 2 numbers"),
        ("a.toml", "a = \n", "cannot be read"),
        ("a.yaml", b"\xff\xfe\xff", "cannot be read"),
        ("a.json", "{}", "name a .yaml or .toml file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str | bytes, line: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert line in refused([], str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("lapptop", "preset lapptop is unknown: write laptop"),
        ("quantum", "preset quantum is unknown: choose one of laptop"),
        ("none.yaml", "no such file"),
        ("staleness=1", "settings come after it"),
    ],
)
def test_sources_that_are_not_there(source: str, line: str) -> None:
    assert line in refused([], source)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    for text in ("# nothing yet\n", "rollout:\n  # instances: 3\n"):
        (tmp_path / "a.yaml").write_text(text)
        assert load(str(tmp_path / "a.yaml"), []) == load(None, [])


@given(st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_text_gets_a_traceback(key: str, value: str) -> None:
    for override in (f"{key}={value}", f"steps={value}", f"data.arguments={value}", f"rollout.{key}={value}", key):
        with suppress(ConfigError):
            load(None, [override])


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["staleness", "data", "rollout", "training", "reward", "strategies", "preset", "data.arguments"]
)


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode), st.sampled_from([".yaml", ".toml"]))
@settings(max_examples=100, deadline=None)
def test_no_file_gets_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes, ending: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{ending}"
    path.write_bytes(content)
    with suppress(ConfigError):
        load(str(path), [])


@given(st.dictionaries(NAMES | st.text(max_size=5), TREES, max_size=3))
@settings(max_examples=100, deadline=None)
def test_no_tree_of_values_gets_a_traceback(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(render(tree), encoding="utf-8")
    with suppress(ConfigError):
        load(str(path), [])
