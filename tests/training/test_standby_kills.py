"""The trainer's process is killed at any moment. The next one continues, and the run's versions are those of a run in
which nobody died, to the last bit of weights, moments and random numbers."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.config import load, to_yaml
from staleflow.servers.weights import claim, standby_of
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.segments import StoreRegistry
from staleflow.types import Broken, Feed, Finish, Pushed, Ready, Row, Save, Saved, Stop
from tests.training.test_trainer import VOCABULARY, groups_of
from tests.training.trainer_process import TrainerProcess, store_of

pytestmark = pytest.mark.processes

PLAIN = ("training.learning_rate=0.01",)
ADAPTERS_AND_VALUES = (*PLAIN, "training.lora_rank=2", "training.advantage=gae", "training.updates_per_step=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """What a run's control plane does: it claims its stores, so that nobody reclaims them between two trainers."""
    with ExitStack() as claims:

        def make(name: str, *options: str) -> Path:
            run = tmp_path / name
            run.mkdir()
            (run / "config.yaml").write_text(to_yaml(load(None, list(options))))
            claims.enter_context(claim(store_of(run)))
            claims.enter_context(claim(standby_of(store_of(run))))
            return run

        yield make


def stores(run: Path, attempt: int = 1) -> list[str]:
    """Of this run, those that are there."""
    registry, store = StoreRegistry(), store_of(run, attempt)
    return [name for name in (store, standby_of(store)) if registry.control(name).exists()]


class Watcher:
    """An instance that pulls every version, and knows it by its checksum."""

    def __init__(self, run: Path, model: Path) -> None:
        self.engine = LlamaForCausalLM.from_pretrained(model)
        self.run = run
        self.server: LocalParameterServer | None = None
        self.checksums: dict[int, str] = {}

    def look(self, version: int) -> None:
        self.server = self.server or LocalParameterServer.attach(store_of(self.run))
        assert self.server.pull(dict(self.engine.named_parameters()), version, verify=True) == version
        assert self.server.last_pull
        checksum = self.server.last_pull.checksum
        assert self.checksums.setdefault(version, checksum) == checksum


def step(number: int) -> list[list[Row]]:
    """Groups that all have a signal: every version differs from the one before."""
    groups = groups_of(3, 3, seed=number, version=number)
    return [[replace(row, reward=float(at == 0)) for at, row in enumerate(group)] for group in groups]


def end(run: Path, trainer: TrainerProcess) -> dict[str, bytes]:
    """Stop it, and see that nothing is left behind. Returns all that made the trainer what it was."""
    folder = run / "last"
    trainer.send([Save(str(folder), {}), Stop()])
    trainer.hear_kind(Saved)
    trainer.end()
    assert stores(run) == []
    assert not list(run.glob("fed-*"))
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def undisturbed(run: Path, model: Path, steps: int) -> tuple[dict[int, str], dict[str, bytes], float]:
    """The checksums of all versions, all that the trainer is in the end, and the seconds of a step."""
    watcher, trainer = Watcher(run, model), TrainerProcess(run, model, standby=False)
    watcher.look(trainer.hear_kind(Ready).version)
    began = time.perf_counter()
    for number in range(steps):
        trainer.send([Feed(number, step(number)), Finish(number)])
        watcher.look(trainer.hear_kind(Pushed).version)
    took = (time.perf_counter() - began) / steps
    return watcher.checksums, end(run, trainer), took


def kill_trainers(
    run: Path, model: Path, expected: dict[int, str], last: dict[str, bytes], step_s: float, chance: random.Random
) -> int:
    """About one death for each step, somewhere between before the step and after it. Returns how many were in the
    middle of a step."""
    watcher, trainer = Watcher(run, model), TrainerProcess(run, model, standby=False)
    steps, interrupted, version = len(expected) - 1, 0, trainer.hear_kind(Ready).version
    watcher.look(version)
    while version < steps - 1:
        before = version
        for number in range(version, version + 2):  # the second one, so that deaths right after a version happen too
            trainer.send([Feed(number, step(number)), Finish(number)])
        time.sleep(chance.uniform(0, 1.5 * step_s))  # where it is then is left to chance
        trainer.kill()
        trainer = TrainerProcess(run, model, standby=True)
        version = trainer.hear_kind(Ready).version
        assert before <= version <= before + 2
        watcher.look(version)
        interrupted += version < before + 2
        if version == before:  # let it get on
            trainer.send([Feed(version, step(version)), Finish(version)])
            version = trainer.hear_kind(Pushed).version
            watcher.look(version)
    for number in range(version, steps):
        trainer.send([Feed(number, step(number)), Finish(number)])
        watcher.look(trainer.hear_kind(Pushed).version)
    assert end(run, trainer) == last
    assert watcher.checksums == {version: expected[version] for version in watcher.checksums}
    assert max(watcher.checksums) == steps
    return interrupted


@pytest.mark.parametrize("options", [PLAIN, ADAPTERS_AND_VALUES], ids=["plain", "adapters-and-values"])
def test_killed_trainers_lose_nothing(new_run: Callable[..., Path], model: Path, options: tuple[str, ...]) -> None:
    expected, last, step_s = undisturbed(new_run("a", *options), model, 6)
    assert len(set(expected.values())) == len(expected)
    assert kill_trainers(new_run("b", *options), model, expected, last, step_s, random.Random(1)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_killed_trainers(new_run: Callable[..., Path], model: Path, seed: int) -> None:
    expected, last, step_s = undisturbed(new_run("a", *PLAIN), model, 60)
    assert kill_trainers(new_run("b", *PLAIN), model, expected, last, step_s, random.Random(seed)) > 0


def test_a_trainer_that_died_before_its_last_versions_were_kept_makes_them_again(
    new_run: Callable[..., Path], model: Path
) -> None:
    straight, again = new_run("a", *PLAIN), new_run("b", *PLAIN)
    whole = TrainerProcess(straight, model, standby=False)
    for number in range(2):
        whole.send([Feed(number, step(number)), Finish(number)])
    wanted = end(straight, whole)
    first = TrainerProcess(again, model, standby=False)
    assert first.hear_kind(Ready).version == 0
    first.kill()
    weights = LocalParameterServer.take_over(store_of(again))
    made = load_file(straight / "last" / "model.safetensors")
    weights.push(2, {name: made[name] for name in made})  # and here it died: its state is that of version 0
    weights.detach()
    for number in range(2):
        (again / f"fed-{number:012d}.msgpack").write_bytes(msgspec.msgpack.encode([step(number)]))
    second = TrainerProcess(again, model, standby=True)
    assert second.hear_kind(Ready).version == 2
    assert end(again, second) == wanted


def test_a_trainer_that_died_before_its_first_version_is_begun_again(new_run: Callable[..., Path], model: Path) -> None:
    run = new_run("a", *PLAIN)
    early = TrainerProcess(run, model, standby=False)
    early.kill()
    late = TrainerProcess(run, model, standby=True)
    assert late.hear_kind(Ready).version == 0
    LocalParameterServer.attach(store_of(run)).close()
    late.send([Stop()])
    late.end()
    LocalParameterServer.create(store_of(run)).detach()  # it died between making the store and a push
    last = TrainerProcess(run, model, standby=True)
    assert last.hear_kind(Ready).version == 0
    last.send([Stop()])
    last.end()


def test_a_resumed_run_begins_at_its_checkpoint_and_not_at_what_a_killed_one_left(
    new_run: Callable[..., Path], model: Path
) -> None:
    run = new_run("a", *PLAIN)
    first = TrainerProcess(run, model, standby=False)
    folder = str(run / "step-1")
    assert first.hear_kind(Ready).version == 0
    first.send([Feed(0, step(0)), Finish(0), Save(folder, {}), Feed(1, step(1)), Finish(1)])
    assert first.hear_kind(Saved).folder == folder
    assert first.hear_kind(Pushed).version == 2
    first.kill()
    store = store_of(run, attempt=2)
    with claim(store), claim(standby_of(store)):
        resumed = TrainerProcess(run, model, standby=False, checkpoint=folder, attempt=2)
        assert resumed.hear_kind(Ready).version == 1
        resumed.send([Feed(1, step(1)), Finish(1)])
        assert resumed.hear_kind(Pushed).version == 2
        resumed.kill()
        revived = TrainerProcess(run, model, standby=True, checkpoint=folder, attempt=2)
        assert revived.hear_kind(Ready).version == 2
        revived.send([Feed(2, [*step(0), *step(9)]), Finish(2)])
        assert "the bound is" in revived.hear_kind(Broken).why
        revived.end()
        assert len(stores(run, attempt=2)) == 2, "the version before the failure is left to a trainer that saves it"
