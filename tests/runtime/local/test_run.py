"""Whole runs with real processes: tiny, but with everything that a large one has."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.commands.options import read_profile
from staleflow.commands.train import guess
from staleflow.config import Config, load
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.state import newest
from staleflow.runtime.local.run import LocalRun, RunError
from staleflow.servers.durable import DurableJournal
from staleflow.simulate.presets import preset
from staleflow.study.measured import read_run
from staleflow.tasks import adder
from staleflow.tasks.base_model import Shape, new_model, tokenizer
from staleflow.tasks.opening import TaskSet, open_task
from tests.runtime.local.rewards import evenness
from tests.runtime.local.synchronous import Plain, train

GROUPS, MEMBERS, MOST, RATE, WARMUP = 4, 4, 16, 3e-3, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(Shape(hidden=32, intermediate=48, layers=2, heads=2), seed=5).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


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


def opened(config: Config, model: Path) -> TaskSet:
    return open_task(config.data, model, config.seed, config.evaluation.problems)


def run_once(
    config: Config,
    model: Path,
    directory: RunDirectory | None = None,
    watch: Callable[[LocalRun], None] = lambda _: None,
) -> tuple[dict[str, Any], RunDirectory]:
    checkpoint = newest(directory.checkpoints) if directory else None
    directory = directory or RunDirectory.create(config, "test")
    run = LocalRun(config, directory, model, opened(config, model), guess(config), checkpoint, watch)

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(300):
            return await run.execute()

    return asyncio.run(main()), directory


def plain(config: Config, model: Path) -> Plain:
    prompts = opened(config, model).prompts

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
    assert [row["step"] for row in read_metrics(directory.metrics)] == list(range(12))
    trained = [name for life in (1, 2) for name in committed(directory.journal(life))]
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


def test_a_reward_that_always_fails_ends_the_run_with_one_line(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=50", "reward.function=tests.runtime.local.rewards:broken")
    with pytest.raises(RunError, match=r"reward failed 256 times in a row, last: RuntimeError: the service is down"):
        run_once(config, model)


def test_checkpoints_load_in_transformers_and_summaries_have_their_keys(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = configured(model, tmp_path, "steps=4", "staleness=1", "checkpoints.every=1", "checkpoints.keep=2")
    summary, directory = run_once(config, model)
    found = sorted(each.name for each in directory.checkpoints.iterdir())
    assert found == ["step-000003", "step-000004"]
    AutoModelForCausalLM.from_pretrained(directory.checkpoints / "step-000004")
    AutoTokenizer.from_pretrained(directory.checkpoints / "step-000004")
    trained = json.loads((directory.checkpoints / "step-000004" / "trainer.json").read_text())
    assert trained["version"] == 4, "and not one that was made after the last step"
    wanted = {
        "accuracy_initial", "accuracy_final", "steps", "wall_s", "seconds_to_90", "tokens_trained", "tokens_wasted",
        "trained_tokens_per_s", "bound", "max_staleness", "staleness_histogram", "violations", "groups_admitted",
        "groups_committed", "groups_released", "trainer_idle", "control_overhead",
    }  # fmt: skip
    assert wanted <= set(json.loads(json.dumps(summary)))
    assert sum(summary["staleness_histogram"].values()) == summary["tokens_trained"] > 0
    assert 0 <= summary["trainer_idle"] <= 1


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
    assert len(told) >= 6, "what was not told before the death is not told twice"
    assert [told[step] for step in sorted(told)] == pytest.approx([losses[step] for step in sorted(told)], abs=1e-6)
    assert summary["groups_committed"] == 8 * GROUPS


def test_a_run_leaves_what_its_steps_cost_for_the_planner(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=12", "staleness=1", "groups=8")
    summary, directory = run_once(config, model)
    directory.write(directory.summary, summary)
    measured = read_run(str(directory.path))
    assert measured.cost == read_profile(str(directory.profile))
    assert measured.shares is not None
    assert len(measured.prompts) == len(measured.signal) == 12 * 8
    assert sorted(set(measured.prompts)) == sorted(measured.prompts)
    setting = measured.apply(preset("paper-14b"))
    setting.check()
    assert (setting.groups, setting.staleness, setting.instances) == (8, 1, config.rollout.instances)
    assert setting.strategies == config.strategies
    assert min(setting.reward_s, setting.push_s, summary["pull_s"]) > 0
    rows = read_metrics(directory.metrics)
    assert 0 < sum(row["instances_busy_s"] for row in rows) <= summary["instance_busy_s"] + 1e-6
