from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.tasks.order import Order
from staleflow.tasks.task import TaskError

sizes = st.integers(1, 700)
seeds = st.integers(-(2**70), 2**70)


@given(sizes, seeds, st.integers(0, 10**9))
@settings(deadline=None)
def test_every_epoch_reads_every_item_once(size: int, seed: int, epoch: int) -> None:
    order = Order(size, seed)
    places = [order.place(epoch * size + at) for at in range(size)]
    assert all(place is not None and place[0] == epoch for place in places)
    assert sorted(place[1] for place in places if place) == list(range(size))


@given(st.integers(1, 10**9), seeds, st.integers(0, 10**15))
def test_a_resume_at_any_number_continues_as_if_nothing_happened(size: int, seed: int, number: int) -> None:
    order = Order(size, seed)
    before = [order.place(number + step) for step in range(3)]
    assert before == [Order(size, seed).place(number + step) for step in range(3)]
    place = before[0]
    assert place is not None
    assert place[0] == number // size
    assert 0 <= place[1] < size


@given(sizes, seeds, st.integers(1, 4))
def test_the_data_ends_after_the_last_epoch_and_not_before(size: int, seed: int, epochs: int) -> None:
    order = Order(size, seed, epochs)
    assert order.place(size * epochs - 1) is not None
    assert order.place(size * epochs) is None


def test_epochs_and_seeds_differ_and_look_shuffled() -> None:
    def read(seed: int, epoch: int) -> list[int]:
        places = [Order(500, seed).place(epoch * 500 + at) for at in range(500)]
        return [place[1] for place in places if place]

    orders = [read(seed, epoch) for seed in range(3) for epoch in range(3)]
    for at, one in enumerate(orders):
        for other in orders[at + 1 :]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 15  # about 1 is expected
        neighbours = sum(abs(a - b) == 1 for a, b in pairwise(one))
        assert neighbours < 15  # about 2 are expected


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that is resumed with a later release must see the same data."""
    assert [Order(10, 0).place(at) for at in range(10)] == [(0, index) for index in FIRST_EPOCH]


FIRST_EPOCH = [9, 7, 4, 2, 0, 6, 3, 1, 5, 8]


def test_without_shuffling_the_file_is_read_in_order() -> None:
    assert [Order(3, 0, shuffle=False).place(at) for at in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize(("size", "epochs", "number"), [(0, None, 0), (3, 0, 0), (3, None, -1)])
def test_impossible_orders_are_refused(size: int, epochs: int | None, number: int) -> None:
    with pytest.raises(TaskError, match=r"empty|at least once|start at 0"):
        Order(size, 0, epochs).place(number)
