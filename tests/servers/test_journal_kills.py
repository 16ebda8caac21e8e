"""The owner of the journal is killed, in the middle of anything: nothing that was acknowledged is lost."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import Event
from staleflow.servers.payloads import Chunk
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from tests.servers.random_server import RandomActs, image, new_server

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")


class Talking(DurableJournal):
    """Says what the server looks like after each event, before that event can be durable; and what is durable."""

    server: TrajectoryServer
    pipe: Connection
    speech: threading.Lock

    def say(self, position: int, seen: str | None) -> None:
        with self.speech:
            self.pipe.send((position, seen))

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        self.say(self.position + 1, image(self.server))
        super().append(event, kept, dropped)


def own(path: Path, seed: int, pipe: Connection) -> None:
    """Live until killed."""
    journal = Talking(path, snapshot_events=150)
    journal.pipe, journal.speech, journal.server = pipe, threading.Lock(), new_server(journal)
    recover(journal.server, journal)
    journal.on_durable = lambda: journal.say(journal.durable, None)
    acts = RandomActs(journal.server, Random(seed))
    while True:
        acts.act()


def kill_once(path: Path, seed: int, images: dict[int, str]) -> int:
    """Start an owner and kill it. Returns how far the next one found the journal."""
    random = Random(seed)
    ours, theirs = FORK.Pipe()
    owner = FORK.Process(target=own, args=(path, seed, theirs), daemon=True)
    owner.start()
    theirs.close()
    acknowledged, patience = 0, random.randrange(1, 400)
    try:
        while True:
            position, seen = ours.recv()
            if seen is None:
                acknowledged = max(acknowledged, position)
            else:
                images[position] = seen
            patience -= 1
            if patience == 0:
                assert owner.pid is not None
                os.kill(owner.pid, signal.SIGKILL)
    except EOFError:  # everything that it had said before it died has been read
        owner.join()
    assert owner.exitcode == -signal.SIGKILL
    journal = DurableJournal(path, threaded=False)
    server = new_server(journal)
    recover(server, journal)
    assert journal.durable >= acknowledged, "an acknowledged event was lost"
    assert image(server) == images[journal.durable], "the state is that of no prefix"
    for later in [position for position in images if position > journal.durable]:
        del images[later]
    journal.close()
    return journal.durable


def kill_often(path: Path, kills: int, first_seed: int) -> None:
    empty = DurableJournal(path.with_name("empty.db"), threaded=False)
    images = {0: image(new_server(empty))}
    empty.close()
    found = [kill_once(path, first_seed + kill, images) for kill in range(kills)]
    assert found == sorted(found), "a later owner knew less than an earlier one"
    assert found[-1] > 10 * kills, "the owners were killed before they had done anything"


def test_nothing_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    kill_often(tmp_path / "journal.db", 25, first_seed=0)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_by_two_hundred_kills(tmp_path: Path) -> None:
    kill_often(tmp_path / "journal.db", 200, first_seed=1_000)
