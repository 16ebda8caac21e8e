"""The section ``cluster``, and the rule for names without their section."""

from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from staleflow.config import PRESETS, ConfigError, differences, load, to_yaml
from staleflow.config.cluster import COEFFICIENTS
from staleflow.config.convert import NAMES, RENAMED, full_name
from staleflow.config.costs import costs_from_geometry, engine_costs, training_cost, weight_bytes
from staleflow.config.sizes import sizes_of
from staleflow.coordinator.cost import CostModel

LAST = Counter(name.rpartition(".")[2] for name in NAMES)


def refused(*overrides: str, source: str | None = "paper-14b") -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in NAMES if "." in name])
def test_a_section_may_be_left_out_where_only_one_has_the_name(name: str) -> None:
    last = name.rpartition(".")[2]
    if last in NAMES:
        assert full_name(last) == last, "a setting at the top keeps its name"
    elif LAST[last] == 1:
        assert full_name(last) == name
    else:
        with pytest.raises(ConfigError, match=f"{last} may be .*{name}"):
            full_name(last)


def test_a_file_names_its_sections(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_tokens: 99\n")
    assert "max_tokens is unknown: write rollout.max_tokens" in refused(source=str(tmp_path / "a.yaml"))
    assert load(None, ["max_tokens=99"]) == load(None, ["rollout.max_tokens=99"])


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_is_refused_with_the_new_one(name: str) -> None:
    assert name not in NAMES
    assert name not in LAST
    assert refused(f"{name}=1", source=None) == f"{name} is now {RENAMED[name]}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("training_gpus=0", "cluster.training_gpus=0 is too low: give 1 or more"),
        ("cluster.costs.flor=1", "cluster.costs.flor is unknown: choose one of floor, base"),
        ('cluster.costs={"floor":1}', "cluster.costs lacks base, per_sequence"),
        ("cluster.costs.floor=-1", "cluster.costs has a step that takes no time"),
        ("lengths=independent between=0.5", "cluster.lengths=independent says what between=0.5 is: leave one out"),
        ("lengths=long scale=2", "cluster.lengths=long says what scale=2 is: leave one out"),
        ("drift=1", "cluster.drift=1.0 is too high: give at most 0.999"),
        ("prompts=3", "cluster.prompts=3 are too few for 20 steps of 128 groups: give 2560 or more"),
        ("filter=no-signal reward_success=0", "filter=no-signal drops every group"),
        ("link_bandwidth=.inf", "cluster.link_bandwidth=inf is not finite"),
    ],
)
def test_what_cannot_be_modelled_is_refused_with_the_fix(overrides: str, line: str) -> None:
    assert line in refused(*overrides.split())


def test_a_resumed_run_may_model_another_cluster() -> None:
    assert differences(load(None), load(None, ["training_gpus=4", "lengths=long"])) == []


def test_coefficients_are_the_fields_of_the_cost_model() -> None:
    assert tuple(each.name for each in fields(CostModel)) == COEFFICIENTS


def test_costs_are_the_profiles_then_the_given_then_a_guess(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(f'{{"coefficients": {dict.fromkeys(COEFFICIENTS, 0.5)}}}'.replace("'", '"'))
    profile = f"cluster.profile={tmp_path / 'profile.json'}"
    assert engine_costs(load("paper-14b", [profile])).floor == 0.5
    assert engine_costs(load("paper-14b")).floor == 0.012303
    laptop = load("laptop")
    assert engine_costs(laptop) == costs_from_geometry(laptop)
    assert weight_bytes(laptop) == 4 * sizes_of(laptop).parameters
    assert training_cost(load("plain")) > 0


def test_the_fleet_of_a_doubled_preset_is_twice_as_large() -> None:
    for name in ("paper-14b", "paper-32b", "paper-30b-a3b"):
        one, two = load(name), load(f"{name}-128")
        assert two.rollout.instances == 2 * one.rollout.instances
        assert two.cluster.training_gpus == 2 * one.cluster.training_gpus
        assert (two.groups, two.cluster.costs) == (one.groups, one.cluster.costs)


@pytest.mark.parametrize("name", PRESETS)
def test_the_section_survives_a_file(name: str, tmp_path: Path) -> None:
    config = load(name, ["between=0.3", "cluster.reward_s=2"])
    (tmp_path / "a.yaml").write_text(to_yaml(config))
    again = load(str(tmp_path / "a.yaml"))
    assert again.cluster.between == 0.3
    assert again == config
