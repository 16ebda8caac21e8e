"""What an attempt at a run continues from."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.config import Config, load
from staleflow.errors import RunError
from staleflow.run import opening
from staleflow.run.directory import RunDirectory
from staleflow.run.opening import Opened
from staleflow.run.state import STATE, pack_state
from tests.servers.random_server import LIMITS, RandomActs, image

TASK: Any = SimpleNamespace(max_prompt_tokens=LIMITS.max_prompt_tokens, vocab_size=LIMITS.vocab_size)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(opening, "left_behind", lambda _: -1)
    return RunDirectory.create(configured(tmp_path), "test")


def configured(runs: Path) -> Config:
    sizes = ["groups=2", "group_size=2", "extra_members=1", "staleness=1", f"rollout.max_tokens={LIMITS.max_tokens}"]
    return load(None, [f"runs={runs}", *sizes])


def opened(run: RunDirectory, checkpoint: Path | None = None) -> Opened:
    return opening.open_state(configured(run.path.parent), run, TASK, checkpoint)


class Acts(RandomActs):
    def forget(self) -> None:
        """Only where a test does."""


def used(attempt: Opened, version: int) -> Opened:
    """Until it has come to this version."""
    acts = Acts(attempt.server, Random(version))
    while attempt.server.ledger.version < version:
        acts.act()
    return attempt


def saved(run: RunDirectory, attempt: Opened) -> Path:
    """A checkpoint of where the attempt is, as far as the state goes."""
    folder = run.checkpoint(attempt.server.ledger.version)
    folder.mkdir()
    (folder / STATE).write_bytes(pack_state(attempt.server, attempt.kept.record))
    return folder


def test_attempts_are_counted_and_continue_where_the_one_before_was(run: RunDirectory) -> None:
    first = used(opened(run), 3)
    before = image(first.server)
    first.journal.close()
    assert (first.attempt, first.how) == (1, "")
    second = opened(run)
    assert second.attempt == second.kept.record.lives == 2
    assert image(second.server) == before
    second.journal.close()
    third = opened(run)
    assert third.attempt == 3
    third.journal.close()
    assert run.journals == [1]


def test_the_line_says_what_is_made_again_and_from_where(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = used(opened(run), 5)
    checkpoint = saved(run, first)
    first.server.forget(5)
    at_5 = lines(run, first, checkpoint)
    assert at_5 == "continues at version 5, from checkpoint step-000005 and the journal: no step is made again"
    then = used(opened(run, checkpoint), 7)
    again = lines(run, then, checkpoint)
    assert again == (
        "continues at version 7, from the journal: steps 5 to 6 are made again, without decoding, from checkpoint "
        "step-000005"
    )
    monkeypatch.setattr(opening, "left_behind", lambda _: 7)
    memory = opened(run, checkpoint)
    assert memory.standby
    assert "from shared memory and the journal: no step is made again" in memory.how
    memory.journal.close()


def lines(run: RunDirectory, attempt: Opened, checkpoint: Path | None) -> str:
    attempt.journal.close()
    again = opened(run, checkpoint)
    again.journal.close()
    return again.how


def test_a_journal_that_lacks_a_step_is_left_for_the_checkpoint(run: RunDirectory) -> None:
    first = used(opened(run), 2)
    checkpoint, before = saved(run, first), image_without_made(first)
    used(first, 4)
    first.server.forget(4)
    used(first, 5)
    first.journal.close()
    rewound = opened(run, checkpoint)
    assert rewound.how.startswith("continues from checkpoint step-000002 alone, and makes the steps after it anew: ")
    assert rewound.how.endswith("ends at version 5 and lacks step 2")
    assert image_without_made(rewound) == before
    assert run.journals == [2], "the one before it is gone"
    assert rewound.attempt == 2
    used(rewound, 3)
    rewound.journal.close()
    third = opened(run, checkpoint)
    assert third.attempt == 3
    assert "step 2 is made again" in third.how
    third.journal.close()


def test_without_a_checkpoint_a_journal_that_lacks_steps_is_one_line(run: RunDirectory) -> None:
    first = used(opened(run), 3)
    first.server.forget(3)
    first.journal.close()
    with pytest.raises(RunError, match=r"has no checkpoint to resume from, and the journal .* ends at version 3 and"):
        opened(run)


def test_a_journal_whose_events_do_not_follow_from_each_other_is_left_for_the_checkpoint(run: RunDirectory) -> None:
    first = used(opened(run), 2)
    checkpoint = saved(run, first)
    first.journal.append(("reserve", "p0", 7))
    first.journal.close()
    again = opened(run, checkpoint)
    assert again.how.startswith("continues from checkpoint step-000002 alone")
    assert "does not fit together" in again.how
    again.journal.close()


def test_a_journal_that_somebody_holds_is_never_thrown_away(run: RunDirectory) -> None:
    first = used(opened(run), 2)
    checkpoint = saved(run, first)
    with pytest.raises(RunError, match="which is running: stop it"):
        opened(run, checkpoint)
    assert run.journals == [1]
    first.journal.close()


def image_without_made(attempt: Opened) -> str:
    made, attempt.server.made = attempt.server.made, {}
    found = image(attempt.server)
    attempt.server.made = made
    return found
