"""A damaged journal is refused in one line, or gives back the state after a whole prefix of events; nothing else."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.servers.database import JournalError
from staleflow.servers.payload_files import FileRange, PayloadFiles
from staleflow.types import Chunk
from tests.servers.random_server import image
from tests.servers.test_durable import Pictured, random_journal, reopened


@pytest.fixture(scope="module", params=[10**9, 25], ids=["no snapshots", "many snapshots"])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pictured:
    journal, _ = random_journal(tmp_path_factory.mktemp("journal") / "events.db", 3, 200, request.param)
    journal.close()
    return journal


def damaged(written: Pictured, file: Path, body: bytes) -> None:
    """Reads the journal with another content of one of its files."""
    folder = written.path.parent.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written.path.parent, folder)
    (folder / file.relative_to(written.path.parent)).write_bytes(body)
    try:
        journal, server = reopened(folder / written.path.name)
    except JournalError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert image(server) in written.images.values()
    journal.close()


def files(written: Pictured) -> list[Path]:
    return sorted(each for each in written.path.parent.rglob("*") if each.is_file() and each.suffix in (".db", ".bin"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_give_a_traceback_or_another_state(
    written: Pictured, which: int, places: list[tuple[float, int]]
) -> None:
    file = files(written)[which % len(files(written))]
    body = bytearray(file.read_bytes())
    for at, change in places:
        body[min(len(body) - 1, int(at * len(body)))] ^= change
    damaged(written, file, bytes(body))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.floats(0, 1))
def test_a_file_that_was_cut_never_gives_a_traceback_or_another_state(written: Pictured, which: int, at: float) -> None:
    file = files(written)[which % len(files(written))]
    damaged(written, file, file.read_bytes()[: int(at * file.stat().st_size)])


def test_damage_that_sqlite_quotes_in_its_message_is_one_line(written: Pictured) -> None:
    """The first page holds the text of the tables' definitions; its message about bad ones has those bytes in it."""
    body = written.path.read_bytes()
    for at in range(body.index(b"CREATE"), 4096):
        damaged(written, written.path, body[:at] + bytes([body[at] ^ 128]) + body[at + 1 :])


@pytest.mark.parametrize("change", ["start=-5", "size=-2", "size=1<<60", "start=1<<62", "file=-1", "size=0, crc=0"])
def test_a_place_of_payload_that_cannot_be_is_one_line_and_not_an_error_of_the_file(
    written: Pictured, change: str
) -> None:
    folder = written.path.parent.with_name("displaced")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written.path.parent, folder)
    with closing(sqlite3.connect(folder / written.path.name, isolation_level=None)) as db:
        db.execute(f"UPDATE payload SET {change}")
    with pytest.raises(JournalError, match=r"^[^\n]*damaged[^\n]*$"):
        reopened(folder / written.path.name)


@pytest.mark.parametrize(("offset", "size"), [(0, -5), (-5, 5), (0, 2**62), (2**62, 5), (1, 0)])
def test_a_range_outside_of_its_file_is_damage_and_not_a_traceback(tmp_path: Path, offset: int, size: int) -> None:
    files = PayloadFiles(tmp_path, ())
    place = files.write([("p0/0", Chunk.of(0, [1, 2], [-0.1, -0.2]))])
    assert files.read(place) is not None
    assert files.read(FileRange(place.file, offset, size, place.crc)) is None
    files.close()


@pytest.mark.slow
def test_thousands_of_flipped_bits(written: Pictured) -> None:
    random = Random(0)
    for _ in range(2000):
        file = random.choice(files(written))
        body = bytearray(file.read_bytes())
        for _ in range(random.choice((1, 1, 4))):
            body[random.randrange(len(body))] ^= 1 << random.randrange(8)
        damaged(written, file, bytes(body))
