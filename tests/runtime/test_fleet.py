"""The speculative state: a command counts from the moment it is given, and only once."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.coordinator.situation import COLUMNS
from staleflow.runtime.fleet import ALL_S, FleetTable, Member
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.types import Fence
from tests.coordinator.make_situations import COST
from tests.runtime.fakes import FakeInstance

HEADROOM = 10
KV = 100_000


def trajectories(*contexts: int, first: int = 0) -> list[Trajectory]:
    return [
        Trajectory(f"p{first + at}/0", Group(f"p{first + at}", first + at, 0, context, 1), epoch=1)
        for at, context in enumerate(contexts)
    ]


def member(term: int = 1, incarnation: int = 0) -> tuple[Member, FakeInstance]:
    port = FakeInstance(incarnation=incarnation)
    return Member(port, term, incarnation, version=0), port


def shown(one: Member) -> tuple[int, int, int]:
    """Running, context and free KV memory of the instance, as decisions see it."""
    table = FleetTable([one], COST, HEADROOM)
    fleet = table.refresh(0.0)
    return int(fleet.running[0]), int(fleet.context[0]), int(fleet.kv_free[0])


def apply(port: FakeInstance, fence: Fence, running: int, context: int) -> None:
    """Let the instance's snapshot show its state after the command ``fence``."""
    port.applied, port.running, port.context, port.kv_free = fence, running, context, KV - context


commands = st.lists(st.tuples(st.sampled_from(["submit", "interrupt", "pull"]), st.integers(1, 3)), max_size=10)


@settings(derandomize=True, deadline=None)
@given(commands, st.lists(st.integers(0, 10), min_size=1, max_size=4))
def test_a_late_snapshot_never_hides_a_command_and_an_early_one_never_counts_it_twice(
    given_commands: list[tuple[str, int]], looks: list[int]
) -> None:
    """Whichever commands the snapshot was taken after, the row shows the instance after all of them."""
    one, port = member()
    there: list[Trajectory] = []
    after = [(0, 0)]  # (running, context) once the first so many commands are applied
    for kind, many in given_commands:
        if kind == "submit":
            sent = trajectories(*range(100, 100 + many), first=len(after) * 10)
            one.submit(sent, [])
            there += sent
        elif kind == "interrupt" and there:
            leaving, there = there[:many], there[many:]
            one.interrupt(leaving)
        else:
            one.pull(1)
        after.append((len(there), sum(each.context for each in there)))
    running, context = after[-1]
    for number in sorted(min(look, len(after) - 1) for look in looks):
        apply(port, Fence(1, 0, number), *after[number])
        assert shown(one) == (running, context, KV - context - HEADROOM * running)


def test_a_snapshot_from_before_the_restart_of_either_side_shows_no_command() -> None:
    for stale in (Fence(1, 5, 9), Fence(2, 4, 9)):
        one, port = member(term=2, incarnation=5)
        one.submit(trajectories(300), [])
        apply(port, stale, 0, 0)
        assert shown(one)[:2] == (1, 300), "numbers of another incarnation say nothing about this one"
        apply(port, Fence(2, 5, 1), 1, 300)
        assert shown(one)[:2] == (1, 300)


def test_an_interrupt_is_never_counted_below_zero() -> None:
    one, port = member()
    one.interrupt(trajectories(300, 400))
    apply(port, Fence(1, 0, 0), 1, 300)  # one of them has ended meanwhile
    assert shown(one)[:2] == (0, 0)


def test_work_is_routed_by_the_version_after_the_pull() -> None:
    one, _ = member()
    one.pull(3)
    fleet = FleetTable([one], COST, HEADROOM).refresh(0.0)
    assert (fleet.version[0], bool(fleet.pulling[0]), one.version) == (3, True, 0)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["submit", "interrupt", "abort", "pull", "unknown", "new", "same"])))
def test_fences_leave_no_gap_and_begin_again_only_with_a_new_incarnation(actions: list[str]) -> None:
    one, port = member(term=3)
    for at, action in enumerate(actions):
        work = trajectories(100, first=at)
        if action == "unknown":
            one.forget([("p0/0", 1)])
        elif action == "pull":
            one.pull(at)
        elif action in ("new", "same"):
            port.incarnation += action == "new"
            one.revive(port.heard(), newest=0)
        else:
            getattr(one, action)(work, *([[]] if action == "submit" else []))
    previous = Fence(3, 0, 0)
    for fence in (command.fence for command in port.commands):
        follows = fence == previous._replace(number=previous.number + 1)
        assert follows or (fence.term == 3 and fence.incarnation > previous.incarnation and fence.number == 1)
        previous = fence


def test_an_instance_that_only_seemed_dead_is_told_to_drop_what_went_elsewhere() -> None:
    one, port = member()
    one.alive, one.lost = False, [("p0/0", 1), ("p1/0", 1)]
    one.revive(port.heard(), newest=0)
    assert one.alive
    assert port.aborted == [("p0/0", 1), ("p1/0", 1)]
    assert one.lost == []


def test_a_new_incarnation_holds_nothing_and_is_told_nothing() -> None:
    one, port = member()
    one.submit(trajectories(100), [])
    one.alive, one.lost = False, [("p0/0", 1)]
    port.incarnation, port.version = 1, -1
    one.revive(port.heard(), newest=0)
    assert (one.alive, one.incarnation, one.version, one.number) == (True, 1, -1, 0)
    assert port.aborted == []


def test_only_rows_that_changed_are_read_until_contexts_may_have_grown() -> None:
    members = [Member(FakeInstance(name), 1, version=0) for name in ("i0", "i1")]
    ports = [each.port for each in members]
    table = FleetTable(members, COST, HEADROOM)

    def looked() -> list[int]:
        return [port.looked for port in ports if isinstance(port, FakeInstance)]

    table.refresh(0.0)
    members[1].submit(trajectories(100), [])
    assert table.refresh(1.0).running.tolist() == [0, 1]
    assert looked() == [1, 2]
    table.refresh(1.0)
    assert looked() == [1, 2]
    table.refresh(ALL_S)
    assert looked() == [2, 3]


def test_a_dead_instance_is_in_the_table_but_not_alive() -> None:
    one, port = member()
    port.silent_since = 0.0
    table = FleetTable([one], COST, HEADROOM)
    assert table.refresh(0.0).alive[0]
    one.alive, one.touched = False, True
    assert not table.refresh(1.0).alive[0]


happenings = st.lists(st.tuples(st.sampled_from(["report", "submit", "pull", "lost", "look"]), st.integers(0, 5)))


@settings(derandomize=True, deadline=None)
@given(happenings, st.integers(1, 4))
def test_a_refresh_of_bounded_size_hides_nothing_that_was_said_or_decided(
    happened: list[tuple[str, int]], most: int
) -> None:
    """Whatever the reports had to write before it, because there were too many of them for one decision."""
    ports = [FakeInstance(f"i{row}") for row in range(6)]
    members = [Member(port, 1, version=0) for port in ports]
    with patch("staleflow.runtime.fleet.MOST_ROWS", most):
        table = FleetTable(members, COST, HEADROOM)
        table.refresh(0.0)
        decided = set[int]()
        for at, (what, row) in enumerate([*happened, ("look", 0)]):
            one, port = members[row], ports[row]
            if what == "report":
                number = one.number  # it has heard every command
                running, context = len(one.residents), sum(each.context for each in one.residents.values())
                apply(port, Fence(1, 0, number), running, context)
                table.reported(one)
            elif what == "look":
                before = sum(port.looked for port in ports)
                shown = table.refresh(0.0)
                assert sum(port.looked for port in ports) - before <= most + len(decided)
                decided = set[int]()
                whole = FleetTable(members, COST, HEADROOM).refresh(0.0)
                for column in COLUMNS:
                    assert getattr(shown, column).tolist() == getattr(whole, column).tolist()
            else:
                decided.add(row)
                if what == "submit":
                    one.submit(trajectories(100 + at, first=at), [])
                elif what == "pull":
                    one.pull(at)
                else:
                    one.alive, one.touched = False, True


def test_rows_of_a_large_fleet_are_written_again_in_turn_within_the_time_for_all() -> None:
    ports = [FakeInstance(f"i{row}") for row in range(10)]
    members = [Member(port, 1, version=0) for port in ports]
    with patch("staleflow.runtime.fleet.MOST_ROWS", 4):
        table = FleetTable(members, COST, HEADROOM)
        table.refresh(100.0)
        for tick in range(1, 11):
            before = sum(port.looked for port in ports)
            table.refresh(100.0 + tick * ALL_S / 10)
            assert sum(port.looked for port in ports) - before <= 4
        assert [port.looked for port in ports] == [2] * 10
        for row in (3, 7):
            table.reported(members[row])
        table.refresh(100.0 + ALL_S)
        for tick in range(11, 21):
            table.refresh(100.0 + tick * ALL_S / 10)
    assert [port.looked for port in ports] == [3] * 10, "those two were read when they said something"
