"""The invariants can fail: each planted mistake is found by the check that guards against it."""

from collections.abc import Callable, Iterable

import pytest

from staleflow.protocol import StalenessLedger
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate import invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recorder import Recorder
from staleflow.simulate.trainer import SimTrainer
from tests.simulate.random_runs import setting_of

Plant = Callable[[pytest.MonkeyPatch], None]


def checked(seed: int) -> None:
    cluster = Cluster(setting_of(seed), seed)
    invariants.watch(cluster, every=1)
    cluster.run()


def tokens_vanish(patch: pytest.MonkeyPatch) -> None:
    left = Recorder.left
    patch.setattr(Recorder, "left", lambda self, name, tokens: left(self, name, max(0, tokens - 1)))


def released_prompts_are_not_owed(patch: pytest.MonkeyPatch) -> None:
    forget = TrajectoryServer._forget

    def forgetful(self: TrajectoryServer, names: Iterable[str], reason: str) -> object:
        before = list(self.owed)
        running = forget(self, names, reason)
        self.owed[:] = before
        return running

    patch.setattr(TrajectoryServer, "_forget", forgetful)


def steps_are_committed_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimTrainer, "finish", lambda self, step: self._loop.at(self._loop.now, self._pushed, step + 1))


PLANTED: dict[str, tuple[Plant, int]] = {
    "tokens were generated": (tokens_vanish, 1),
    "are lost": (released_prompts_are_not_owed, next(seed for seed in range(99) if setting_of(seed).redundancy)),
    "is committed": (steps_are_committed_before_they_are_durable, 1),
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_planted_mistake_is_found(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seed = PLANTED[message]
    checked(seed)
    plant(monkeypatch)
    with pytest.raises(invariants.BrokenInvariantError, match=message):
        checked(seed)


def test_a_group_trained_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger works with a larger bound than the run promises."""
    start = StalenessLedger.__init__
    monkeypatch.setattr(
        StalenessLedger, "__init__", lambda self, batch, bound, more=0: start(self, batch, bound + 2, more)
    )
    with pytest.raises(invariants.BrokenInvariantError, match="older than the bound"):
        checked(next(seed for seed in range(99) if setting_of(seed).staleness == 1))
