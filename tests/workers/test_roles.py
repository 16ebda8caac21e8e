"""What roles have in common."""

from pathlib import Path

import pytest
import torch

from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.workers import roles
from staleflow.workers.roles import LazyWeights


def test_an_instance_that_is_back_before_the_trainer_waits_for_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of all memory there is no store until another trainer has made one; its first versions are older
    than the one that was announced. This ended the run."""
    name = f"lost-{tmp_path.name}"
    weights, into = LazyWeights(name), {"w": torch.zeros(3)}
    made: list[LocalParameterServer] = []

    def move() -> None:
        if not made:
            made.append(LocalParameterServer.create(name))
        version = made[0].newest() + 1
        made[0].push(version, {"w": torch.full((3,), float(version))})

    weights.moved = move
    try:
        assert weights.pull(into, 2) == 2
        assert into["w"].tolist() == [2.0, 2.0, 2.0]
        monkeypatch.setattr(roles, "ANNOUNCED_S", -1.0)
        with pytest.raises(TimeoutError, match="version 3 did not come within -1 s: no trainer has made it"):
            weights.pull(into, 3)
    finally:
        weights.close()
        for each in made:
            each.close()
