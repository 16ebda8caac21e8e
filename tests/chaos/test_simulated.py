"""Simulated runs in which up to forty things go wrong: nothing is lost, trained twice, too late or never, and every run
ends with its last step."""

from collections.abc import Callable, Iterable

import pytest

from bench.chaos_simulated import KINDS, MIXED, kind_of, outcome_of, outcomes, trial_of, until
from staleflow.runtime.control import ControlPlane
from staleflow.runtime.feed import TrainerFeed
from staleflow.runtime.fleet import Member
from staleflow.runtime.outbox import HeldTrainer
from staleflow.types import Report

AGAIN = "rerun with python bench/chaos_simulated.py --again SEED"


def test_a_dozen_faults_of_each_kind_and_hundreds_together_break_no_promise() -> None:
    total = until(outcomes(0, KINDS, jobs=1), most=1_000, seconds=float("inf"))
    assert not {each.seed: each.failure for each in total.failures}, AGAIN
    assert (total.all.lost, total.all.repeated, total.all.violations) == (0, 0, 0)
    assert len(total.mixed) == len(KINDS)


@pytest.mark.parametrize("kind", ["late_announcement", "late_orders", "full_disk", "kill_control_at_an_event"])
def test_no_order_of_messages_ends_a_run(kind: str) -> None:
    """Each with deaths of the trainer and of the control plane between: what one channel says, another contradicts."""
    total = until(outcomes(0, (kind, "kill_trainer", "kill_control"), jobs=1), most=300, seconds=float("inf"))
    assert not {each.seed: each.failure for each in total.failures}, AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 110_000, 500))
def test_a_hundred_thousand_faults_break_no_promise(first: int) -> None:
    total = until(outcomes(first, KINDS, jobs=1), most=5_000, seconds=float("inf"))
    assert not {each.seed: each.failure for each in total.failures}, AGAIN


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (107111, "a trainer that looked for a control plane which is dead by now was taken for one that is at rest"),
        (101078, "a control plane that died after the last version: the next one notes who is there"),
    ],
)
def test_what_broke_a_promise_once(seed: int, what: str) -> None:
    assert not outcome_of(seed, KINDS).failure, what


def test_a_failing_seed_fails_again_in_the_same_way() -> None:
    seed = next(seed for seed in range(99) if kind_of(seed, KINDS) == MIXED)
    trials = [trial_of(seed, KINDS) for _ in range(2)]
    for trial in trials:
        trial.run()
    one, two = trials
    assert one.happened == two.happened
    assert one.cluster.journal.digest() == two.cluster.journal.digest()


# What the faults find


def a_version_counts_before_it_is_announced(patch: pytest.MonkeyPatch) -> None:
    def pulled(self: ControlPlane, member: Member) -> None:
        if member.seen > member.version:
            member.version = member.seen
            self._renew(member, member.seen)
        if member.pulling is not None and member.version >= member.pulling:
            member.pulling = None

    patch.setattr(ControlPlane, "_pulled", pulled)


def what_waited_for_the_disk_is_said_to_whoever_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldTrainer, "_unless_reset", lambda _self, _resets, deliver, *message: deliver(*message))


def a_version_that_was_not_announced_is_rolled_back(patch: pytest.MonkeyPatch) -> None:
    def lost(self: TrainerFeed) -> bool:
        self.away = True
        if self._server.ledger.taken:
            self._server.rollback(self._server.ledger.version)
        return False

    patch.setattr(TrainerFeed, "lost", lost)


def a_response_without_a_score_is_forgotten_in_a_recovery(patch: pytest.MonkeyPatch) -> None:
    recover = ControlPlane.recover

    def forgetful(self: ControlPlane, steps: int, reports: Iterable[Report] = (), trainer_there: bool = True) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self.scoring, "ask", lambda _trajectory: None)
            recover(self, steps, reports, trainer_there)

    patch.setattr(ControlPlane, "recover", forgetful)


def a_recovery_does_not_know_which_step_is_the_last(patch: pytest.MonkeyPatch) -> None:
    recover = ControlPlane.recover

    def endless(self: ControlPlane, _steps: int, reports: Iterable[Report] = (), trainer_there: bool = True) -> None:
        recover(self, 10**9, reports, trainer_there)

    patch.setattr(ControlPlane, "recover", endless)


PLANTED: tuple[tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]], ...] = (
    (a_version_counts_before_it_is_announced, ("late_announcement",)),
    (what_waited_for_the_disk_is_said_to_whoever_is_there, ("full_disk", "kill_trainer")),
    (a_version_that_was_not_announced_is_rolled_back, ("kill_trainer_after_push",)),
    (a_response_without_a_score_is_forgotten_in_a_recovery, ("kill_control",)),
    (a_recovery_does_not_know_which_step_is_the_last, ("kill_control_at_an_event",)),
)


@pytest.mark.parametrize(("plant", "kinds"), PLANTED)
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    short = range(3, 100, 5)
    assert any(outcome_of(seed, kinds).failure for seed in (*short, *range(2, 60)))
