"""No two compute processes spin on the same core unless there are fewer cores than processes."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.local.placement import placement
from staleflow.runtime.local.scaling import unused as names


@given(st.sets(st.integers(0, 255), min_size=1, max_size=64).map(sorted), st.integers(1, 16))
def test_cores_are_not_oversubscribed(cores: list[int], instances: int) -> None:
    places = placement(cores, names(instances))
    computing = [place for name, place in places.items() if name != "evaluator"]
    assert len(computing) == instances + 1
    assert all(place.cores and set(place.cores) <= set(cores) and place.threads >= 1 for place in computing)
    if len(cores) >= len(computing):
        used = [core for place in computing for core in place.cores]
        assert sorted(used) == cores, "every core has one owner"
        assert all(place.threads == len(place.cores) for place in computing)
    else:
        assert all(place.threads == 1 for place in computing)


def test_two_cores_two_instances() -> None:
    places = placement([0, 1], names(2))
    assert [places[name].cores for name in ("i0", "i1", "trainer")] == [(0,), (1,), (0, 1)]
    assert places["trainer"].nice < places["i0"].nice < places["evaluator"].nice


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_ranks_of_a_trainer_count_as_processes(cores: int, instances: int, ranks: int) -> None:
    places = placement(range(cores), names(instances), ranks=ranks)
    assert places["trainer"].threads >= ranks
    if cores >= instances + ranks:
        assert len(places["trainer"].cores) == places["trainer"].threads
        assert all(len(places[name].cores) <= len(places["trainer"].cores) // ranks for name in names(instances))


def test_unpinned_processes_may_run_anywhere() -> None:
    assert {place.cores for place in placement([0, 1, 2], names(2), pin=False).values()} == {(0, 1, 2)}
    assert {place.threads for place in placement([0, 1, 2, 3], names(1), threads=1).values()} == {1}
