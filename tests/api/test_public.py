"""What ``import staleflow`` gives, and what it costs."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import staleflow as sf

PUBLIC = """
Config ConfigError Engine EngineOptions Interrupted Problem Request Response Result RunError Sampling ServiceAwayError
StaleFlowError StalenessLedger StepOutput Task WeightSource __version__ compare load plan simulate train
"""


def test_the_public_names_are_these() -> None:
    assert sorted(sf.__all__) == sorted(PUBLIC.split())
    assert all(getattr(sf, name) is not None for name in sf.__all__)
    assert set(sf.__all__) <= set(dir(sf))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sf.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_the_promised_signatures() -> None:
    train = inspect.signature(sf.train).parameters
    assert list(train) == ["config", "reward", "data", "on_step", "resume"]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in list(train.values())[1:])
    assert list(inspect.signature(sf.load).parameters)[:2] == ["name_or_path", "overrides"]


def test_a_configuration_is_named_by_a_text_or_a_path_and_one_change_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("staleness: 1\n")
    assert sf.load(tmp_path / "run.yaml", "steps=3") == sf.load(str(tmp_path / "run.yaml"), ["steps=3"])
    assert sf.load().staleness == sf.load("laptop").staleness
    with pytest.raises(sf.ConfigError, match="no such file"):
        sf.load(tmp_path / "nowhere.yaml")


def test_importing_the_package_and_loading_a_configuration_are_light() -> None:
    code = (
        "import sys, staleflow as sf; assert len([m for m in sys.modules if m.startswith('staleflow')]) == 1;"
        "sf.load('laptop', ['steps=2']); sf.train; heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        "assert heavy <= {'numpy'}, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_simulate_stays_a_function_when_the_package_of_that_name_is_imported() -> None:
    import staleflow.simulate.cluster  # noqa: F401

    assert callable(sf.simulate)
    assert not inspect.ismodule(sf.simulate)


def test_types_are_shipped() -> None:
    assert (Path(sf.__path__[0]) / "py.typed").is_file()


def test_a_run_is_simulated_compared_and_planned(tmp_path: Path) -> None:
    config = sf.load("paper-14b", ["steps=3", "groups=4", "group_size=2", "rollout.instances=2", "training_gpus=2"])
    row = sf.simulate(config, picture=tmp_path / "run.svg")
    assert (row["steps"], row["violations"]) == (3, 0)
    assert (tmp_path / "run.svg").is_file()
    rows = sf.compare(config, policies=["staleflow", "discard"], staleness=[1], seeds=1, jobs=1)["rows"]
    assert [row["policy"] for row in rows] == ["staleflow", "discard"]
    assert sf.plan(config, most_staleness=0, most_groups=4, jobs=1)["recommended"]["staleness"] == 0
    hardware: dict[str, Any] = {"gpu": "H100", "nodes": 1, "gpus_per_node": 4, "model": "Qwen2.5-7B"}
    found = sf.plan(config, most_staleness=0, most_groups=4, jobs=1, **hardware)
    assert (found["preset"], found["gpus"], found["train"]["usable"]) == ("Qwen2.5-7B", 4, False)


def test_what_a_command_refuses_is_raised_here(capfd: pytest.CaptureFixture[str]) -> None:
    config = sf.load("paper-14b")
    with pytest.raises(sf.ConfigError, match="are too few for an instance"):
        sf.simulate(config, gpus=1)
    with pytest.raises(sf.ConfigError, match="preset nowhere is unknown"):
        sf.simulate("nowhere")
    assert capfd.readouterr().err == "", "an error is said once, by the exception"
