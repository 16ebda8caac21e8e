"""What a caller of the ledger relies on: the worked example, refusals, misuse, ranking, storage, purity."""

import ast
import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import staleflow.protocol
from staleflow.protocol import LedgerError, StalenessLedger


def ledger_with(*groups: str, batch: int = 2, staleness: int = 1, redundancy: int = 0) -> StalenessLedger:
    """A ledger in which the groups are reserved at version 0; those in capitals are complete."""
    ledger = StalenessLedger(batch, staleness, redundancy)
    for group in groups:
        assert ledger.reserve(group, 0)
        if group.isupper():
            ledger.occupy(group)
    return ledger


def train(ledger: StalenessLedger) -> list[str]:
    batch = ledger.consume()
    ledger.commit(batch.step)
    return batch.groups


def test_the_papers_example_six_groups_of_version_1_under_bound_1() -> None:
    ledger = ledger_with("X", "Y", "Z", batch=3)
    assert train(ledger) == ["X", "Y", "Z"]
    for name in "abcdef":
        assert ledger.reserve(name, 1)
    assert not ledger.reserve("g", 1), "both steps that may train version 1 are full"
    ledger.occupy("d")
    assert ledger.take() == ["d"], "the first to finish goes to the first step"
    assert [step.state for step in ledger.view()] == ["stuck", "stuck"]
    assert ledger.blocking() == ["a", "b", "c", "e", "f"]


def test_the_view_shows_groups_in_the_order_they_were_reserved() -> None:
    view = ledger_with("a", "b", "c", "d").view()
    assert [step.groups for step in view] == [["a", "b"], ["c", "d"]]
    assert [step.waiting_for for step in view] == [["a", "b"], ["c", "d"]]


def test_bound_0_is_the_synchronous_loop() -> None:
    ledger = ledger_with("A", "B", staleness=0)
    assert not ledger.can_reserve(0)
    batch = ledger.consume()
    assert not ledger.can_reserve(0), "generation for the next step would overlap training"
    ledger.commit(batch.step)
    assert ledger.room(1) == 2


def test_a_step_waits_for_later_deadlines_too_when_those_need_more_than_the_earlier_ones_give() -> None:
    ledger = ledger_with("A", "B", "c", "d", "e", staleness=2)
    train(ledger)
    for group in "fgh":
        assert ledger.reserve(group, 1)
    assert ledger.blocking() == list("cdefgh"), "one of c d e must be trained now, and one more of all six"
    ledger.occupy("c")
    assert ledger.blocking() == list("defgh")
    ledger.occupy("d")
    assert ledger.blocking() == []


def test_a_young_group_may_not_take_the_place_of_an_old_one_in_flight() -> None:
    ledger = ledger_with("A", "b", batch=1)
    assert train(ledger) == ["A"]
    assert ledger.reserve("c", 1)
    ledger.occupy("c")
    assert ledger.take() == []
    assert ledger.blocking() == ["b"]
    assert not ledger.ready()
    ledger.release("b", "failed")
    assert train(ledger) == ["c"]


def test_an_old_version_is_refused_once_its_deadline_has_passed() -> None:
    ledger = ledger_with("A", "B", staleness=0)
    train(ledger)
    assert not ledger.reserve("late", 0)
    assert ledger.room(0) == 0


def test_lower_is_refused_where_the_earlier_deadline_is_full() -> None:
    ledger = ledger_with("A", "b", batch=1)
    train(ledger)
    assert ledger.reserve("c", 1)
    assert not ledger.lower("c", 0), "b needs the only place of step 1"
    ledger.renew("b", 1)
    assert ledger.lower("c", 0)
    assert ledger.blocking() == ["c"]


def test_the_groups_given_up_are_the_fewest_and_the_ranking_chooses_them() -> None:
    for rank, expected in ((None, "c"), (lambda group: {"b": 3, "c": 9}[group], "b")):
        ledger = ledger_with("A", "b", "c", batch=1, staleness=0, redundancy=2)
        assert ledger.take() == [], "filling the step gives groups up: that is left to consume"
        batch = ledger.consume(rank)
        assert (batch.groups, batch.aborted[0]) == (["A"], expected)
        assert sorted(batch.aborted) == ["b", "c"]


def test_a_complete_group_without_a_place_is_given_up_only_after_those_in_flight() -> None:
    ledger = ledger_with("A", "B", "c", batch=1, staleness=0, redundancy=2)
    batch = ledger.consume()
    assert (batch.groups, batch.aborted) == (["A"], ["c", "B"])


def test_a_complete_group_to_give_up_is_chosen_from_all_that_would_stay() -> None:
    """Two are due now and taken; of the seven that stay one is too many: the last completed, whenever it is due."""
    ledger = StalenessLedger(2, 2, redundancy=1)
    for step in range(2):
        for group in "xy":
            ledger.reserve(f"{group}{step}", step)
            ledger.occupy(f"{group}{step}")
        if step == 0:
            for group in ("now1", "now2"):
                assert ledger.reserve(group, 0)
        elif step == 1:
            assert ledger.reserve("last", 1)
        ledger.commit(ledger.consume().step)
    for number in range(6):
        assert ledger.reserve(f"late{number}", 2)
    for group in ("now1", "now2", *(f"late{number}" for number in range(6)), "last"):
        ledger.occupy(group)
    batch = ledger.consume()
    assert (batch.groups, batch.aborted) == (["now1", "now2"], ["last"])


def test_without_redundancy_nothing_is_ever_given_up() -> None:
    ledger = ledger_with("A", "B", "c", "d")
    assert ledger.ready()
    assert ledger.consume().aborted == []
    assert ledger.counts()["released"] == {}


def test_a_ranking_that_raises_leaves_the_ledger_as_it_was() -> None:
    ledger = ledger_with("A", "b", batch=1, staleness=0, redundancy=1)
    before = ledger.to_state()
    with pytest.raises(ZeroDivisionError):
        ledger.consume(lambda _: 1 / 0)
    assert ledger.to_state() == before


def test_rollback_returns_the_same_groups_in_the_same_order() -> None:
    ledger = ledger_with("C", "A", "B", "d")
    first = ledger.consume()
    ledger.rollback(first.step)
    assert ledger.version == ledger.frontier == 0
    assert ledger.consume() == first


def test_a_name_may_come_back_after_its_group_has_ended() -> None:
    ledger = ledger_with("a", "B", batch=1)
    ledger.release("a", "failed")
    assert ledger.reserve("a", 0)
    train(ledger)
    assert ledger.reserve("B", 1)


MISUSE: dict[str, Callable[[StalenessLedger], object]] = {
    "reserve: group 'a' is live already; reserve it only once": lambda ledger: ledger.reserve("a", 0),
    "reserve: group 'L' is live already; reserve it only once": lambda ledger: ledger.reserve("L", 0),
    "version 2 of group 'x' does not exist; give one of those made so far, 0..1": lambda ledger: ledger.reserve("x", 2),
    "version -1 of group 'x' does not exist; give one of those made so far, 0..1": lambda ledger: ledger.reserve(
        "x", -1
    ),
    "version '1' of group 'x' does not exist; give one of those made so far, 0..1": lambda ledger: ledger.reserve(
        "x",
        "1",  # type: ignore[arg-type]
    ),
    "version 2 does not exist; give one of those made so far, 0..1": lambda ledger: ledger.room(2),
    "version 3 does not exist; give one of those made so far, 0..1": lambda ledger: ledger.can_reserve(3),
    "version 2 of group 'a' does not exist; give one of those made so far, 0..1": lambda ledger: ledger.lower("a", 2),
    "version 3 of group 'a' does not exist; give one of those made so far, 0..1": lambda ledger: ledger.renew("a", 3),
    "lower: group 'x' is not live; reserve it first": lambda ledger: ledger.lower("x", 0),
    "lower: group 'C' is complete; lower is for groups in flight": lambda ledger: ledger.lower("C", 0),
    "renew: group 'a' has version 1; to go back to 0 call lower": lambda ledger: ledger.renew("a", 0),
    "renew: group 'C' is complete; renew is for groups in flight": lambda ledger: ledger.renew("C", 1),
    "renew: group 'x' is not live; reserve it first": lambda ledger: ledger.renew("x", 1),
    "occupy: group 'C' is complete; occupy is for groups in flight": lambda ledger: ledger.occupy("C"),
    "occupy: group 'x' is not live; reserve it first": lambda ledger: ledger.occupy("x"),
    "occupy: group 'L' is leased; roll its step back first": lambda ledger: ledger.occupy("L"),
    "release: group 'x' is not live; reserve it first": lambda ledger: ledger.release("x", "r"),
    "release: group 'L' is leased; roll its step back first": lambda ledger: ledger.release("L", "r"),
    "release: group 'a' needs a reason, such as 'filtered'": lambda ledger: ledger.release("a", ""),
    "take: the limit is -1; give 0 or more, or None for all that can go": lambda ledger: ledger.take(-1),
    "consume: step 1 lacks 1 complete groups; call it when ready() is true": lambda ledger: ledger.consume(),
    "commit: step 1 is not a full step (step 1 has 1 of 3 groups); consume it first": lambda ledger: ledger.commit(1),
    "commit: step 0 is not a full step (step 1 has 1 of 3 groups); consume it first": lambda ledger: ledger.commit(0),
    "rollback: step 0 has no leased groups (step 1 has 1); there is nothing to undo": lambda ledger: ledger.rollback(0),
}


def misused() -> StalenessLedger:
    """Version 1, batch 3: ``a`` in flight, ``C`` complete, ``L`` leased to step 1."""
    ledger = ledger_with("X", "Y", "Z", batch=3)
    train(ledger)
    for name in "LCa":
        assert ledger.reserve(name, 1)
    ledger.occupy("L")
    assert ledger.take() == ["L"]
    ledger.occupy("C")
    return ledger


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_names_the_group_and_the_fix_and_changes_nothing(message: str) -> None:
    ledger = misused()
    before = copy.deepcopy(ledger.to_state())
    with pytest.raises(LedgerError) as caught:
        MISUSE[message](ledger)
    assert str(caught.value) == message
    assert ledger.to_state() == before


def test_a_full_step_must_be_committed_or_rolled_back_before_the_next() -> None:
    ledger = ledger_with("A", "B", "C", "D")
    ledger.consume()
    assert ledger.take() == []
    assert not ledger.ready()
    with pytest.raises(LedgerError, match=r"^consume: step 0 is full; commit it or roll it back before step 1$"):
        ledger.consume()
    with pytest.raises(LedgerError, match="commit: step 1 is not a full step"):
        ledger.commit(1)


def test_consume_too_early_names_the_groups_it_waits_for() -> None:
    ledger = ledger_with("a", "b", batch=1, staleness=1)
    with pytest.raises(LedgerError, match=r"^consume: step 0 waits for 'a', 'b'; occupy or release them$"):
        ledger.consume()


def test_a_long_list_of_groups_to_wait_for_is_cut() -> None:
    ledger = ledger_with(*[f"g{number}" for number in range(20)], batch=20, staleness=0)
    with pytest.raises(LedgerError) as caught:
        ledger.consume()
    assert len(re.findall("'g", str(caught.value))) == 8


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((0, 1, 0), "batch_size"),
        ((-1, 1, 0), "batch_size"),
        ((1.5, 1, 0), "batch_size"),
        ((True, 1, 0), "batch_size"),
        ((1, -1, 0), "max_staleness"),
        ((1, "2", 0), "max_staleness"),
        ((1, 1, -1), "redundancy"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[Any, Any, Any], name: str) -> None:
    with pytest.raises(LedgerError, match=f"^{name} is .*; give a whole number, [01] or more$"):
        StalenessLedger(*sizes)


def test_the_state_is_plain_data_and_complete() -> None:
    ledger = misused()
    ledger.release("C", "filtered")
    state = ledger.to_state()
    restored = StalenessLedger.from_state(json.loads(json.dumps(state)))
    assert restored.to_state() == state
    assert restored.counts() == ledger.counts()
    assert restored.view() == ledger.view()


BROKEN_STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "'version'": lambda state: state.pop("version"),
    "'batch_size'": lambda state: state.clear(),
    "version is -1; give a whole number, 0 or more": lambda state: state.update(version=-1),
    "committed is -3; give a whole number, 0 or more": lambda state: state.update(committed=-3),
    "filtered is 0; give a whole number, 1 or more": lambda state: state.update(released={"filtered": 0}),
    "'list' object has no attribute 'items'": lambda state: state.update(released=["filtered"]),
    "group 'a' is listed twice, or its state 'lost' is unknown": lambda state: state["groups"][0].__setitem__(
        2, "lost"
    ),
    "group 'a' is listed twice, or its state 'in flight' is unknown": lambda state: state["groups"].append(
        state["groups"][0]
    ),
    "version 9 of group 'a' does not exist; give one of those made so far, 0..1": lambda state: state["groups"][
        0
    ].__setitem__(1, 9),
    "group 'a' is past its deadline": lambda state: state.update(version=5),
    "group 'L' is past its deadline": lambda state: state.update(version=3, groups=[["L", 1, "leased"]]),
    "group 'W' is past its deadline": lambda state: state.update(
        version=1, max_staleness=0, batch_size=1, groups=[["L", 1, "leased"], ["W", 1, "complete"]]
    ),
    "there are more groups than places": lambda state: state.update(
        batch_size=1, groups=[[name, 1, "complete"] for name in "abcde"]
    ),
    "there are more groups than places ": lambda state: state.update(groups=[[name, 1, "leased"] for name in "abcd"]),
    "not enough values to unpack (expected 3, got 2)": lambda state: state.update(groups=[["a", 1]]),
}


@pytest.mark.parametrize("damage", BROKEN_STATES)
def test_a_damaged_state_is_refused(damage: str) -> None:
    state = copy.deepcopy(misused().to_state())
    BROKEN_STATES[damage](state)
    with pytest.raises(LedgerError) as caught:
        StalenessLedger.from_state(state)
    assert str(caught.value) == f"not the state of a ledger ({damage.strip()}); restore an earlier one"


def test_the_protocol_imports_nothing_but_the_standard_library_and_the_vocabulary() -> None:
    for path in Path(staleflow.protocol.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("staleflow.protocol") or name in ("staleflow.types", "staleflow.errors")
                assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
