"""The invariants can fail: each planted mistake is found by the check that guards against it."""

from collections.abc import Callable, Iterable

import pytest

from bench.chaos_simulated import setting_of
from staleflow.protocol import StalenessLedger
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate import invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recorder import Recorder
from staleflow.simulate.trainer import SimTrainer

Plant = Callable[[pytest.MonkeyPatch], None]


def checked(seed: int, every: int = 1) -> None:
    cluster = Cluster(setting_of(seed), seed)
    invariants.watch(cluster, every)
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


def other_groups_are_committed_than_were_trained(patch: pytest.MonkeyPatch) -> None:
    publish = SimTrainer._publish

    def swapped(self: SimTrainer, lives: int, step: int) -> None:
        self._fed[0] = "p99"
        publish(self, lives, step)

    patch.setattr(SimTrainer, "_publish", swapped)


def the_last_score_of_a_group_is_overheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrajectoryServer, "occupy", lambda _self, _group: None)


def steps_are_committed_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimTrainer, "finish", lambda self, step: self._loop.at(self._loop.now, self._pushed, step + 1))


PLANTED: dict[str, tuple[Plant, int]] = {
    "tokens were generated": (tokens_vanish, 1),
    "are lost": (released_prompts_are_not_owed, next(seed for seed in range(99) if setting_of(seed).redundancy)),
    "are committed": (other_groups_are_committed_than_were_trained, 1),
    "no version was made": (the_last_score_of_a_group_is_overheard, 1),
    "is committed": (steps_are_committed_before_they_are_durable, 1),
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_planted_mistake_is_found(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seed = PLANTED[message]
    checked(seed)
    plant(monkeypatch)
    with pytest.raises(invariants.BrokenInvariantError, match=message):
        checked(seed)


@pytest.mark.parametrize(("every", "message"), [(1, "too old for every step"), (10**9, "older than the bound")])
def test_a_group_trained_too_late_is_found(every: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger works with a larger bound than the run promises: found while it is live, or when it is trained."""
    start = StalenessLedger.__init__
    monkeypatch.setattr(
        StalenessLedger, "__init__", lambda self, batch, bound, more=0: start(self, batch, bound + 2, more)
    )
    with pytest.raises(invariants.BrokenInvariantError, match=message):
        checked(next(seed for seed in range(99) if setting_of(seed).staleness == 1), every)
