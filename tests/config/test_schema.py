"""The configuration is composed of the options of the parts, and importing it loads nothing heavy."""

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings

from staleflow.config import Config, Data, Evaluation, Reward, Rollout, Training, load
from staleflow.coordinator.strategies import MIGRATION, ROUTING, SYNCHRONISATION, TAIL
from staleflow.registry import Registry
from staleflow.reward.options import REWARDS
from staleflow.rollout.options import ENGINES, Sampling
from staleflow.servers.filters import FILTERS
from staleflow.tasks.options import SOURCES
from staleflow.training.options import ADVANTAGES, CORRECTIONS, LOSSES
from tests.config.settings import as_override, some_settings

REGISTRIES = [
    *(ADVANTAGES, LOSSES, CORRECTIONS, ENGINES, REWARDS, SOURCES, FILTERS),
    *(ROUTING, SYNCHRONISATION, MIGRATION, TAIL),
]


@given(some_settings())
@settings(max_examples=50, deadline=None)
def test_the_parts_accept_what_the_configuration_accepts(given: dict[str, Any]) -> None:
    config = load(None, [as_override(*each) for each in given.items()])
    options = config.trainer_options()
    assert (options.max_staleness, options.temperature) == (config.staleness, config.rollout.temperature)
    assert options.to(Training) == config.training
    assert config.engine_options().to(Rollout).kv_tokens == config.rollout.kv_tokens
    assert config.engine_options().longest == config.longest_prompt + config.longest_response
    assert config.sampling((1,)) == config.rollout.to(Sampling, stop_tokens=(1,))
    assert config.evaluation_sampling((1,)).temperature == config.evaluation.temperature
    assert config.evaluation_sampling((1,)).max_tokens == config.rollout.max_tokens


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda each: each.setting)
def test_every_built_in_exists_and_takes_what_it_will_be_given(registry: Registry[Any]) -> None:
    for name, entry in registry.entries.items():
        if registry is SOURCES or name == "gae":
            continue  # called in ways of their own
        if entry.needs is not None and importlib.util.find_spec(entry.needs) is None:
            continue  # has tests of its own, where it is installed
        parameters = inspect.signature(registry.load(name)).parameters.values()
        needed = [each for each in parameters if each.default is each.empty and each.kind is not each.KEYWORD_ONLY]
        assert len(needed) <= len(registry.takes) <= len(parameters), entry.target


@pytest.mark.parametrize("kind", [Config, Data, Reward, Rollout, Evaluation])
def test_settings_are_frozen(kind: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(kind(), fields(kind)[0].name, 1)


def test_nothing_heavy_is_loaded_to_refuse_a_run() -> None:
    code = (
        "import sys\n"
        "from staleflow.config import estimate, load, to_yaml\n"
        "from staleflow.config.checks import check\n"
        "config = load('arithmetic-smollm', [])\n"
        "to_yaml(config), estimate(config).text()\n"
        "check(load(None, []))\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
