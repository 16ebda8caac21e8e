from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from staleflow.config import PRESETS, Config, ConfigError, differences, load, to_yaml
from staleflow.config.convert import NAMES, leaves, to_tree
from staleflow.config.text import parse, render
from tests.config.settings import as_override, some_settings


@given(some_settings(), st.sampled_from(["laptop", "plain"]))
@example({"data.answer": "\x85"}, "laptop")
@example({"data.template": "a\u2028b{prompt}\x85c\u2029"}, "laptop")
@example({"rollout.max_tokens": 120, "training.clip_norm": 0.5}, "plain")
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any], preset: str
) -> None:
    """And whole: what was left out of a file was read back as another preset has it, by the run's own processes."""
    config = load(preset, [as_override(*each) for each in given.items()])
    assert {name for name, _ in leaves(to_tree(config))} == set(NAMES)
    for name, value in given.items():
        found = attrgetter(name)(config)
        assert (list(found) if isinstance(found, tuple) else found) == value
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    again = load(str(path), [])
    assert again == config
    assert differences(config, again) == []


@given(some_settings())
@settings(max_examples=50, deadline=None)
def test_overrides_and_a_file_say_the_same(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(render(given), encoding="utf-8")
    overrides = [as_override(*each) for each in given.items()]
    assert load(str(path), []) == load(None, overrides) == load(str(path), overrides) == load("laptop", overrides)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_survives_a_file(name: str, tmp_path: Path) -> None:
    config = load(name, [])
    (tmp_path / "config.yml").write_text(to_yaml(config))
    assert load(str(tmp_path / "config.yml"), []) == config


def test_no_source_is_the_laptop_preset() -> None:
    config = load(None, [])
    assert config == load("laptop", [])
    assert (config.model, config.staleness, config.rollout.instances) == ("adder", 2, 2)
    assert (config.groups, config.group_size, config.rollout.max_tokens, config.steps) == (32, 8, 120, 60)
    assert (config.training.learning_rate, config.training.warmup_steps, config.training.loss) == (5e-4, 5, "dapo")
    assert (config.evaluation.every, config.evaluation.problems) == (5, 512)


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_a_file_of_settings_with_a_byte_order_mark_is_read(name: str, tmp_path: Path) -> None:
    """As editors on Windows write it; TOML was refused for an invalid statement at its first column."""
    file = tmp_path / name
    file.write_text("staleness = 1\n" if name == "a.toml" else "staleness: 1\n", encoding="utf-8-sig")
    assert load(str(file), []).staleness == 1


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('preset = "laptop"\nstaleness = 1\n[training]\nbetas = [0.8, 0.9]\n')
    (tmp_path / "a.yaml").write_text("preset: laptop\nstaleness: 1\ntraining: {betas: [0.8, 0.9]}\n")
    config = load(str(tmp_path / "a.toml"), [])
    assert config == load(str(tmp_path / "a.yaml"), [])
    assert (config.staleness, config.training.betas) == (1, (0.8, 0.9))


def test_a_file_changes_parts_of_its_preset_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("preset: one-gpu\nmodel: /models/qwen\nrollout: {instances: 4}\n")
    config = load(str(tmp_path / "a.yaml"), ["rollout.max_tokens=99"])
    assert (config.rollout.instances, config.rollout.device, config.rollout.max_tokens) == (4, "cuda", 99)
    assert config.model == "/models/qwen"


def test_another_model_does_not_inherit_the_learning_rate_of_the_embedded_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: /models/qwen\n")
    assert load(str(tmp_path / "a.yaml"), []).training.learning_rate == 1e-5
    assert load(None, ["model=/models/qwen"]).training.learning_rate == 1e-5
    (tmp_path / "a.yaml").write_text("staleness: 1\n")
    assert load(str(tmp_path / "a.yaml"), []).training.learning_rate == 5e-4


def test_arguments_of_one_source_do_not_reach_another(tmp_path: Path) -> None:
    assert load("arithmetic-smollm", ["data.source=a.jsonl"]).data.arguments == {}
    assert load("arithmetic-smollm", ["data.arguments.digits=2"]).data.arguments == {"digits": 2, "operations": "+-*"}
    (tmp_path / "a.yaml").write_text("preset: arithmetic-smollm\ndata: {source: a.jsonl}\n")
    data = load(str(tmp_path / "a.yaml"), []).data
    assert (data.arguments, data.held_out_count, data.chat) == ({}, None, True)
    assert load("arithmetic-smollm", []).data.held_out_count == 32, "presets stay as they are"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5e3),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("12:30", "12:30"),
        ("2026-11-15", "2026-11-15"),
        ("65_536", 65_536),
        ("007", "007"),
        (".5", 0.5),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_scalars_are_what_a_person_means(text: str, value: Any) -> None:
    assert parse(text) == value
    assert parse(render(value)) == value


def test_words_are_quoted_for_readers_of_older_yaml() -> None:
    assert "migration: 'off'" in to_yaml(load(None, ["strategies.migration=off"]))


def test_a_home_folder_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = load(None, ["runs=~/runs", "model=~/model", "data.source=~/a.jsonl"])
    assert (config.runs, config.model, config.data.source) == ("/home/ada/runs", "/home/ada/model", "/home/ada/a.jsonl")


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert Config().cache == "/fast/staleflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert Config().cache == "/home/ada/.cache/staleflow"


@pytest.mark.parametrize(
    ("override", "resumable"),
    [
        ("steps=99", True),
        ("runs=elsewhere", True),
        ("cache=elsewhere", True),
        ("stop_at=0.9", True),
        ("processes.threads=3", True),
        ("evaluation.every=1", True),
        ("checkpoints.every=1", True),
        ("seed=1", False),
        ("staleness=1", False),
        ("groups=16", False),
        ("data.shuffle=false", False),
        ("training.learning_rate=1e-4", False),
        ("rollout.temperature=0.5", False),
        ("strategies.consume=batch", False),
    ],
)
def test_a_resume_may_change_what_does_not_change_the_training(override: str, resumable: bool) -> None:
    before, after = load(None, []), load(None, [override])
    assert differences(before, after) == ([] if resumable else [override.partition("=")[0]])


def test_steps_count_where_the_learning_rate_falls_to_the_last() -> None:
    before, after = (load(None, ["training.schedule=linear", f"steps={steps}"]) for steps in (60, 90))
    assert differences(before, after) == ["steps"]


def test_the_lines_of_a_file_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("stalenes: 1\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: stalenes is unknown: write staleness$"):
        load(str(tmp_path / "a.yaml"), [])
