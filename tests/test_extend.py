"""Every example of docs/extend.md, run for real: the code is read from the page, and so are the settings."""

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.config import Config, ConfigError, Machine, load
from staleflow.config.checks import check
from staleflow.config.costs import costs_from_geometry
from staleflow.config.tracking import TRACKERS
from staleflow.coordinator.decide import decide
from staleflow.coordinator.situation import Pull
from staleflow.coordinator.strategies import SYNCHRONISATION, Strategies
from staleflow.errors import RunError
from staleflow.registry import Entry, Registry
from staleflow.reward.function import Response, Rewards, load_reward
from staleflow.reward.options import REWARDS
from staleflow.reward.pool import RewardPool
from staleflow.reward.wire import Job
from staleflow.reward.worker import score
from staleflow.rollout.engine import Engine, Request
from staleflow.rollout.options import ENGINES, Sampling
from staleflow.run.directory import RunDirectory
from staleflow.run.tracked import trackers_of
from staleflow.runtime.local.run import LocalRun
from staleflow.servers.filters import FILTERS, check_reason
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Row
from staleflow.tasks.adder import Shape
from staleflow.tasks.base_model import new_model, tokenizer
from staleflow.tasks.opening import first_problem, open_source, open_task
from staleflow.tasks.options import SOURCES
from staleflow.tasks.task import Problem
from staleflow.training.build import build
from staleflow.training.options import ADVANTAGES, CORRECTIONS, LOSSES
from staleflow.training.report import StepReport
from staleflow.types import Setup
from staleflow.workers import roles
from tests.coordinator.make_situations import instance, situation

PAGE = (Path(__file__).parents[1] / "docs/extend.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = {found[1]: code for kind, code in BLOCKS if kind == "python" and (found := re.match(r"# (\w+\.py)\n", code))}
SETTINGS = {line.partition("=")[0]: line.split() for kind, line in BLOCKS if kind == "sh"}
ROOMY = Machine(cores=8, memory=64 * 2**30)
DATA = ["reward.function=last-number", "data.max_prompt_tokens=8"]
"""What goes with other data than the embedded task's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(Shape(hidden=32, intermediate=48, layers=2, heads=2), seed=5).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, in the folder that is current."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for registry in (ADVANTAGES, CORRECTIONS, ENGINES, FILTERS, LOSSES, REWARDS, SOURCES, SYNCHRONISATION, TRACKERS):
        monkeypatch.setattr(registry, "_loaded", {})
    importlib.invalidate_caches()
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def configured(model: Path, *changes: str) -> Config:
    """Loaded and checked, as a command does it."""
    given = [f"model={model}", "runs=runs", "rollout.max_tokens=24", "training.learning_rate=1e-2", "group_size=4"]
    config = load(None, [*given, "rollout.kv_tokens=2048", *changes])
    check(config, ROOMY)
    return config


def step(config: Config, model: Path) -> StepReport:
    """One step of a real trainer, whose weights must have moved."""
    trainer = build(model, config.trainer_options())
    before = [each.detach().clone() for each in trainer.parameters]
    rng = np.random.default_rng(0)
    for group in range(2):
        rows = [
            Row.of(
                f"p{group}/{member}",
                rng.integers(3, 50, 4).astype(np.int32),
                rng.integers(3, 50, 6 + member).astype(np.int32),
                np.full(6 + member, -3.5, np.float32),
                ((0, 6 + member),),
                float(member % 3),
            )
            for member in range(4)
        ]
        trainer.feed(0, [rows])
    report = trainer.finish(0)
    assert any(not (one == other).all() for one, other in zip(before, trainer.parameters, strict=True))
    return report


def test_the_page_has_an_example_of_each_kind() -> None:
    kinds = ("training.loss", "training.advantage", "training.correction", "filter", "reward.function", "data.source")
    assert set(SETTINGS) == {*kinds, "strategies.synchronisation", "rollout.engine", "track"}
    assert len(FILES) == len(SETTINGS)
    assert all(len(code.splitlines()) <= 22 for code in FILES.values())


@pytest.mark.parametrize(
    ("setting", "metric"),
    [("training.loss", "ratio"), ("training.advantage", "ratio"), ("training.correction", "tokens_outside")],
)
def test_a_loss_an_advantage_and_a_correction_train_a_step(model: Path, setting: str, metric: str) -> None:
    config = configured(model, *SETTINGS[setting])
    assert config.trainer_options().whole_batch is None
    assert metric in step(config, model).metrics


def test_an_advantage_that_says_nothing_sees_the_whole_batch(model: Path, folder: Path) -> None:
    (folder / "my_advantage.py").write_text(FILES["my_advantage.py"].replace("ranked.scope", "scope"))
    config = configured(model, *SETTINGS["training.advantage"])
    assert "may depend on all of the batch" in (config.trainer_options().whole_batch or "")
    step(config, model)


@pytest.mark.parametrize("scope", ["grouped", "values", "Batch"])
def test_a_slip_in_the_scope_of_an_advantage_does_not_train_parts_of_a_batch(
    model: Path, folder: Path, scope: str
) -> None:
    (folder / "my_advantage.py").write_text(FILES["my_advantage.py"].replace('"group"', f'"{scope}"'))
    with pytest.raises(ConfigError, match=f'has scope = \'{scope}\': write one of "group", "batch"'):
        configured(model, *SETTINGS["training.advantage"])


def test_a_tracker_gets_what_is_logged(model: Path, tmp_path: Path) -> None:
    config = configured(model, *SETTINGS["track"])
    trackers = trackers_of(config, RunDirectory(tmp_path), 0, pytest.fail)
    for step in range(3):
        trackers.log(step, {"step": step, "reward": 0.5})
    trackers.close()
    assert (tmp_path / "rewards.txt").read_text() == "2 1.5\n"


def test_a_filter_gives_reasons(model: Path) -> None:
    config = configured(model, *SETTINGS["filter"])
    chosen = FILTERS.bound(config.filter, {}, config.filter_arguments)
    group = Group("p0", prompt=0, attempt=0, prompt_tokens=4, needed=2)
    for reward, why in ((0.85, "too easy"), (0.5, None), (0.0, "too hard")):
        group.members = [Trajectory(f"p0/{at}", group, state="complete", reward=reward) for at in range(2)]
        assert chosen(group) == why


def test_a_reward_scores_in_a_worker(model: Path) -> None:
    config = configured(model, *SETTINGS["reward.function"])
    problem = Problem("2 * 3 = ", {"answer": "6"})
    assert load_reward(config.reward)(problem, Response("6", (1,) * 75)) == 0.5

    async def main() -> float:
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        pool = RewardPool(
            config.reward,
            on_reward=lambda _, reward, _parts: answer.set_result(reward),
            on_failure=lambda _, why: answer.set_exception(AssertionError(why)),
        )
        try:
            await pool.start()
            pool.submit("a", problem, text="is 6")
            async with asyncio.timeout(30):
                return await answer
        finally:
            await pool.close()

    assert asyncio.run(main()) == 1.0


def test_a_data_source_makes_problems(model: Path) -> None:
    config = configured(model, *DATA, *SETTINGS["data.source"])
    problem = first_problem(open_source(config.data, seed=0))
    assert re.fullmatch(r"\d{1,3} \* \d{1,3} = ", str(problem.prompt))
    assert problem.facts["answer"].isdigit()


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("return None", "failed (TypeError: 'NoneType' object is not iterable"),
        ("raise ValueError('two\\nlines')", "failed (ValueError: two lines at slips.py, line 3)"),
        ("return ['pull']", "returned 'pull' among its commands: return a list of Pull"),
        (
            "return [Pull('i9', 5)]",
            "returned Pull(instance='i9', version=5): name an instance of situation.",
        ),
        (
            "return [Pull('a', 9)]",
            "returned Pull(instance='a', version=9), and the newest version is 5: give",
        ),
    ],
)
def test_a_strategy_that_is_wrong_does_not_end_in_a_traceback(folder: Path, code: str, line: str) -> None:
    name = f"slips_{abs(hash(code))}"
    text = f"from staleflow.coordinator.situation import Pull\ndef pull(situation, strategies):\n    {code}\n"
    (folder / f"{name}.py").write_text(text)
    strategies = Strategies(synchronisation=f"{name}:pull")
    with pytest.raises(ConfigError) as error:
        decide(situation([instance("a", 5)]), strategies)
    assert line in str(error.value).replace(name, "slips")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("found", [True, 3, "", ["why"]])
def test_a_filter_that_gives_no_text_is_refused_and_not_written_to_the_journal(found: Any) -> None:
    held = FILTERS.held("my_filter:odd", lambda _: found, check_reason)
    with pytest.raises(ConfigError, match=r"filter=my_filter:odd returned .*: return a short reason to replace the"):
        held(Group("p0", prompt=0, attempt=0, prompt_tokens=4, needed=2))


@pytest.mark.slow
@pytest.mark.processes
def test_a_filter_that_raises_ends_the_run_and_does_not_leave_it_waiting(model: Path, folder: Path) -> None:
    (folder / "slip.py").write_text("def slip(group):\n    return group.nothing\n")
    (folder / "even.py").write_text("def even(_, response):\n    return len(response.tokens) % 2\n")
    sizes = ["groups=2", "steps=2", "evaluation.every=0", "evaluation.problems=2", "rollout.instances=1"]
    config = configured(model, *sizes, "filter=slip:slip", "reward.function=even:even")
    task = open_task(config.data, open_source(config.data, config.seed), model, config.seed, config.evaluation.problems)
    run = LocalRun(config, RunDirectory.create(config, "own"), model, task, costs_from_geometry(config), None)

    async def main() -> None:
        async with asyncio.timeout(300):
            await run.execute()

    with pytest.raises(ConfigError, match=r"filter=slip:slip failed \(AttributeError: .* at slip.py, line 2\)"):
        asyncio.run(main())


def test_a_strategy_decides(model: Path) -> None:
    config = configured(model, *SETTINGS["strategies.synchronisation"])
    busy = {"running": 1, "context": 10}
    seen = situation([instance("new", 5), instance("near", 3, **busy), instance("far", 2, **busy)])
    pulls = [command for command in decide(seen, config.strategies).commands if isinstance(command, Pull)]
    assert [pull.instance for pull in pulls] == ["far"]
    assert SYNCHRONISATION.load("greedy") is not SYNCHRONISATION.load(config.strategies.synchronisation)


def finished(engine: Engine) -> int:
    """Responses to two prompts."""
    engine.pull(lambda _: 0, 0)
    engine.submit([Request(name, 1, [5, 8, 13], sampling=Sampling(max_tokens=4)) for name in ("a", "b")])
    count = 0
    while engine.busy:
        count += len(engine.step().finished)
    engine.close()
    return count


def test_an_engine_decodes(model: Path) -> None:
    config = configured(model, *SETTINGS["rollout.engine"])
    make = ENGINES.load(config.rollout.engine)
    assert finished(make(model, config.engine_options(), **config.rollout.engine_arguments)) == 2


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("raise RuntimeError('no GPU\\nhere')", r"failed \(RuntimeError: no GPU here at wrong.py, line 3\)"),
        (
            "self.step = self.pull = None",
            "returned an object of the type Wrong without busy, submit, .*: write what Engine in",
        ),
    ],
)
def test_an_engine_of_ones_own_that_cannot_be_made_is_not_made_six_times(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, written: str, why: str
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    monkeypatch.setattr(ENGINES, "_loaded", {})
    (folder / "wrong.py").write_text(
        f"class Wrong:\n    def __init__(self, model_folder, options):\n        {written}\n"
    )
    config = configured(model, "rollout.engine=wrong:Wrong")
    with pytest.raises(ConfigError, match=f"rollout.engine=wrong:Wrong {why}"):
        roles._engine(setup(model, incarnation=1), config)  # pyright: ignore[reportPrivateUsage]


def test_an_engine_that_worked_before_is_tried_again(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "away.py").write_text("def away(model_folder, options):\n    raise RuntimeError('the device is busy')\n")
    config = configured(model, "rollout.engine=away:away")
    with pytest.raises(RuntimeError, match=r"^the device is busy$"):
        roles._engine(setup(model, incarnation=2), config)  # pyright: ignore[reportPrivateUsage]


SLIPS = """
import os
from staleflow.rollout.builtin import TorchEngine

class Slips:
    \"\"\"Raises after so many tokens, until the file is there that it makes then.\"\"\"

    def __init__(self, model_folder, options, *, tokens, file):
        self._engine = TorchEngine(model_folder, options, version=-1)
        self._left, self._file = tokens, file

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        if self._left <= 0 and not os.path.exists(self._file):
            if self._file:
                open(self._file, "a").close()
            raise ValueError("a slip")
        output = self._engine.step()
        self._left -= output.made
        return output
"""


def run_with_slips(model: Path, folder: Path, tokens: int, file: str) -> dict[str, Any]:
    (folder / "slips.py").write_text(SLIPS)
    (folder / "even.py").write_text("def even(_, response):\n    return len(response.tokens) % 2\n")
    sizes = ["groups=2", "steps=4", "evaluation.every=0", "evaluation.problems=2", "rollout.instances=1"]
    engine = ["rollout.engine=slips:Slips", f"rollout.engine_arguments={{tokens: {tokens}, file: {file!r}}}"]
    config = configured(model, *sizes, *engine, "reward.function=even:even")
    task = open_task(config.data, open_source(config.data, config.seed), model, config.seed, config.evaluation.problems)
    run = LocalRun(config, RunDirectory.create(config, "own"), model, task, costs_from_geometry(config), None)

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(300):
            return await run.execute()

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.processes
def test_an_engine_that_raises_before_its_first_token_ends_the_run_at_once(model: Path, folder: Path) -> None:
    """It was started again six times, for minutes."""
    why = r"rollout.engine=slips:Slips failed \(ValueError: a slip at slips.py, line 19\)"
    with pytest.raises(RunError, match=rf"^evaluator: {why}$"):
        run_with_slips(model, folder, tokens=0, file="")


@pytest.mark.slow
@pytest.mark.processes
def test_an_engine_that_raises_after_it_has_worked_is_replaced(model: Path, folder: Path) -> None:
    """A ``ValueError`` ended the run: it was taken for a bad setting. Two held-out responses have fewer tokens than
    that, so it is the instance."""
    summary = run_with_slips(model, folder, tokens=60, file=str(folder / "slipped"))
    assert (folder / "slipped").exists()
    assert summary["steps"] == 4
    assert summary["restarts"] == {"instance": {"exit code 1": 1}}


def setup(model: Path, incarnation: int) -> Setup:
    return Setup("instance", "i0", incarnation, "", str(model), "", [], 1, 0)


# Into the package: one file and one line


def test_a_new_loss_is_one_file_and_one_line(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = re.search(r'^"(.*)": Entry\("(.*)"\),$', PAGE, re.MULTILINE)
    assert line is not None
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(LOSSES.entries, line[1], Entry(line[2]))
    assert "ratio" in step(configured(model, "training.loss=soft-clip"), model).metrics
    with pytest.raises(ConfigError, match="loss=soft-clap: write soft-clip"):
        load(None, ["training.loss=soft-clap"])
    with pytest.raises(ConfigError, match="loss=soft-clip has no eps_low: leave it out, or give one of ppo"):
        load(None, ["training.loss=soft-clip", "training.eps_low=0.1"])


def test_a_new_engine_is_one_file_and_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES.entries, "slowed", Entry("my_engine:Slowed"))
    config = configured(model, "rollout.engine=slowed")
    assert finished(ENGINES.load(config.rollout.engine)(model, config.engine_options())) == 2


@pytest.mark.slow
def test_a_run_with_everything_of_the_users_own(model: Path, folder: Path) -> None:
    (folder / "even.py").write_text(
        "def even(_, response):\n    return sum(not each % 2 for each in response.tokens)\n"
    )
    parts = ("training.loss", "training.advantage", "training.correction", "filter", "strategies.synchronisation")
    chosen = [each for name in (*parts, "rollout.engine") for each in SETTINGS[name]]
    sizes = ["groups=2", "steps=2", "staleness=1", "evaluation.every=0", "evaluation.problems=2", "rollout.instances=1"]
    anything = ["filter_arguments.hard=-1", "filter_arguments.easy=100", "reward.function=even:even"]
    config = configured(model, *sizes, *chosen, *anything)
    task = open_task(config.data, open_source(config.data, config.seed), model, config.seed, config.evaluation.problems)
    run = LocalRun(config, RunDirectory.create(config, "own"), model, task, costs_from_geometry(config), None)

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(300):
            return await run.execute()

    summary = asyncio.run(main())
    assert (summary["steps"], summary["violations"]) == (2, 0)


# What is wrong with the user's own is one line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["training.loss=my_losses:soft_clip"], "importing my_losses failed (ModuleNotFoundError: No module named"),
        (
            ["training.loss=broken:loss"],
            "importing broken failed (ZeroDivisionError: division by zero): correct the name",
        ),
        (["training.loss=my_loss:hard_clip"], "training.loss=my_loss:hard_clip: my_loss has no hard_clip"),
        (["training.loss=my_loss:TOKEN_MEAN"], "TOKEN_MEAN is a Aggregation: name a function"),
        (
            ["training.loss=my_advantage:ranked"],
            "write def ranked(logprobs_T, advantages_T, segments, correction, aggregation)",
        ),
        (["training.loss=my_loss:soft_clip", "training.loss_arguments.sharp=1"], "unexpected keyword argument 'sharp'"),
        (["training.loss=my_loss:soft_clip", "training.eps_high=0.1"], "has no eps_high: leave training.eps_high out"),
        (
            ["rollout.engine=my_engine:Slowed", "rollout.engine_arguments.pause=1"],
            "keyword argument 'pause'): write def __init__(self, model_folder, options, pause)",
        ),
        (["rollout.engine=my_engine:__name__"], "__name__ is a str: name a class"),
        (["rollout.engine_arguments.pause_s=1"], "rollout.engine_arguments are for module:Class: leave them out"),
        (["reward.function=my_reward:brief", "reward.arguments.most=1"], "write def brief(problem, response, most)"),
        ([*DATA, "data.source=my_data:products", "data.arguments.size=1"], "keyword argument 'size'"),
        (["strategies.tail=:tail"], "strategies.tail=:tail: write one of wait, replace, truncate, or module:function"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(model: Path, folder: Path, overrides: list[str], line: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError) as error:
        configured(model, *overrides)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_script_that_exits_when_it_is_imported_does_not_end_the_command_without_a_word(
    model: Path, folder: Path
) -> None:
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"importing script failed \(SystemExit: 0\): correct the name"):
        configured(model, "reward.function=script:reward")


def test_a_reward_that_exits_is_a_failure_with_its_line_and_not_the_end_of_a_worker() -> None:
    def stops(*_: object) -> float:
        raise SystemExit(3)

    with asyncio.Runner() as runner:
        answer = score(Rewards([stops], [1.0]), None, Job(1, "2 + 2", {}, b"", "4"), runner)
    assert "SystemExit: 3 (test_extend.py, line " in answer.why


def test_a_model_of_another_family_needs_another_engine(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text((model / "config.json").read_text().replace('"llama"', '"phi3"'))
    with pytest.raises(ConfigError, match=r"model_type 'phi3' .* rollout\.engine=vllm"):
        configured(other)
    configured(other, *SETTINGS["rollout.engine"])


def test_registries_do_not_mix_up_names() -> None:
    registry: Registry[Any] = Registry(
        "x", {"a": Entry("os:getcwd"), "b:": Entry("os:getpid"), ".c": Entry("os:sep")}, ()
    )
    assert [registry.key(name) for name in ("a", "b:1", "x.c", "m:f", "b", "")] == ["a", "b:", ".c", None, None, None]
    assert registry.problem("m:f") is None
    assert registry.problem("c") == registry.problem("b"), "an ending is not a name"
    assert registry.problem("b") == ": write one of a, b:..., a .c file, or module:function"
