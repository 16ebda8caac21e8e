"""What a run keeps of its responses: some of every step, the worst and the best among them, in bounded space."""

import errno
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.cli import main
from staleflow.config import load, to_yaml
from staleflow.run.samples import MOST_TEXT, Sample, Samples, read_samples
from staleflow.run.signals import RECENT, Signals
from tests.refusals import refused_command


def group(number: int, rewards: list[float], state: str = "consumed") -> Any:
    found: Any = SimpleNamespace(prompt=number, members=[])
    for at, reward in enumerate(rewards):
        name = f"p{number}/{at}"
        found.members.append(
            SimpleNamespace(name=name, group=found, state=state, reward=reward, generated=3, spans=[(number, 3)])
        )
    return found


def samples(path: Path, count: int = 4, names: tuple[str, ...] = ("one",), **more: Any) -> tuple[Samples, list[str]]:
    task: Any = SimpleNamespace(
        prompts=SimpleNamespace(problem=lambda number: SimpleNamespace(prompt=f"prompt {number}")),
        decode=lambda ids: " ".join(map(str, ids)),
    )
    trouble: list[str] = []
    return Samples(path, task, count, names, lambda ids: ids[-4:] == b"\7\0\0\0", trouble.append, **more), trouble


def tokens(*ids: int) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.integers(0, 8))
def test_of_each_step_the_worst_and_the_best_are_kept_and_never_more_than_asked_for(
    rewards: list[float], count: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        under_test, _ = samples(path, count)
        one = group(0, rewards)
        for member in one.members:
            under_test.scored(member.name, (), tokens(1, 2, 3))
        under_test.committed(5, [one])
        kept = list(read_samples(path))
    assert len(kept) == min(count, len(rewards))
    assert len({each.name for each in kept}) == len(kept)
    if count >= 2:
        assert (kept[0].reward, kept[-1].reward) == (min(rewards), max(rewards))


def test_a_line_has_what_a_person_wants_to_know_and_metrics_the_shares(tmp_path: Path) -> None:
    under_test, _ = samples(tmp_path / "samples.jsonl", names=("correct", "brief"))
    one = group(3, [1.5, 0.5])
    under_test.scored("p3/0", (1.0, 0.5), tokens(4, 5, 6))
    under_test.scored("p3/1", (0.0, 0.5), tokens(4, 5, 7))
    facts = under_test.committed(9, [one])
    assert facts["cut"] == 0.5
    assert (facts["reward/correct"], facts["reward/brief"]) == (0.5, 0.5)
    assert (facts["reward_min"], facts["reward_max"], facts["reward_std"], facts["response_tokens"]) == (
        0.5,
        1.5,
        0.5,
        3,
    )
    worst, best = read_samples(tmp_path / "samples.jsonl")
    rewards = {"correct": 1.0, "brief": 0.5}
    assert best == Sample(9, "p3/0", "prompt 3", "4 5 6", 1.5, rewards, ((3, 3),), 3, cut=False, ends=(5,))
    assert worst.cut


def test_what_is_given_up_or_of_an_earlier_attempt_is_not_kept(tmp_path: Path) -> None:
    under_test, _ = samples(tmp_path / "samples.jsonl")
    under_test.scored("p0/0", (), tokens(1))
    under_test.forget("p0/0")
    under_test.forget("p9/9")
    facts = under_test.committed(0, [group(0, [1.0])])
    assert "cut" not in facts
    assert under_test.committed(1, []) == {}
    assert not list(read_samples(tmp_path / "samples.jsonl"))
    assert under_test._scored == {}


def test_space_is_bounded_and_texts_are(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    under_test, _ = samples(path, most_bytes=20_000)
    for step in range(60):
        under_test.scored(f"p{step}/0", (), tokens(*[1] * 2000))
        under_test.committed(step, [group(step, [1.0])])
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 40_000
    steps = [each.step for each in read_samples(path)]
    assert steps == list(range(steps[0], 60))
    under_test.scored("p0/0", (), tokens(*[1] * MOST_TEXT))
    under_test.committed(60, [group(0, [1.0])])
    assert len(list(read_samples(path))[-1].response) < MOST_TEXT + 40


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 3, "na')
    under_test, _ = samples(path)
    for step in range(2):
        under_test.scored("p0/0", (), tokens(1))
        under_test.committed(step, [group(0, [1.0])])
    assert [each.step for each in read_samples(path)] == [0, 1]


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_samples_of_steps_that_are_made_again_are_there_once(tmp_path: Path, first: int) -> None:
    path = tmp_path / "samples.jsonl"
    for begin in (0, first):  # an attempt, and the one that continues from a checkpoint before its end
        under_test, _ = samples(path, first=begin)
        for step in range(begin, 3):
            under_test.scored("p0/0", (), tokens(1))
            under_test.committed(step, [group(0, [1.0])])
    assert [each.step for each in read_samples(path)] == [0, 1, 2]


def test_a_full_disk_costs_samples_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_test, trouble = samples(tmp_path / "samples.jsonl")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in range(4):
        with monkeypatch.context() as patched:
            if step in (1, 2):
                patched.setattr(Path, "open", full)
            under_test.scored("p0/0", (), tokens(1))
            assert under_test.committed(step, [group(0, [1.0])])["cut"] == 0
    assert len(trouble) == 1, "said once"
    assert [each.step for each in read_samples(tmp_path / "samples.jsonl")] == [0, 3]


def test_warnings_name_the_setting_and_come_once() -> None:
    signals = Signals(load(None, ["rollout.max_tokens=48"]))
    for _ in range(RECENT - 1):
        signals.add(0.8, 1.0)
    assert list(signals.warnings()) == []
    signals.add(0.8, 1.0)
    cut, without = signals.warnings()
    assert cut.startswith("80% of responses are cut at rollout.max_tokens=48")
    assert "filter=no-signal" in without
    assert list(signals.warnings()) == []
    assert (signals.cut, signals.without_signal) == (0.8, 1.0)
    assert list(Signals(load(None)).warnings()) == []


def test_a_filter_that_keeps_nothing_is_told_once_and_again_only_after_it_kept_something() -> None:
    told: list[str] = []
    config = load(None, ["groups=2", "filter=no-signal"])
    verdicts = iter(["old"] * (2 * RECENT + 3) + [None] + ["old"] * (2 * RECENT - 1) + [None])
    judge = Signals(config).counted(lambda _: next(verdicts), told.append)
    kept = [judge(group(0, [1.0])) for _ in range(4 * RECENT + 4)]
    assert kept.count(None) == 2
    assert told == [
        f"filter=no-signal has replaced the last {2 * RECENT} groups, all of them (old): no step is made until it "
        "keeps some; look at the rewards, or set filter=none"
    ]


# staleflow samples


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(to_yaml(load(None)))
    under_test, _ = samples(tmp_path / "samples.jsonl")
    for step, rewards in enumerate([[0.0], [0.1, 0.9, 0.5, 0.3]]):
        one = group(step, rewards)
        for member in one.members:
            under_test.scored(member.name, (), tokens(1, 2, 7))
        under_test.committed(step, [one])
    return tmp_path


def test_worst_and_best_come_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reward"] for row in rows] == [0.1, 0.9, 0.3, 0.5]
    assert main(["samples", str(run), "--all", "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert "step 0  p0/0  reward 0  3 tokens (3 of version 0)  CUT\n> prompt 0\n  1 2 7" in shown
    assert "reward 0.9" in shown
    assert shown.count("> prompt") == 2


def test_what_cannot_be_shown_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one of 0 to 1" in refused_command(capsys, "samples", str(run), "--step", "7")
    assert "give 1 or more" in refused_command(capsys, "samples", str(run), "--count", "0")
    assert "leave one out" in refused_command(capsys, "samples", str(run), "--all", "--step", "1")
    assert "staleflow runs lists what is here" in refused_command(capsys, "samples", str(run / "nowhere"))
    (run / "samples.jsonl").unlink()
    assert "has no samples" in refused_command(capsys, "samples", str(run))
