"""Whole runs with real processes: tiny, but with everything that a large one has."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import Config, load
from staleflow.config.costs import costs_from_geometry, read_profile
from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import newest, wrong_with
from staleflow.run.decisions import read_decisions
from staleflow.run.directory import RunDirectory
from staleflow.run.signals import RECENT
from staleflow.runtime.control import ControlPlane
from staleflow.runtime.local.patience import expect, run_patiently
from staleflow.runtime.local.run import CYCLE_S, LocalRun, RunError
from staleflow.servers.durable import DurableJournal
from staleflow.servers.payloads import Limits
from staleflow.study.measured import read_run
from staleflow.study.perfetto import write_trace
from staleflow.study.report import page
from staleflow.study.why import ask
from staleflow.tasks import adder
from staleflow.tasks.opening import TaskSet, open_source, open_task
from staleflow.types import Report, TrajectoryNews
from tests.runtime.local.rewards import evenness
from tests.runtime.local.synchronous import Plain, train
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.processes

GROUPS, MEMBERS, MOST, RATE, WARMUP = 4, 4, 16, 3e-3, 3
Finished = tuple[dict[str, Any], RunDirectory, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=5, hidden=32, intermediate=48, layers=2)


def configured(model: Path, runs: Path, *changes: str) -> Config:
    return load(
        None,
        [
            f"model={model}",
            f"runs={runs}",
            f"groups={GROUPS}",
            f"group_size={MEMBERS}",
            "reward.function=tests.runtime.local.rewards:evenness",
            f"rollout.max_tokens={MOST}",
            "rollout.kv_tokens=2048",
            f"training.learning_rate={RATE}",
            f"training.warmup_steps={WARMUP}",
            "evaluation.every=0",
            "evaluation.problems=8",
            "staleness=0",
            *changes,
        ],
    )


def task_of(config: Config, model: Path) -> TaskSet:
    return open_task(config.data, open_source(config.data, config.seed), model, config.seed, config.evaluation.problems)


def run_once(
    config: Config,
    model: Path,
    directory: RunDirectory | None = None,
    watch: Callable[[LocalRun], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], RunDirectory]:
    checkpoint = newest(directory.checkpoints) if directory else None
    directory = directory or RunDirectory.create(config, "test")
    cost = costs_from_geometry(config)
    run = LocalRun(config, directory, model, task_of(config, model), cost, checkpoint, watch, tell)

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(300):
            return await run.execute()

    return run_patiently(main()), directory


def plain(config: Config, model: Path) -> Plain:
    prompts = task_of(config, model).prompts

    def reward(number: int, tokens: list[int]) -> float:
        from staleflow.reward.function import Response

        return evenness(prompts.problem(number), Response("", tuple(tokens)))

    return Plain(
        model,
        lambda number: prompts.problem(number).prompt,  # type: ignore[arg-type,return-value]
        reward,
        GROUPS,
        MEMBERS,
        MOST,
        adder.END,
        RATE,
        WARMUP,
        config.seed,
    )


def test_bound_0_equals_the_plain_synchronous_loop_also_across_a_resume(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=6")
    losses, batches = train(plain(config, model), steps=10)
    _, directory = run_once(config, model)
    summary, _ = run_once(load(str(directory.config_file), ["steps=10"]), model, directory)
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == list(range(10))
    for row, batch in zip(rows, batches, strict=True):
        assert sorted(row["lengths"]) == sorted(length for group in batch for length in group)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)
    assert summary["max_staleness"] == summary["violations"] == 0
    assert summary["groups_admitted"] == summary["groups_committed"] == 10 * GROUPS


@pytest.mark.slow
def test_a_report_that_cannot_be_true_and_a_filter_that_keeps_nothing_are_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    lied: list[str] = []
    hear = ControlPlane.on_report

    def lie(control: ControlPlane, report: Report) -> None:
        hear(control, report)
        running = [each for each in control.server if each.state == "running" and each.instance == report.instance]
        if running and not lied:
            lied.append(running[0].name)
            news = [TrajectoryNews(running[0].name, running[0].epoch, ((99, 3),))]
            hear(control, Report(report.instance, report.incarnation, report.applied, report.state, finished=news))

    monkeypatch.setattr(ControlPlane, "on_report", lie)
    late = ["filter=tests.runtime.local.rewards:later_ones", f"filter_arguments.first={(RECENT + 1) * GROUPS}"]
    summary, _ = run_once(configured(model, tmp_path, "steps=3", *late), model, tell=told.append)
    assert (summary["steps"], summary["failures"]) == (3, {"instance": {"bad reports": 1}})
    assert any(f"bad reports: trajectory {lied[0]} has tokens of version 99" in line for line in told)
    assert sum("has replaced the last 20 groups, all of them (early)" in line for line in told) == 1


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_by_killed_instances_ctrl_c_and_a_resume(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=12", "staleness=2")
    killed: list[str] = []

    def kill(run: LocalRun, name: str, version: int) -> None:
        if name not in killed and run.server.ledger.version >= version:
            killed.append(name)
            os.kill(run.crew.children[name].pid, signal.SIGKILL)

    def first(run: LocalRun) -> None:
        kill(run, "i0", 2)
        if run.server.ledger.version >= 5 and not run.interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    stopped, directory = run_once(config, model, watch=first)
    assert 5 <= stopped["steps"] < 12
    summary, _ = run_once(config, model, directory, watch=lambda run: kill(run, "i1", 8))
    assert killed == ["i0", "i1"]
    assert summary["steps"] == 12
    assert summary["lives"] == 2
    assert summary["groups_committed"] == 12 * GROUPS
    assert summary["groups_released"] == {}
    assert summary["max_staleness"] <= 2
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == list(range(12))
    assert {row["groups"] for row in rows} == {GROUPS}, "also the first one after the resume"
    trained = committed(directory.journal())
    assert len(trained) == len(set(trained)) == 12 * GROUPS


def committed(path: Path) -> list[str]:
    """The groups of every step that the journal says was committed."""
    journal = DurableJournal(path, threaded=False)
    found: list[str] = []
    leased: list[str] = []
    for kind, *rest in journal.events():
        if kind == "lease":
            leased += rest[0]
        elif kind == "consume":
            leased = list(rest[0])
        elif kind == "rollback":
            leased = []
        elif kind == "commit":
            found, leased = found + leased, []
    journal.close()
    return found


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run_with_one_line(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=50", "reward.function=tests.runtime.local.rewards:broken")
    with pytest.raises(RunError, match=r"reward failed 256 times in a row, last: RuntimeError: the service is down"):
        run_once(config, model)


@pytest.mark.slow
def test_a_reward_service_that_is_away_is_told_of_in_the_first_evaluation(model: Path, tmp_path: Path) -> None:
    """The run was silent for five minutes, and then for five more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"
    told: list[str] = []
    config = configured(model, tmp_path, "steps=1", f"reward.function={address}", "reward.patience_s=1")
    with pytest.raises(RunError, match="the reward service has been away"):
        run_once(config, model, tell=told.append)
    assert told[0] == f"the evaluation waits: reward service {address} did not answer: [Errno 111] Connection refused"
    latest = newest(RunDirectory((tmp_path / "latest").resolve()).checkpoints)
    assert latest is not None
    assert wrong_with(latest) == ""


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run with memory for the trajectories of one step: its summary, its directory, and bytes claimed over time."""
    memory = GROUPS * Limits(MOST, 4, 0).group_bytes(MEMBERS)
    changes = ["steps=14", "staleness=1", "checkpoints.every=1", "checkpoints.keep=2"]
    changes += ["track=tests.runtime.local.trackers:Lines", "track_arguments={file: lines}"]
    config = configured(model, tmp_path_factory.mktemp("runs"), *changes, f"processes.trajectory_gib={memory / 2**30}")
    claimed: list[int] = []

    def watch(run: LocalRun) -> None:
        assert run.payloads.limits.memory == memory
        assert run.pool.heard_s == CYCLE_S, "a worker would wait for every share of quick responses"
        assert run.pool.expect is expect, "and a step for the moment after the one in which its last answer came"
        claimed.append(run.payloads.claimed)

    summary, directory = run_once(config, model, watch=watch)
    assert max(claimed) <= memory
    return summary, directory, claimed


def test_a_run_with_memory_for_one_step_makes_them_all(finished: Finished) -> None:
    summary, _, claimed = finished
    assert summary["steps"] == 14
    assert max(claimed) > 0


def test_checkpoints_load_in_transformers_and_summaries_have_their_keys(finished: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary, directory, _ = finished
    found = sorted(each.name for each in directory.checkpoints.iterdir())
    assert found == ["best", "step-000013", "step-000014"]
    AutoModelForCausalLM.from_pretrained(directory.checkpoints / "best")
    AutoModelForCausalLM.from_pretrained(directory.checkpoint(14))
    AutoTokenizer.from_pretrained(directory.checkpoint(14))
    trained = json.loads((directory.checkpoint(14) / "trainer.json").read_text())
    assert trained["version"] == 14, "and not one that was made after the last step"
    wanted = {
        "accuracy_initial", "accuracy_final", "steps", "wall_s", "seconds_to_90", "tokens_trained", "tokens_wasted",
        "trained_tokens_per_s", "bound", "max_staleness", "staleness_histogram", "violations", "groups_admitted",
        "groups_committed", "groups_released", "trainer_idle", "control_overhead", "believed",
    }  # fmt: skip
    assert wanted <= set(json.loads(json.dumps(summary)))
    assert sum(summary["staleness_histogram"].values()) == summary["tokens_trained"] > 0
    assert 0 <= summary["trainer_idle"] <= 1
    guess = costs_from_geometry(load(str(directory.path / "config.yaml")))
    assert summary["believed"] == asdict(guess), "what it decided by, and not what steps turned out to take"


@pytest.mark.slow
def test_a_trainer_that_is_killed_loses_no_step_and_repeats_none(model: Path, tmp_path: Path) -> None:
    """With bound 0 the losses are those of the plain loop, however often the trainer died."""
    config = configured(model, tmp_path, "steps=8")
    killed: list[int] = []

    def watch(run: LocalRun) -> None:
        version = run.server.ledger.version
        if len(killed) < 2 and version >= 2 * len(killed) + 2 and run.crew.children["trainer"].ready.is_set():
            killed.append(version)
            os.kill(run.crew.children["trainer"].pid, signal.SIGKILL)

    summary, directory = run_once(config, model, watch=watch)
    assert len(killed) == 2
    losses, _ = train(plain(config, model), steps=8)
    told = {row["step"]: row["loss"] for row in read_metrics(directory.metrics)}
    assert [told[step] for step in range(8)] == pytest.approx(losses, abs=1e-6)
    assert summary["groups_committed"] == 8 * GROUPS


def test_the_decisions_of_a_run_can_be_read_back_with_inputs_and_commands(finished: Finished) -> None:
    summary, directory, _ = finished
    decisions = list(read_decisions(directory.decisions))
    routed = [command[1] for each in decisions for command in each.commands if command[0] == "Route"]
    journal = DurableJournal(directory.journal(1), threaded=False)
    assert routed == [event[1] for event in journal.events() if event[0] == "route"]
    journal.close()
    for each in decisions:
        assert 0 <= each.time <= summary["wall_s"]
        assert each.inputs["routing"]["routes"] == sum(command[0] == "Route" for command in each.commands)
    assert [each.time for each in decisions] == sorted(each.time for each in decisions)
    assert {each.inputs["newest"] for each in decisions} == {*range(14)}


def test_a_run_leaves_what_its_steps_cost_for_the_planner(finished: Finished) -> None:
    summary, directory, _ = finished
    config = load(str(directory.config_file), [])
    directory.write(directory.summary, summary)
    measured = read_run(str(directory.path))
    assert measured.cost == read_profile(str(directory.profile))
    assert len(measured.prompts) == len(measured.signal) == 14 * GROUPS
    assert sorted(set(measured.prompts)) == sorted(measured.prompts)
    setting = measured.setting()
    setting.check()
    assert (setting.groups, setting.staleness, setting.instances) == (GROUPS, 1, config.rollout.instances)
    assert setting.strategies == config.strategies
    assert min(setting.reward_s, setting.push_s, summary["pull_s"]) > 0
    rows = read_metrics(directory.metrics)
    assert 0 < sum(row["instances_busy_s"] for row in rows) <= summary["instance_busy_s"] + 1e-6


def test_a_real_run_can_be_asked_reported_traced_and_tracked(finished: Finished) -> None:
    summary, directory, _ = finished
    config = load(str(directory.config_file), [])
    directory.write(directory.summary, summary)
    pace = ask(directory, config, "").facts
    rows = read_metrics(directory.metrics)
    assert pace["step_s"] * pace["steps_looked_at"] <= rows[-1]["time"]
    assert pace["law"]["step_s"] > 0
    step = ask(directory, config, "step 9").facts
    assert step["committed_s"] - step["opened_s"] == pytest.approx(rows[9]["time"] - rows[8]["time"], abs=0.25)
    assert step["groups"] == GROUPS
    assert ask(directory, config, "why did instance 0 pull").facts["pull"]["version"] > 0
    prompt = rows[5]["prompts"][0]
    assert ask(directory, config, f"group {prompt}").facts["trained_at_step"] == 5
    assert ask(directory, config, f"p{prompt}/1").facts["trained_at_step"] == 5
    assert "What sets the pace" in page(directory, config)
    assert write_trace(directory, directory.path / "trace.json") > 14 * GROUPS * MEMBERS
    *lines, last = [json.loads(line) for line in (directory.path / "lines").read_text().splitlines()]
    assert last == {}, "it was closed"
    assert [line["step"] for line in lines if "reward" in line] == [*range(14)]
    assert [line["evaluation/step"] for line in lines if "evaluation/step" in line] == [0, 14]
