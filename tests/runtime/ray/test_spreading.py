"""Where roles go on a cluster."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.ray.spreading import Node, spread
from staleflow.types import Role

SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@given(SIZES, st.integers(1, 20))
def test_instances_are_spread_as_evenly_as_room_allows(sizes: list[int], count: int) -> None:
    """No node has two more than another that still has room."""
    nodes = [Node(str(at), {"CPU": size}) for at, size in enumerate(sizes)]
    taken: list[tuple[Role, str]] = []
    for _ in range(min(count, sum(sizes))):
        used = Counter(node for _, node in taken)
        order = spread(nodes, {"CPU": 1}, "instance", taken, home="0")
        taken.append(("instance", next(node for node in order if used[node] < sizes[int(node)])))
    used = Counter(node for _, node in taken)
    assert all(used[one.id] <= used[two.id] + 1 for one in nodes for two in nodes if used[two.id] < sizes[int(two.id)])


@given(SIZES, st.sets(st.integers(0, 5)), st.integers(1, 9))
def test_only_nodes_that_could_have_room_are_tried_and_silent_ones_last(
    sizes: list[int], silent: set[int], need: int
) -> None:
    nodes = [Node(str(at), {"CPU": 99, "GPU": size}) for at, size in enumerate(sizes)]
    order = spread(nodes, {"CPU": 1, "GPU": need}, "instance", [], "0", {str(each) for each in silent})
    assert set(order) == {str(at) for at, size in enumerate(sizes) if size >= need}
    quiet = [int(node) in silent for node in order]
    assert quiet == sorted(quiet)


def test_the_trainer_is_with_the_control_plane_and_the_first_instance_is_not() -> None:
    nodes = [Node("far", {"CPU": 8}), Node("home", {"CPU": 8})]
    assert spread(nodes, {"CPU": 1}, "trainer", [], home="home")[0] == "home"
    assert spread(nodes, {"CPU": 1}, "instance", [("trainer", "home")], home="home")[0] == "far"
