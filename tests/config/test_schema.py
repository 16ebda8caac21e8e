"""What is written down twice, so that nothing heavy need be imported, says the same in both places."""

import subprocess
import sys
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings

from staleflow.config import Config, Data, Evaluation, Reward, Rollout, Training, load, rules, sizes
from staleflow.config.checks import REWARDS
from tests.config.settings import as_override, some_settings

DERIVED = {"max_staleness", "temperature", "total_steps", "max_tokens"}


def defaults(kind: Any) -> dict[str, Any]:
    return {each.name: None if each.default is MISSING else each.default for each in fields(kind)}


def test_training_has_the_options_of_the_trainer() -> None:
    options = pytest.importorskip("staleflow.training.options", reason="needs PyTorch")
    theirs = {name: value for name, value in defaults(options.TrainerOptions).items() if name not in DERIVED}
    assert defaults(Training) == theirs | {"device": "cpu"}
    ours, types = get_type_hints(Training), get_type_hints(options.TrainerOptions)
    assert {name: ours[name] for name in theirs} == {name: types[name] for name in theirs}
    assert options.DUAL_CLIPPED == rules.DUAL_CLIPPED
    assert set(options.EMBEDDINGS) == rules.EMBEDDINGS


@given(some_settings())
@settings(max_examples=50, deadline=None)
def test_the_trainer_accepts_what_the_configuration_accepts(given: dict[str, Any]) -> None:
    options = pytest.importorskip("staleflow.training.options", reason="needs PyTorch")
    config = load(None, [as_override(*each) for each in given.items()])
    named = {each.name: getattr(config.training, each.name) for each in fields(Training) if each.name != "device"}
    options.TrainerOptions(
        max_staleness=config.staleness,
        temperature=config.rollout.temperature,
        total_steps=config.steps,
        max_tokens=config.rollout.max_tokens,
        **named,
    )


def test_rollout_has_the_options_of_the_engine() -> None:
    engine = pytest.importorskip("staleflow.rollout.options", reason="needs PyTorch")
    from staleflow.rollout.engine import Sampling

    ours = defaults(Rollout)
    for theirs in (defaults(engine.EngineOptions), defaults(Sampling)):
        assert {name: value for name, value in theirs.items() if name in ours}.items() <= ours.items()


def test_the_built_in_rewards_are_those_that_exist() -> None:
    from staleflow.reward.verifiers import BUILT_IN

    assert set(REWARDS) == set(BUILT_IN)


def test_model_families_are_those_of_the_engine() -> None:
    checkpoint = pytest.importorskip("staleflow.rollout.model_folder", reason="needs PyTorch")
    assert checkpoint.FAMILIES == sizes.FAMILIES


def test_every_range_names_a_setting() -> None:
    names = [*rules.AT_MOST, *rules.ABOVE_ZERO, *(name for names in rules.AT_LEAST.values() for name in names)]
    for name in names:
        rules.value_of(Config(), name)


@pytest.mark.parametrize("kind", [Config, Data, Reward, Rollout, Evaluation])
def test_settings_are_frozen(kind: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(kind(), fields(kind)[0].name, 1)


def test_nothing_heavy_is_loaded_to_refuse_a_run() -> None:
    code = (
        "import sys\n"
        "from staleflow.config import check, estimate, load, to_yaml\n"
        "config = load('arithmetic-smollm', [])\n"
        "to_yaml(config), estimate(config).text()\n"
        "check(load(None, []))\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
