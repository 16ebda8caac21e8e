"""A damaged checkpoint is named and skipped, never used, whatever happened to it."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.errors import StaleFlowError
from staleflow.protocol import StalenessLedger
from staleflow.run.checkpoints import checkpoints, choose, newest, set_aside, wrong_with
from staleflow.run.record import Record
from staleflow.run.state import STATE, pack_state, unpack_state
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.training.checkpoints import CheckpointError, load, save
from staleflow.training.checksums import CHECKSUMS
from staleflow.training.options import TrainerOptions
from staleflow.training.trainer import Trainer

SIZES = ("vocab_size", "hidden_size", "intermediate_size")
SHAPE: dict[str, Any] = {**dict.fromkeys(SIZES, 8), "num_hidden_layers": 1, "num_attention_heads": 1}


def new_trainer() -> Trainer:
    return Trainer(LlamaForCausalLM(LlamaConfig(**SHAPE)), TrainerOptions(0))


def new_server(version: int = 0, journal: MemoryJournal | DurableJournal | None = None) -> TrajectoryServer:
    ledger = StalenessLedger(2, 1)
    ledger.version = version
    return TrajectoryServer(ledger, 2, 0, journal or MemoryJournal(), Payloads(Limits(8, 8, 8)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder of checkpoints: of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    trainer = new_trainer()
    for version in (5, 10):
        trainer.version = version
        save(trainer, folder / f"step-{version:06d}", also={STATE: pack_state(new_server(version), Record(1))})
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) * 2 // 3] ^= 4
    path.write_bytes(body)


def replace(path: Path) -> None:
    """By well-formed content of something else."""
    path.write_bytes(b"{}")


DAMAGES: list[Callable[[Path], None]] = [truncate, empty, flip, replace, Path.unlink]
FILES = [STATE, "model.safetensors", "optimiser.safetensors", "trainer.json", "config.json", CHECKSUMS]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    folder: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / "step-000010" / file)
    choice = choose(folder)
    assert choice.folder == folder / "step-000005"
    assert [each.folder.name for each in choice.skipped] == ["step-000010"]
    (note,) = choice.notes
    assert "step-000010 is damaged" in note
    assert file in note or file == CHECKSUMS
    assert "\n" not in note
    set_aside(choice)
    assert newest(folder) == folder / "step-000005"
    assert choose(folder).skipped == ()
    assert (folder / "damaged-step-000010").is_dir(), "nothing is thrown away"


def test_a_checkpoint_of_another_version_under_this_name_is_not_used(folder: Path) -> None:
    shutil.rmtree(folder / "step-000010")
    shutil.copytree(folder / "step-000005", folder / "step-000012")
    assert choose(folder).folder == folder / "step-000005"
    assert "of version 5" in choose(folder).skipped[0].why


def test_a_whole_one_is_chosen_by_number_and_files_beside_it_do_not_matter(folder: Path) -> None:
    (folder / "step-000010" / "README.md").write_text("notes of mine")
    assert choose(folder).folder == folder / "step-000010"
    assert choose(folder).notes == []
    (folder / "step-1000000").mkdir()
    (folder / "step-999999").mkdir()
    assert [each.name for each in checkpoints(folder)][-2:] == ["step-999999", "step-1000000"]


def test_without_any_whole_one_nothing_is_chosen(folder: Path) -> None:
    for each in checkpoints(folder):
        truncate(each / STATE)
    choice = choose(folder)
    assert choice.folder is None
    assert [each.folder.name for each in choice.skipped] == ["step-000010", "step-000005"], "newest first"


def unseal(checkpoint: Path) -> None:
    """As earlier releases wrote it."""
    (checkpoint / CHECKSUMS).unlink()
    (checkpoint / "trainer.json").write_text(json.dumps({"format": 1, "version": int(checkpoint.name[-6:])}))


def test_an_old_checkpoint_without_checksums_is_used_with_a_note(folder: Path) -> None:
    unseal(folder / "step-000010")
    choice = choose(folder)
    assert choice.folder == folder / "step-000010"
    assert "has no checksums" in choice.notes[0]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES[:3] for damage in (truncate, empty, Path.unlink)),
        *(("trainer.json", damage) for damage in DAMAGES),
    ],
)
def test_an_old_checkpoint_without_checksums_is_checked_as_far_as_its_files_tell(
    folder: Path, file: str, damage: Callable[[Path], None]
) -> None:
    unseal(folder / "step-000010")
    damage(folder / "step-000010" / file)
    assert choose(folder).folder == folder / "step-000005"
    assert file in choose(folder).skipped[0].why


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), places=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1))
def test_no_flipped_byte_is_accepted(saved: Path, tmp_path: Path, file: str, places: list[tuple[float, int]]) -> None:
    checkpoint = Path(shutil.copytree(saved / "step-000010", tmp_path / "step-000010", dirs_exist_ok=True))
    whole = (checkpoint / file).read_bytes()
    body = bytearray(whole)
    for at, change in places:
        body[min(len(body) - 1, int(at * len(body)))] ^= change
    (checkpoint / file).write_bytes(body)
    why = wrong_with(checkpoint)
    assert bool(why) == (bytes(body) != whole)
    assert "\n" not in why


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1), st.integers(1, 255))
def test_a_state_whose_bytes_were_flipped_is_one_line_and_no_traceback(
    saved: Path, tmp_path: Path, at: float, change: int
) -> None:
    """Where there are no checksums: it may still make sense, or it is refused."""
    body = bytearray((saved / "step-000010" / STATE).read_bytes())
    body[min(len(body) - 1, int(at * len(body)))] ^= change
    (tmp_path / "events.db").unlink(missing_ok=True)
    journal = DurableJournal(tmp_path / "events.db")
    with closing(journal), suppress(StaleFlowError):
        unpack_state(bytes(body), new_server(journal=journal), journal)


@pytest.mark.parametrize("file", ["model.safetensors", "optimiser.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", [truncate, empty, replace, Path.unlink], ids=lambda each: each.__name__)
def test_a_trainer_refuses_a_damaged_checkpoint_in_one_line(
    folder: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / "step-000010" / file)
    with pytest.raises(CheckpointError, match="is not a whole checkpoint for these options") as refusal:
        load(new_trainer(), folder / "step-000010")
    assert "\n" not in str(refusal.value)
