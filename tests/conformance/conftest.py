from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.rollout.engine import Engine
from staleflow.tasks.base_model import Shape, new_model
from tests.conformance.engines import KINDS, Kind


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    new_model(Shape(hidden=64, intermediate=16, layers=1, heads=2), seed=3).save_pretrained(path)
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind = KINDS[request.param]
    if kind.missing is not None:
        pytest.skip(kind.missing)
    return kind


@pytest.fixture
def make(kind: Kind, folder: Path) -> Callable[[], Engine]:
    return lambda: kind.make(folder)
