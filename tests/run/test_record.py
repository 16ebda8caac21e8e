"""The summary is what its parts reported, also across a checkpoint."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocol import StalenessLedger
from staleflow.run.record import Record

ages = st.dictionaries(st.integers(0, 3), st.integers(1, 1000), max_size=4)
steps = st.lists(st.tuples(ages, ages, st.floats(0, 5), st.floats(0, 5)), max_size=8)


@given(steps, st.integers(0, 8))
def test_a_record_that_went_through_a_checkpoint_sums_up_the_same(made: list, cut: int) -> None:
    whole, saved = Record(bound=2), Record(bound=2)
    for at, (tokens, trajectories, busy, idle) in enumerate(made):
        if at == cut:
            saved = Record.from_bytes(saved.to_bytes())
        for record in (whole, saved):
            record.committed(at + 1, seconds=float(at))
            record.trained({"reward": 0.5}, tokens, trajectories, busy, idle)
            record.evaluated(at + 1, at / 10)
    counts = StalenessLedger(1, 2).counts()
    assert saved.summary(counts) == whole.summary(counts)
    summary = whole.summary(counts)
    assert summary["tokens_trained"] == sum(sum(tokens.values()) for tokens, *_ in made)
    assert summary["violations"] == sum(each.get(3, 0) for _, each, *_ in made), "3 is beyond the bound of 2"
    assert summary["max_staleness"] == max((age for tokens, *_ in made for age in tokens), default=0)


def test_time_to_90_is_when_the_version_was_made_and_not_when_it_was_measured() -> None:
    record = Record(bound=1)
    for version in range(1, 6):
        record.committed(version, seconds=10.0 * version)
    record.evaluated(4, 0.95)
    record.evaluated(2, 0.80)
    record.evaluated(3, 0.91)
    assert record.seconds_to_goal == 30.0


def test_the_best_version_and_the_evaluations_since_are_of_the_chosen_figure() -> None:
    record = Record(bound=1)
    assert (record.best("reward"), record.without_better("reward")) == (None, 0)
    for version, reward, passed in ((0, 0.2, 0.3), (5, 0.6, 0.3), (10, 0.6, 0.4), (15, 0.5, 0.35)):
        record.evaluated(version, reward, {"reward": reward, "pass@4": passed})
    assert (record.best("reward"), record.without_better("reward")) == ((5, 0.6), 2)
    assert (record.best("pass@4"), record.without_better("pass@4")) == ((10, 0.4), 1)
    evaluations = record.summary(StalenessLedger(1, 1).counts())["accuracy"]
    assert evaluations[-1] == {"step": 15, "seconds": 0.0, "accuracy": 0.5, "pass@4": 0.35}


def test_rewards_that_are_not_zero_or_one_have_no_time_to_90_percent() -> None:
    record = Record(bound=1)
    record.evaluated(1, 0.95, {"reward": 0.95}, binary=False)
    record.evaluated(2, 1.0, {"reward": 1.0}, binary=True)
    summary = record.summary(StalenessLedger(1, 1).counts())
    assert (summary["binary"], summary["seconds_to_90"]) == (False, None)
