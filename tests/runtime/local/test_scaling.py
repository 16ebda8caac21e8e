"""Instances that are added and removed while a run goes on: nothing is lost, made again, or waited for without end."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from staleflow.config import Config, Rollout, load
from staleflow.errors import RunError
from staleflow.run.decisions import read_decisions
from staleflow.run.directory import RunDirectory
from staleflow.run.requests import ask
from staleflow.runtime.local.run import LocalRun
from staleflow.runtime.local.scaling import Scaling, lightest, unused
from staleflow.servers.durable import DurableJournal
from staleflow.types import token_count
from tests.runtime.local.test_run import committed, configured, model, run_once

__all__ = ["model"]


def test_names_are_used_again_but_not_while_they_are_taken() -> None:
    assert unused(3) == ["i0", "i1", "i2"]
    assert unused(2, taken={"i0", "i2"}) == ["i1", "i3"]
    assert unused(-1) == []


def test_those_leave_that_have_the_least_to_prefill_again() -> None:
    work = {"i0": 0, "i1": 900, "i2": 0, "i10": 30, "i3": -1}
    assert lightest(work, work.__getitem__, 4) == ["i3", "i2", "i0", "i10"]
    assert lightest(work, work.__getitem__, -1) == []


@pytest.mark.parametrize(
    ("found", "wanted", "stay", "leave"),
    [
        ([], 2, ["i0", "i1"], set[str]()),
        (["i0", "trainer", "i1"], 2, ["i0", "i1"], set[str]()),
        (["i2", "i10", "evaluator"], 2, ["i2", "i10"], set[str]()),
        (["i1"], 3, ["i1", "i0", "i2"], set[str]()),
        (["i3", "i1", "i2"], 1, ["i1"], {"i2", "i3"}),
    ],
)
def test_what_an_earlier_control_plane_left_is_adopted_and_what_is_too_much_is_drained(
    found: list[str], wanted: int, stay: list[str], leave: set[str], tmp_path: Path
) -> None:
    run: Any = Mock()
    run.config, run.directory, run.crew.leaving = (
        Config(rollout=Rollout(instances=wanted)),
        RunDirectory(tmp_path),
        set(),
    )
    scaling = Scaling(run)
    assert set(scaling.begin(found)) == {*stay, *leave}
    assert scaling.names == stay
    assert run.crew.leaving == leave


@pytest.mark.processes
def test_a_run_is_scaled_up_and_down_and_loses_no_token(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("steps=5000", "staleness=2", "rollout.max_tokens=128", "rollout.kv_tokens=8192", "rollout.instances=1")
    config = configured(model, tmp_path, *sizes)
    runs: list[LocalRun] = []
    answers: list[Any] = []
    done = threading.Event()
    look = Scaling.look

    def look_while_all_work(scaling: Scaling) -> None:
        members = runs[0].control.members.values() if runs else ()
        if all(member.residents or not member.alive for member in members):
            look(scaling)

    def scale(directory: RunDirectory) -> None:
        def to(count: int) -> None:
            answers.append(ask(directory, {"rollout": count}, 120))

        try:
            to(2)
            to(1)
            (left,) = answers[-1]["instances"]
            os.kill(runs[0].crew.children[left].pid, signal.SIGKILL)  # it is started again when the next requests come
            both = [threading.Thread(target=to, args=(count,)) for count in (2, 1)]
            for each in both:
                each.start()
            for each in both:
                each.join()
            with pytest.raises(RunError, match=r"give rollout=\d+ or less"):
                to(10**6)
        finally:
            done.set()

    def watch(run: LocalRun) -> None:
        if run.server.ledger.version >= 2 and not runs:
            runs.append(run)
            threading.Thread(target=scale, args=(run.directory,)).start()
        if done.is_set() and run.training:
            run.control.stop()

    monkeypatch.setattr(Scaling, "look", look_while_all_work)
    directory = RunDirectory.create(config, "test")
    with directory.owned():
        summary, _ = run_once(config, model, directory, watch=watch)
    assert answers[0]["text"] == "instances 1 -> 2: i1 started"
    assert re.fullmatch(r"instances 2 -> 1: i[01] drained and stopped", answers[1]["text"])
    changes = [(each["from"], each["to"]) for each in summary["scaled"]]
    assert changes in ([(1, 2), (2, 1), (1, 2)], [(1, 2), (2, 1), (1, 2), (2, 1)])
    assert len(answers) == 4
    assert load(str(directory.config_file), []).rollout.instances == summary["instances"] == changes[-1][1]
    assert summary["tokens_wasted"] == 0
    assert summary["groups_released"] == {}
    trained = committed(directory.journal(1))
    assert len(trained) == len(set(trained)) == summary["steps"] * config.groups
    assert any(row.commands for row in read_decisions(directory.decisions) if "drain" in row.inputs)
    assert_nothing_shrinks(directory.journal(1))


def assert_nothing_shrinks(path: Path) -> None:
    """What a trajectory has is what it keeps: the tokens that come back with it are not made again."""
    journal = DurableJournal(path, threaded=False)
    known: dict[str, int] = {}
    for kind, *rest in journal.events():
        if kind in ("stream", "generated"):
            name, spans = rest
            tokens = token_count(tuple(tuple(each) for each in spans))
            assert tokens >= known.get(name, 0)
            known[name] = tokens
    journal.close()
