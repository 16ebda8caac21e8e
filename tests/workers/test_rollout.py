"""However often trajectories are moved and reported: every token is reported once, in order, with its version."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Sampling
from staleflow.types import TOKEN, Command, Drop, Fence, PullWeights, Return, Submit, TrajectoryNews, Work
from staleflow.workers.meter import Meter
from staleflow.workers.rollout import Requests, RolloutWorker
from tests.tiny_models import save_tiny

SAMPLING = Sampling(max_tokens=24, stop_tokens=(1,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3)


class SameWeights:
    """A parameter server whose versions differ in nothing but their number."""

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:  # noqa: ARG002
        return at_least


def worker(folder: Path, seed: int = 0) -> RolloutWorker:
    engine = TorchEngine(folder, EngineOptions(kv_tokens=256, max_running=4, page_size=8, threads=1), version=0)
    return RolloutWorker("i0", engine, SameWeights(), Requests(SAMPLING, seed), incarnation=1)


def obey(each: RolloutWorker, command: Command) -> None:
    """As a process does: a pull is made at once."""
    each.hear(command)
    while each.pulling is not None:
        each.pull()


class Desk:
    """The control plane's view: what is known of each trajectory, pieced together from what was reported."""

    def __init__(self, count: int) -> None:
        self.tokens: dict[str, list[int]] = {f"t{at}": [] for at in range(count)}
        self.logprobs: dict[str, bytes] = dict.fromkeys(self.tokens, b"")
        self.spans: dict[str, Any] = dict.fromkeys(self.tokens, ())
        self.epoch = dict.fromkeys(self.tokens, 0)
        self.where: dict[str, int | None] = dict.fromkeys(self.tokens)
        self.finished: set[str] = set()

    def work(self, name: str) -> Work:
        self.epoch[name] += 1
        tokens = np.array(self.tokens[name], TOKEN).tobytes()
        prompt = np.array([5 + int(name[1:]), 7, 9], TOKEN).tobytes()
        return Work(name, self.epoch[name], name, 3, self.spans[name], prompt, tokens, self.logprobs[name])

    def hear(self, reported: TrajectoryNews) -> None:
        name = reported.trajectory
        assert reported.epoch == self.epoch[name]
        if reported.chunk is not None:
            assert reported.chunk.start == len(self.tokens[name]), "neither a gap nor a repetition"
            self.tokens[name] += np.frombuffer(reported.chunk.tokens, TOKEN).tolist()
            self.logprobs[name] += reported.chunk.logprobs
        self.spans[name] = reported.spans
        assert sum(count for _, count in reported.spans) == len(self.tokens[name]) == len(self.logprobs[name]) // 4
        versions = [version for version, _ in reported.spans]
        assert all(one != other for one, other in pairwise(versions)), "one span for tokens that belong together"

    def news(self, at: int, each: RolloutWorker, everything: bool) -> None:
        news = each.report(everything)
        if news is None:
            return
        names = [reported.trajectory for reported in (*news.progress, *news.finished, *news.returned)]
        assert len(names) == len(set(names)), "one thing of each trajectory: their tokens are kept by name"
        for reported in news.progress:
            self.hear(reported)
        for reported in (*news.finished, *news.returned):
            self.hear(reported)
            assert self.where[reported.trajectory] == at
            self.where[reported.trajectory] = None
        self.finished |= {reported.trajectory for reported in news.finished}
        assert not news.failed


def undisturbed(folder: Path, count: int) -> dict[str, list[int]]:
    desk, alone = Desk(count), worker(folder)
    obey(alone, Submit(Fence(1, 1, 1), [desk.work(name) for name in desk.tokens]))
    desk.where = dict.fromkeys(desk.tokens, 0)
    while alone.engine.busy:
        alone.step()
    desk.news(0, alone, everything=True)
    return desk.tokens


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_moved_trajectories_draw_what_they_would_have_drawn_undisturbed(folder: Path, data: st.DataObject) -> None:
    count = 4
    desk = Desk(count)
    workers = [worker(folder), worker(folder)]
    number = [0, 0]

    def fence(at: int) -> Fence:
        number[at] += 1
        return Fence(1, 1, number[at])

    for _ in range(data.draw(st.integers(1, 60))):
        at = data.draw(st.integers(0, 1))
        here = [name for name, where in desk.where.items() if where == at]
        match data.draw(st.sampled_from(["step", "step", "step", "submit", "interrupt", "abort", "pull", "news"])):
            case "step":
                workers[at].step() if workers[at].engine.busy else None
            case "submit":
                waiting = [name for name, where in desk.where.items() if where is None and name not in desk.finished]
                if waiting:
                    obey(workers[at], Submit(fence(at), [desk.work(waiting[0])]))
                    desk.where[waiting[0]] = at
            case "interrupt":
                obey(workers[at], Return(fence(at), [(name, desk.epoch[name]) for name in here[:1]]))
            case "abort":  # what was not reported is lost, as when an instance dies
                desk.news(at, workers[at], everything=data.draw(st.booleans()))
                here = [name for name in here if desk.where[name] == at]
                obey(workers[at], Drop(fence(at), [(name, desk.epoch[name]) for name in here[:1]]))
                for name in here[:1]:
                    desk.where[name] = None
            case "pull":
                newest = max(each.engine.snapshot().version for each in workers)
                if not here or workers[at].engine.snapshot().version < newest:
                    obey(workers[at], PullWeights(fence(at), newest + 1))
            case "news":
                desk.news(at, workers[at], everything=data.draw(st.booleans()))
    expected = undisturbed(folder, count)
    for name, tokens in desk.tokens.items():
        assert tokens == expected[name][: len(tokens)]
        if name in desk.finished:
            assert tokens == expected[name]


def test_commands_of_an_earlier_control_plane_are_ignored(folder: Path) -> None:
    desk, alone = Desk(1), worker(folder)
    obey(alone, PullWeights(Fence(2, 1, 1), 3))
    obey(alone, Submit(Fence(1, 1, 7), [desk.work("t0")]))
    assert not alone.engine.busy


def test_tokens_of_the_old_version_are_reported_with_the_pull(folder: Path) -> None:
    desk, alone = Desk(1), worker(folder)
    obey(alone, Submit(Fence(1, 1, 1), [desk.work("t0")]))
    alone.step()
    alone.step()
    obey(alone, PullWeights(Fence(1, 1, 2), 1))
    news = alone.report()
    assert news is not None
    assert news.pulled == 1
    assert [version for reported in news.progress for version, _ in reported.spans] == [0]


def test_another_seed_draws_other_tokens(folder: Path) -> None:
    first, second = (undisturbed_with(folder, seed) for seed in (0, 1))
    assert first != second


def undisturbed_with(folder: Path, seed: int) -> dict[str, list[int]]:
    desk, alone = Desk(2), worker(folder, seed)
    obey(alone, Submit(Fence(1, 1, 1), [desk.work(name) for name in desk.tokens]))
    desk.where = dict.fromkeys(desk.tokens, 0)
    while alone.engine.busy:
        alone.step()
    desk.news(0, alone, everything=True)
    return desk.tokens


def test_a_request_that_the_engine_refuses_is_reported_as_failed(folder: Path) -> None:
    alone = worker(folder)
    obey(alone, Submit(Fence(1, 1, 1), [Work("t0", 1, "t0", 1, (), np.array([9999], TOKEN).tobytes())]))
    alone.step()
    news = alone.report()
    assert news is not None
    assert [name for name, _, _ in news.failed] == ["t0"]


def test_what_was_interrupted_and_then_dropped_is_not_reported(folder: Path) -> None:
    """The engine still returns it with its next step; by then it may even be here again, in another epoch."""
    desk, alone = Desk(1), worker(folder)
    obey(alone, Submit(Fence(1, 1, 1), [desk.work("t0")]))
    alone.step()
    obey(alone, Return(Fence(1, 1, 2), [("t0", 1)]))
    obey(alone, Drop(Fence(1, 1, 3), [("t0", 1)]))
    obey(alone, Submit(Fence(1, 1, 4), [desk.work("t0")]))
    alone.step()
    news = alone.report()
    assert news is None or not news.returned


def test_a_trajectory_that_ends_right_after_a_pull_is_reported_once(folder: Path) -> None:
    """Its tokens before the pull came in the same message as its end, and one of the two was taken for a lie."""
    desk, alone = Desk(1), worker(folder)
    obey(alone, Submit(Fence(1, 1, 1), [desk.work("t0")]))
    desk.where["t0"] = 0
    alone.step()
    obey(alone, PullWeights(Fence(1, 1, 2), 1))
    while alone.engine.busy:
        alone.step()
    desk.news(0, alone, everything=True)
    assert desk.finished == {"t0"}
    assert desk.tokens == undisturbed(folder, 1)


def test_every_step_is_measured_once_and_so_is_what_was_prefilled(folder: Path) -> None:
    desk, each = Desk(3), worker(folder)
    meter = Meter(each)
    each.hear(Submit(Fence(1, 1, 1), [desk.work(name) for name in desk.tokens]))
    steps = 0
    for _ in range(4):
        meter.step()
        steps += 1
    each.hear(PullWeights(Fence(1, 1, 2), 1))
    meter.pull()
    cells, pulls, reported, tokens = [], 0, 0, 0
    while each.engine.busy:
        meter.step()
        steps += 1
        if each.urgent:
            report = meter.report(everything=False)
            cells += report.costs.cells
            pulls += report.costs.pulls
            reported += report.costs.reported
            tokens += sum(count for news in report.finished for _, count in news.spans)
    assert sum(cell.count for cell in cells) == steps
    assert sum(cell.running for cell in cells) == tokens
    before = 3 * 3 + 3 * (3 + 4)  # prompts at first; with what was made until then after the pull
    assert sum(cell.prefilled for cell in cells) == before
    assert all(cell.mixed == bool(cell.prefilled) for cell in cells)
    assert (pulls, reported) == (1, 3)
