"""Bad input that the model's folder, the data, the reward or the machine shows: refused before anything is loaded."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from staleflow.config import ConfigError, Machine, load
from staleflow.config.checks import check
from staleflow.config.sizes import sizes_of
from staleflow.config.trainable import _by_family
from staleflow.model_json import FAMILIES
from staleflow.rollout.options import Rollout
from staleflow.rollout.shapes import SHAPES
from tests import refusals

ROOMY = Machine(cores=8, memory=64 * 2**30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\nbroken, but not the first row\n')
    return path


def settings(tmp_path: Path, model: Path, data: Path, *more: str) -> list[str]:
    given = [f"model={model}", f"data.source={data}", "data.prompt=question", "reward.function=last-number"]
    return [*given, f"runs={tmp_path / 'runs'}", *more]


def refused(overrides: Sequence[str], machine: Machine = ROOMY) -> str:
    return refusals.refused(lambda: check(load("plain", overrides), machine))


def test_a_run_that_can_start_is_not_refused(tmp_path: Path, model: Path, data: Path) -> None:
    check(load("plain", settings(tmp_path, model, data)), ROOMY)
    check(load(None, [f"runs={tmp_path}", f"cache={tmp_path / 'cache'}"]), ROOMY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "model"], "checking writes nothing"


def test_data_with_a_byte_order_mark_is_not_refused(tmp_path: Path, model: Path, data: Path) -> None:
    """As editors on Windows write it; it was refused as not being JSON."""
    data.write_text(data.read_text(), encoding="utf-8-sig")
    check(load("plain", settings(tmp_path, model, data)), ROOMY)


def test_a_missing_model(tmp_path: Path, data: Path) -> None:
    line = refused(settings(tmp_path, tmp_path / "none", data))
    assert "no such folder: give adder, calculator, smollm2-135m, a folder in Hugging Face format" in line
    assert "no such folder" in refused(["model=no/such/model"]), "the model first, then what goes with it"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "does not hold the settings"),
        ("config.json", '{"model_type": "rwkv"}', "use one of llama"),
        ("config.json", '{"model_type": "llama"}', "num_attention_heads is missing"),
        ("model.safetensors", None, "has no model.safetensors"),
        ("tokenizer.json", None, "has no tokenizer.json"),
    ],
)
def test_a_model_folder_with_something_missing(
    tmp_path: Path, model: Path, data: Path, name: str, content: str | None, line: str
) -> None:
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    assert line in refused(settings(tmp_path, model, data))


def test_a_chat_without_a_template(tmp_path: Path, model: Path, data: Path) -> None:
    chatting = settings(tmp_path, model, data, "data.chat=true")
    check(load("plain", chatting), ROOMY)
    (model / "chat_template.jinja").unlink()
    assert "data.chat=false" in refused(chatting)
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check(load("plain", chatting), ROOMY)


def test_responses_longer_than_the_models_positions(tmp_path: Path, model: Path, data: Path) -> None:
    line = refused(settings(tmp_path, model, data, "rollout.max_tokens=8000", "data.max_prompt_tokens=200"))
    assert "8192 positions" in line
    assert "give rollout.max_tokens=7992" in line


def test_a_dataset_that_is_missing(tmp_path: Path, model: Path) -> None:
    assert "no such file" in refused(settings(tmp_path, model, tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"data\.source is not given: give a file"):
        check(load("gsm8k-smollm", [f"model={model}"]), ROOMY)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.prompt=text", "has no column 'text': give data.prompt, one of question, answer"),
        ("data.prompt={question} {body}", "has no column 'body': give data.prompt"),
        ("data.answer=right", "has no column 'right': give data.answer, one of question, answer"),
        ("data.held_out=none.jsonl", "data.held_out=none.jsonl: no such file"),
        ("data.held_out=none.csv", "give a .jsonl or .parquet file"),
        ("data.arguments.x=1", "data.arguments are for module:function: leave them out"),
    ],
)
def test_a_dataset_without_the_named_column(tmp_path: Path, model: Path, data: Path, override: str, line: str) -> None:
    assert line in refused(settings(tmp_path, model, data, override))


@pytest.mark.parametrize(
    ("content", "line"),
    [("", "is empty"), ("\n\n", "is empty"), ("x", "cannot be read"), ("[1]", "the first line is a list")],
)
def test_a_dataset_whose_first_row_is_broken(tmp_path: Path, model: Path, data: Path, content: str, line: str) -> None:
    data.write_text(content)
    assert line in refused(settings(tmp_path, model, data))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("mystery", "data.source=mystery: write one of adder, calculator, a .jsonl"),
        ("no_such_module_here:rows", "importing no_such_module_here failed"),
        ("staleflow.tasks.arithmetic:nothing", "has no nothing"),
    ],
)
def test_a_data_source_that_is_not_known(tmp_path: Path, model: Path, source: str, line: str) -> None:
    assert line in refused(settings(tmp_path, model, Path(source)))


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("rouge", "reward.function=rouge: write one of adder, exact-match"),
        ("no_such_module_here:score", "importing no_such_module_here failed"),
        ("tests.config.settings:SETTINGS", "is a dict: name a function"),
        ("http://", "has no host"),
        ("adder", "cannot score"),
        ("reasoning-gym", "give data.source=reasoning-gym:NAME"),
    ],
)
def test_an_unknown_reward(tmp_path: Path, model: Path, data: Path, function: str, line: str) -> None:
    assert line in refused(settings(tmp_path, model, data, f"reward.function={function}"))


def test_a_package_that_is_missing(tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    absent = ("math_verify", "reasoning_gym", "pyarrow")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    needs = settings(tmp_path, model, data, "reward.function=math-verify")
    assert "pip install math-verify" in refused(needs)
    assert "pip install reasoning-gym" in refused(settings(tmp_path, model, Path("reasoning-gym:chain_sum")))
    (tmp_path / "a.parquet").write_bytes(b"")
    assert "pip install pyarrow" in refused(settings(tmp_path, model, tmp_path / "a.parquet"))


def test_a_model_and_data_that_do_not_belong_together(tmp_path: Path, model: Path, data: Path) -> None:
    assert "which model=" in refused(settings(tmp_path, model, Path("adder"), "reward.function=adder"))
    assert "give a model" in refused(["model=adder", f"data.source={data}", "reward.function=last-number"])
    assert "data.source=adder has no text to chat with" in refused(["data.chat=true"])


def test_an_unwritable_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    laptop = load(None, [f"runs={tmp_path / 'file' / 'runs'}"])
    with pytest.raises(ConfigError, match=r"is not a folder: give another folder by runs="):
        check(laptop, ROOMY)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"cannot be written: give another folder by runs="):
        check(load(None, [f"runs={tmp_path / 'runs'}"]), ROOMY)


@pytest.mark.parametrize(("memory", "most"), [(2 * 2**30, 2), (4 * 2**30, 8), (64 * 2**30, 192)])
def test_more_instances_than_memory_allows(tmp_path: Path, memory: int, most: int) -> None:
    machine = Machine(cores=2, memory=memory)

    def asked(instances: int) -> Any:
        return load(None, [f"rollout.instances={instances}", f"runs={tmp_path}", f"cache={tmp_path}"])

    with pytest.raises(ConfigError, match="the run needs") as error:
        check(asked(500), machine)
    offered = int(str(error.value).split("rollout.instances=")[1].split()[0])
    assert abs(offered - most) <= most // 5 + 1
    check(asked(offered), machine)
    with pytest.raises(ConfigError, match=f"give rollout.instances={offered} instead of {offered + 1}"):
        check(asked(offered + 1), machine)


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    line = f"runs={tmp_path}"
    with pytest.raises(ConfigError, match=r"no such GPU here: give rollout\.device=cpu"):
        check(load(None, [line, "rollout.device=cuda"]), ROOMY)
    with pytest.raises(ConfigError, match=r"no such GPU here: give training\.device=cpu"):
        check(load(None, [line, "training.device=cuda:3"]), ROOMY)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("training.train_only=[nothing.*]", "no parameter is named 'nothing.*': give a name such as model."),
        ("training.lora_targets=[nothing]", "the model has no matrix nothing: give some of down_proj, gate_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_before_a_run_directory_is_made(
    tmp_path: Path, model: Path, data: Path, setting: str, line: str
) -> None:
    more = [setting, *(["training.lora_rank=2"] if "lora" in setting else [])]
    assert line in refused(settings(tmp_path, model, data, *more))
    embedded = [f"{name}=adder" for name in ("model", "data.source", "reward.function")]
    assert line in refused([f"runs={tmp_path}", *embedded, "rollout.max_tokens=64", *more])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_a_family_can_be_named(tmp_path: Path, model: Path, family: str, tied: bool) -> None:
    shape = SHAPES["tiny"] | {"model_type": family, "tie_word_embeddings": tied}
    (model / "config.json").write_text(json.dumps(shape))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    names = {name for name, _ in built.named_parameters()}
    assert {*_by_family(sizes_of(load("plain", [f"model={model}", f"runs={tmp_path}"])))} == names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evaluation.samples=4"], "are all the same with temperature=0: give evaluation.temperature"),
        (["evaluation.figure=pass@4"], "give evaluation.samples=2 or more"),
        (["evaluation.figure=pass@3", "evaluation.samples=4", "evaluation.temperature=1"], "give pass@2, pass@4"),
        (["evaluation.figure=brief"], "evaluation.figure=brief is unknown: give reward or pass@K"),
        (["stop_at=0.9", "evaluation.every=0"], "nothing is evaluated during the run: give evaluation.every"),
        (["stop_at=0.9", "evaluation.when=after"], "evaluation.when=during"),
        (["evaluation.patience=3", "evaluation.every=0"], "nothing is evaluated during the run"),
        (["reward.function=[]"], "function is an empty list"),
        (["reward.function=[my:one, your:one]"], "two of the same name"),
        (["reward.function=[my:one, my:two]", "reward.weights=[1]"], "weights are 1 for 2 functions"),
        (["reward.function=[my:one, my:two]", "reward.arguments={length: 3}"], "give them by name: one, two"),
        (["reward.function=[exact-match, rouge]"], "reward.function=rouge: write one of adder, exact-match"),
    ],
)
def test_evaluation_and_several_rewards_are_checked_when_they_are_given(words: list[str], says: str) -> None:
    assert says in refusals.refused(load, None, words)


def test_several_rewards_have_names_weights_and_arguments_of_their_own() -> None:
    words = ["reward.function=[my:one, exact-match]", "reward.weights=[1, 0.5]", "reward.arguments={one: {length: 3}}"]
    reward = load(None, [*words, "evaluation.figure=one"]).reward
    assert (reward.names, reward.all_weights) == (("one", "exact-match"), (1.0, 0.5))
    assert (reward.arguments_of("one"), reward.arguments_of("exact-match")) == ({"length": 3}, {})


def test_prompts_of_messages_are_checked_in_the_first_row(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for prompt, says in (
        ([{"role": "user", "content": "2 + 2"}], "has messages as prompts: give data.chat=true"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message whose content is a list: write text"),
        (["2 + 2"], "write messages, each with role and content"),
        ([], "no message: write at least one"),
    ):
        path.write_text(json.dumps({"question": prompt, "answer": "4"}) + "\n")
        assert says in refused(settings(tmp_path, model, path))


def test_a_reward_of_a_program_that_is_not_there(tmp_path: Path, model: Path, data: Path) -> None:
    assert "continue there" in refused(settings(tmp_path, model, data, "reward.function=python:correct"))


def test_other_systems_than_linux_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refused([]) == "a run needs Linux, and this is darwin: use a Linux machine, a container or WSL"


def test_what_is_there_already_needs_no_room_but_is_checked_otherwise() -> None:
    """A resume beside living processes was refused for memory that they have; then nothing of it was checked."""
    config, full = load(None, []), Machine(2, 1 << 20)
    with pytest.raises(ConfigError, match="MiB free"):
        check(config, full)
    check(config, full, room=False)
    with pytest.raises(ConfigError, match="cannot hold a prompt"):
        check(load(None, ["rollout.max_tokens=100000"]), full, room=False)


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ([], False),
        (["rollout.device=cuda", "training.device=cuda:0"], True),
        (["rollout.device=cuda:1", "training.device=cuda"], False),
        (["rollout.device=cuda:1", "training.device=cuda", "training.ranks=2"], True),
        (["rollout.device=cuda", "training.device=cpu"], False),
        (["rollout.device=cuda", "training.device=cuda", "runtime=ray"], False),
    ],
)
def test_a_trainer_knows_whether_instances_compute_on_its_gpu(words: list[str], shares: bool) -> None:
    assert load(None, words).trainer_options().shares_gpu == shares


def test_vllm_is_not_given_a_gpu_that_it_would_ignore() -> None:
    assert {Rollout(engine="vllm", device=device).device for device in ("cuda", "cuda:0")} == {"cuda", "cuda:0"}
    with pytest.raises(ConfigError, match=r"device=cuda:1: .*CUDA_VISIBLE_DEVICES=1"):
        Rollout(engine="vllm", device="cuda:1")
