"""Episodes in the trajectory server: whatever environments and instances do, a replay gives the same state."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from staleflow.protocol import StalenessLedger
from staleflow.servers.durable import DurableJournal
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.made import rows_of
from staleflow.servers.payloads import BadReportError, Chunk, Payloads
from staleflow.servers.state import recover, restore, to_state
from staleflow.types import GIVEN
from tests.servers.random_episodes import LIMITS, RandomEpisodes, new_server
from tests.servers.random_server import SOURCE, image
from tests.servers.small_server import state_of


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_and_a_snapshot_of_episodes_give_the_same_state(seed: int) -> None:
    journal = MemoryJournal()
    server = new_server(journal)
    acts = RandomEpisodes(server, Random(seed))
    for _ in range(1500):
        acts.act()
    assert len(acts.trained) > 8
    assert any("~" in name for name in acts.trained)
    again = EpisodeServer(StalenessLedger(2, 1, 1), 2, 1, MemoryJournal())
    again.keeps_steps = True
    again.replay(journal.events)
    assert state_of(again) == state_of(server)
    copy = EpisodeServer(StalenessLedger(2, 1, 1), 2, 1, MemoryJournal())
    restore(copy, to_state(server))
    assert in_order(copy) == in_order(server)


def in_order(server: EpisodeServer) -> dict[str, Any]:
    """A snapshot has groups in the order of their admission, and branches with their group."""
    state = state_of(server)
    trajectories = sorted(state["trajectories"], key=lambda each: each[0])
    return state | {"trajectories": trajectories, "fresh": sorted(state["fresh"])}


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_loses_no_token_of_an_episode_that_began_anew(seed: int, tmp_path: Path) -> None:
    """Its name has chunks of two tries on disk, and maybe in one transaction."""
    path = tmp_path / "journal"
    journal = DurableJournal(path, threaded=False, snapshot_events=300)
    server = new_server(journal)
    recover(server, journal)
    random = Random(seed)
    acts = RandomEpisodes(server, random)
    for _ in range(5):
        for _ in range(random.randrange(40, 200)):
            acts.act()
            if random.random() < 0.2:
                journal.commit()
        before = image(server)
        groups = {step: server.made[step] for step in server.made}
        journal.close()
        journal = DurableJournal(path, threaded=False, snapshot_events=300)
        server = new_server(journal)
        recover(server, journal)
        assert image(server) == before
        for step in groups.values():
            assert all(row.made for group in rows_of(step, journal) for row in group)
        acts.server = server
    journal.close()


def played() -> EpisodeServer:
    server = EpisodeServer(StalenessLedger(1, 1), 1, 0, MemoryJournal(), Payloads(LIMITS))
    server.admit(SOURCE)
    server.given("p0/0", 0, [7, 8], until=3)
    server.place("p0/0", "i0", 0)
    server.turned("p0/0", 2, ((GIVEN, 2), (0, 2)), Chunk.of(2, [11, 12], [-0.5, -0.25]), "stop")
    return server


def test_a_group_is_hidden_from_the_coordinator_until_its_environment_asks_for_a_turn() -> None:
    server = EpisodeServer(StalenessLedger(1, 1), 2, 0, MemoryJournal(), Payloads(LIMITS))
    server.admit(SOURCE)
    assert server.fresh == 1
    assert not server.waiting
    server.given("p0/1", 0, [7], until=3)
    assert [group.name for group in server.queue(9)[1]] == ["p0"]
    assert server.place("p0/0", "i0", 0) is None
    assert server.place("p0/1", "i0", 0) is not None
    assert not server.waiting
    server.given("p0/0", 0, [7], until=3)
    assert server.resuming == ["p0/0"]


def test_a_turn_continues_with_all_tokens_so_far() -> None:
    server = played()
    each = server.given("p0/0", 4, [9], until=5)
    assert each is not None
    server.place("p0/0", "i1", 0)
    work = server.work(each)
    assert (work.prompt_tokens, work.spans, work.limit) == (3, ((GIVEN, 2), (0, 2), (GIVEN, 1)), 5)
    assert np.frombuffer(work.tokens, "<i4").tolist() == [7, 8, 11, 12, 9]
    assert np.frombuffer(work.logprobs, "<f4").tolist() == [0, 0, -0.5, -0.25, 0]


def test_no_instance_may_give_tokens_to_itself() -> None:
    server = played()
    server.given("p0/0", 4, [9], until=5)
    server.place("p0/0", "i1", 0)
    with pytest.raises(BadReportError, match="reports 4 given tokens, 3 were given"):
        server.stream("p0/0", 4, ((GIVEN, 2), (0, 2), (GIVEN, 2)), Chunk.of(5, [9], [0]))


def test_the_oldest_version_of_a_group_is_that_of_a_made_token() -> None:
    server = played()
    group = server.groups["p0"]
    assert group.version == 0
    server.ended("p0/0", 1.0)
    assert group.complete
    (row,) = server.rows([group])
    assert (row.episode, row.masked, row.made) == ("p0/0", False, 2)


def test_a_made_token_is_trained_in_one_branch_only() -> None:
    server = played()
    branch = server.branch("p0/0", 3 + 3)
    assert branch.spans == ((GIVEN, 3),)
    server.given("p0/0~1", 3, [5], until=1)
    server.place("p0/0~1", "i0", 0)
    server.turned("p0/0~1", 2, ((GIVEN, 4), (0, 1)), Chunk.of(4, [6], [-1]), "length")
    server.branch("p0/0", 1)  # never asked for a turn: nothing to train
    server.ended("p0/0", 0.5, masked=True)
    rows = server.rows(server.groups.values())
    assert [(row.name, row.episode, row.made, row.masked) for row in rows] == [
        ("p0/0", "p0/0", 2, True),
        ("p0/0~1", "p0/0", 1, True),
    ]
    assert rows[1].tokens.tolist() == [7, 8, 11, 5, 6]


def test_a_branch_that_differs_within_the_prompt_has_a_shorter_prompt() -> None:
    server = played()
    server.branch("p0/0", 2)
    each = server.given("p0/0~1", 0, [4], until=1)
    assert each is not None
    work = server.work(each)
    assert (work.prompt_tokens, work.group, len(work.prompt)) == (2, "p0/0~1", 8)
    deeper = server.branch("p0/0~1", 3)
    assert (deeper.prompt_tokens, deeper.spans) == (2, ((GIVEN, 1),))
