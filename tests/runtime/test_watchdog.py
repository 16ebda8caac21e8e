"""A process that stands still is named in seconds and replaced after its limit; one that moves never is."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.watchdog import FIRST_LOST_S, FIRST_S, LATE, LATE_S, LOST, Watchdog


def looks(watchdog: Watchdog, begin: float, end: float) -> list[str]:
    """What a look every second says, between two times."""
    found: list[str] = []
    at = begin
    while at <= end:
        found += [f"{each.name} {'lost' if each.lost else 'late'}" for each in watchdog.look(at)]
        at += watchdog.interval_s
    return found


def trained(watchdog: Watchdog, seconds: float, size: float = 100.0) -> None:
    watchdog.asked("trainer", "train", "step 0", 0.0, size)
    watchdog.done("trainer", "train", seconds)


def test_a_hung_trainer_is_named_within_five_seconds_and_lost_after_its_limit() -> None:
    watchdog = Watchdog(lost_s=60.0)
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0, 100.0)
    assert looks(watchdog, 2.0, 5.0 - 0.1) == []
    assert looks(watchdog, 5.0, 6.0) == ["trainer late"] * 2
    assert looks(watchdog, 7.0, 59.0) == ["trainer late"] * 53
    assert looks(watchdog, 62.0, 62.0) == ["trainer lost"]
    assert "step 1" in str(watchdog.look(62.0)[0])


def test_nobody_is_blamed_who_has_nothing_to_do() -> None:
    watchdog = Watchdog()
    trained(watchdog, 0.5)
    assert looks(watchdog, 1.0, 500.0) == []


def test_large_work_is_given_the_time_that_its_size_takes() -> None:
    watchdog = Watchdog(lost_s=10.0)
    trained(watchdog, 2.0, size=100.0)
    watchdog.asked("trainer", "train", "step 1", 2.0, 1000.0)  # 20 s are normal
    assert looks(watchdog, 3.0, 2.0 + 20 * LATE - 1) == []
    assert looks(watchdog, 2.0 + 20 * LATE + 0.5, 2.0 + 20 * LATE + 1) == ["trainer late"]
    assert looks(watchdog, 2.0 + 20 * LATE + 1, 2.0 + 20 * LOST - 1).count("trainer lost") == 0


def test_work_that_moves_is_never_late_however_long_it_takes() -> None:
    watchdog = Watchdog()
    trained(watchdog, 0.1)
    watchdog.asked("trainer", "train", "step 1", 1.0)
    for second in range(2, 300):
        watchdog.moved("trainer", float(second))
        assert watchdog.look(float(second) + 0.5) == []


def test_the_first_work_of_a_kind_gets_the_benefit_of_the_doubt() -> None:
    watchdog = Watchdog()
    watchdog.asked("evaluator", "evaluate", "version 0", 0.0)
    assert looks(watchdog, 1.0, FIRST_S - 1) == []
    assert looks(watchdog, FIRST_S, FIRST_S) == ["evaluator late"]
    assert "evaluator lost" not in looks(watchdog, FIRST_S + 1, FIRST_LOST_S - 1)


def test_what_matters_is_silence_and_not_how_long_the_work_takes() -> None:
    """An evaluation of minutes that says something every second is named as soon as a short one."""
    watchdog = Watchdog(lost_s=10.0)
    watchdog.asked("evaluator", "evaluate", "version 0", 0.0)
    for second in range(1, 200):
        watchdog.moved("evaluator", float(second))
    watchdog.done("evaluator", "evaluate", 200.0)
    watchdog.asked("evaluator", "evaluate", "version 1", 200.0)
    assert looks(watchdog, 201.0, 204.0) == ["evaluator late"]
    assert looks(watchdog, 205.0, 210.0)[-1] == "evaluator lost"


def test_one_that_was_only_slow_is_not_replaced_again_and_again() -> None:
    watchdog = Watchdog(lost_s=10.0)
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0, 100.0)
    assert looks(watchdog, 2.0, 12.0)[-1] == "trainer lost"
    watchdog.forget("trainer", 12.0)
    watchdog.asked("trainer", "train", "step 1", 12.0, 100.0)
    assert "trainer lost" not in looks(watchdog, 13.0, 12.0 + 10 * LOST)


def test_a_standstill_is_news_once_until_it_ends() -> None:
    watchdog = Watchdog()
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0, 100.0)
    assert [each.news for at in (6.0, 7.0, 8.0) for each in watchdog.look(at)] == [True, False, False]
    watchdog.moved("trainer", 8.5)
    assert [each.news for at in (9.5, 11.0, 13.5) for each in watchdog.look(at)] == [True]


def test_a_control_plane_that_stood_still_itself_blames_nobody() -> None:
    watchdog = Watchdog(lost_s=60.0)
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0, 100.0)
    assert watchdog.look(2.0) == []
    assert watchdog.look(3602.0) == []  # the laptop slept for an hour
    assert looks(watchdog, 3603.0, 3603.0) == []
    assert looks(watchdog, 3606.0, 3606.0) == ["trainer late"]


def test_one_that_takes_a_dead_ones_place_is_not_late_from_the_start() -> None:
    watchdog = Watchdog()
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0)
    watchdog.forget("trainer")
    assert looks(watchdog, 100.0, 101.0) == []
    watchdog.asked("trainer", "train", "step 1", 101.0)
    assert looks(watchdog, 102.0, 104.0) == []


@given(st.lists(st.floats(0.01, 20.0), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_work_no_slower_than_what_was_seen_lately_is_never_late(durations: list[float], share: float) -> None:
    watchdog = Watchdog()
    now, slowest = 0.0, 0.0
    for seconds in durations:
        watchdog.asked("i0", "decode", "8 responses", now)
        now += seconds
        watchdog.done("i0", "decode", now)
        slowest = max(seconds, 0.9 * slowest)
    watchdog.asked("i0", "decode", "8 responses", now)
    after = now + min(share, 0.999) * max(LATE_S, LATE * slowest)
    assert watchdog.look(after) == []


def test_what_is_known_from_elsewhere_counts_from_the_first_time() -> None:
    """A trainer that was stopped while its control plane died was waited for as long as for a start: ten minutes."""
    watchdog = Watchdog(lost_s=30.0)
    watchdog.normal("trainer", "return", 8.0)
    watchdog.asked("trainer", "return", "its return", 0.0)
    lost = (at for at in range(1, 100) if any(each.lost for each in watchdog.look(float(at))))
    assert next(lost) == 80


def test_a_first_save_that_waits_behind_other_work_does_not_give_that_ten_minutes() -> None:
    watchdog = Watchdog(lost_s=30.0)
    trained(watchdog, 0.5)
    watchdog.asked("trainer", "train", "step 1", 1.0, 100.0)
    watchdog.asked("trainer", "save", "checkpoint 1", 1.5, begun=False)
    assert "trainer lost" in looks(watchdog, 2.0, 32.0), "it has not come to the checkpoint"
    watchdog.forget("trainer")
    watchdog.asked("trainer", "train", "step 1", 41.0, 100.0)
    watchdog.asked("trainer", "save", "checkpoint 1", 41.0, begun=False)
    watchdog.begun("trainer", "save")
    assert "trainer lost" not in looks(watchdog, 42.0, 41.0 + FIRST_LOST_S - 1), "nobody knows how long it takes"
    assert "trainer lost" in looks(watchdog, 41.0 + FIRST_LOST_S, 42.0 + FIRST_LOST_S)
