"""Causes that were planted in simulated runs are found again, and every other question is answered from the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli import main
from staleflow.commands.why import lines, title
from staleflow.config import Config, load
from staleflow.config.presets import PAPER
from staleflow.errors import ConfigError
from staleflow.run.decisions import read_decisions
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_commits, read_events
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import setting_of
from staleflow.study.result import row
from staleflow.study.why import ask
from staleflow.study.why.instance import running
from staleflow.study.why.lives import Lives
from staleflow.study.why.pace import Observed, binds
from staleflow.study.why.question import Question, parse

SMALL = {"steps": 8, "groups": 16, "group_size": 4, "staleness": 1, "instances": 4, "training_gpus": 32}
EVEN = {"cluster.lengths": "uniform", "cluster.mean_tokens": 1000}


def recorded(
    path: Path, seed: int = 1, plant: Callable[[Cluster], None] = lambda _: None, **changes: Any
) -> tuple[RunDirectory, Config]:
    """A simulated run as a run directory. ``steps_asked``: more than are made."""
    asked = changes.pop("steps_asked", None)
    settings = SMALL | EVEN | changes
    config = load(PAPER, [f"{name}={value}" for name, value in settings.items()])
    cluster = Cluster(setting_of(config, PAPER), seed)
    plant(cluster)
    config = load(PAPER, [f"{name}={value}" for name, value in (settings | {"steps": asked or config.steps}).items()])
    recording = Recording(cluster, directory := RunDirectory.at(path, config))
    cluster.run()
    recording.close(row(cluster, 1.0))
    return directory, config


def slow_instance(cluster: Cluster) -> None:
    cluster.rollouts[2] = cluster.new_rollout("i2", speed=0.25)


# Why is it not faster


@pytest.mark.parametrize(
    ("cause", "changes", "help_named"),
    [
        ("training", {"training_gpus": 1, "staleness": 2}, "cluster.training_gpus="),
        ("rollout", {"instances": 1, "groups": 32, "staleness": 3, "cluster.mean_tokens": 1500}, "rollout.instances=2"),
        ("reward", {"cluster.mean_tokens": 500, "cluster.reward_s": 120}, "reward.workers=2"),
        ("tail", {"cluster.lengths": "powerlaw", "instances": 8}, "staleness=2"),
        ("bound", {"cluster.lengths": "constant", "staleness": 0, "training_gpus": 8}, "staleness=1"),
        ("instance", {"groups": 64, "staleness": 3, "instances": 3}, "rollout.instances"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_a_planted_cause_is_found(
    tmp_path: Path, cause: str, changes: dict[str, Any], help_named: str, seed: int
) -> None:
    plant = slow_instance if cause == "instance" else lambda _: None
    directory, config = recorded(tmp_path / "run", seed, plant, **changes)
    answer = ask(directory, config, "why is this run slow?")
    assert answer.facts["binds"] == cause, answer.sentence
    assert any(each["setting"].startswith(help_named) for each in answer.facts["helps"]), answer.facts["helps"]
    assert answer.facts["step_over_law"] >= 0.9, "nothing is faster than the law"
    assert ("i2 sets the pace" in answer.sentence) == (cause == "instance")
    json.dumps(answer.facts, allow_nan=False)


@pytest.mark.parametrize("migration", ["off", "gain"])
@pytest.mark.parametrize("seed", range(3, 8))
def test_a_slow_instance_is_blamed_where_the_run_is_slower_for_it(tmp_path: Path, seed: int, migration: str) -> None:
    """Where others can do its work, routing gives it little or none; the run then waits for something else."""
    asked: dict[str, Any] = {"strategies.migration": migration}
    planted, config = recorded(tmp_path / "slow", seed, slow_instance, **asked)
    healthy, _ = recorded(tmp_path / "healthy", seed, **asked)
    answer, without = ask(planted, config, ""), ask(healthy, config, "")
    slower = answer.facts["tokens_per_s"] < 0.85 * without.facts["tokens_per_s"]
    assert (answer.facts["binds"] == "instance") == slower, answer.sentence
    assert answer.facts["slowest_instance"]["name"] == "i2"
    assert answer.facts["slowest_instance"]["speed"] < 0.5
    assert "i2 sets the pace" in answer.sentence or "steps do not wait for it" in answer.sentence
    assert without.facts["binds"] != "instance"
    assert "do not wait for it" not in without.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"training_gpus": 1, "staleness": 2},
        {"cluster.lengths": "powerlaw", "instances": 8},
        {"cluster.lengths": "lognormal", "instances": 8, "staleness": 0},
        {"cluster.lengths": "constant", "staleness": 0, "training_gpus": 8},
        {"staleness": 0, "training_gpus": 8},
    ],
)
def test_what_is_advised_helps_by_about_what_is_promised(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory, config = recorded(tmp_path / "before", seed=2, **changes)
    best = ask(directory, config, "").facts["helps"][0]
    short = {"cluster.training_gpus": "training_gpus", "rollout.instances": "instances"}
    better = dict(changes)
    for word in str(best["setting"]).split():
        name, _, value = word.partition("=")
        better[short.get(name, name)] = value
    after, _ = recorded(tmp_path / "after", seed=2, **better)
    speeds = [json.loads(each.summary.read_text())["trained_tokens_per_s"] for each in (directory, after)]
    assert speeds[1] / speeds[0] == pytest.approx(1 + best["gain"], rel=0.25), best


def test_a_run_whose_instances_are_all_gone_has_an_answer() -> None:
    assert binds(Observed(step_s=1.0, train_s=0.1, full=0.9, instances=0)) == "rollout"


def test_a_run_of_one_step_is_too_young_to_say(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="too few steps"):
        ask(directory, config, "")


# Steps


def test_a_step_names_the_group_that_came_last_and_what_its_last_response_did(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run", plant=slow_instance)
    lives = Lives(read_events(directory))
    for step in range(2, 8):
        answer = ask(directory, config, f"why was step {step} waiting?")
        last = max(lives.of_step(step), key=lambda group: group.completed or 0.0)
        facts = answer.facts
        assert facts["committed_s"] - facts["opened_s"] == pytest.approx(
            facts["waited_for_groups_s"] + facts["after_the_last_group_s"], abs=0.01
        )
        if "last_group" in facts:
            assert facts["last_group"] == last.name
            assert last.name in answer.sentence
            assert sum(facts["last_response_spent_s"].values()) <= facts["waited_for_groups_s"] + 0.01
        assert facts["groups"] == config.groups


def test_the_open_step_names_the_groups_that_no_later_step_may_train(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run", steps=5, steps_asked=50, plant=slow_instance)
    with directory.owned():
        answer = ask(directory, config, "why is step 5 waiting")
    assert answer.facts["run_is_alive"]
    assert answer.facts["groups_in_flight"] > 0
    for name, state in answer.facts["waits_for"].items():
        assert name.startswith("p")
        assert any(word in state for word in ("decoding on i", "waits for an instance", "being scored"))
    assert "was open when the run ended" in ask(directory, config, "step").sentence
    with pytest.raises(ConfigError, match=r"step 9 is not in the record of .*: step 5 is open"):
        ask(directory, config, "step 9")


# Instances, trajectories, groups


def test_a_pull_is_explained_by_its_decision(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run")
    answer = ask(directory, config, "why did instance 3 pull?")
    pulls = [
        (each.time, command)
        for each in read_decisions(directory.decisions)
        for command in each.commands
        if command[:2] == ["Pull", "i3"]
    ]
    assert (answer.facts["pull"]["at_s"], answer.facts["pull"]["version"]) == (pulls[-1][0], pulls[-1][1][2])
    assert "greedy pulls every new version at once" in answer.sentence
    assert answer.facts["decided_on"]["newest"] == pulls[-1][1][2]
    with pytest.raises(ConfigError, match="instance i77 is not in the record"):
        ask(directory, config, "i77")


def without_moments_after(directory: RunDirectory, time: float) -> None:
    rows = [line for line in directory.fleet.read_text().splitlines() if json.loads(line)["time"] <= time]
    directory.fleet.write_text("".join(f"{line}\n" for line in rows))


def test_the_version_that_an_instance_held_is_not_that_of_a_moment_before_its_last_pull(tmp_path: Path) -> None:
    """It was said to have held version 5, while its own facts had the pull of version 6."""
    directory, config = recorded(tmp_path / "run")
    pulls = list(read_events(directory, about=["i3"], kinds=["pull"]))
    without_moments_after(directory, pulls[-2].time - 0.1)
    answer = ask(directory, config, "why did instance 3 pull?")
    assert answer.facts["pull"]["held"] == pulls[-2].event[2] > answer.facts["pull"]["before"]["version"]
    assert f"because it held version {pulls[-2].event[2]} and" in answer.sentence
    without_moments_after(directory, -1.0)
    answer = ask(directory, config, "why did instance 3 pull?")
    assert answer.facts["pull"]["before"] is None
    assert answer.facts["pull"]["held"] == pulls[-2].event[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_ran_when_an_instance_pulled_is_not_that_of_a_moment_before(tmp_path: Path, seed: int) -> None:
    """One that was busy was said to have had nothing to run, because it had nothing up to a second earlier."""
    asked: dict[str, Any] = {"strategies.synchronisation": "gain", "cluster.lengths": "lognormal", "staleness": 2}
    directory, config = recorded(tmp_path / "run", seed, **asked)
    rows = [each for each in read_decisions(directory.decisions) if any(what[0] == "Pull" for what in each.commands)]
    wrong = [
        (each.time, counted, there)
        for each in rows
        if (counted := sum(running(directory, config, f"i{at}", each.time) for at in range(4)))
        != (there := each.inputs["running"] + each.inputs["waiting"])
    ]
    assert len(rows) >= 8
    assert not wrong
    last = rows[-1]
    name = next(what[1] for what in last.commands if what[0] == "Pull")
    starves = "had nothing to run" in ask(directory, config, f"why did {name} pull").sentence
    assert starves == (running(directory, config, name, last.time) == 0)


def test_a_pull_beside_others_is_a_sentence_with_its_commas(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run", instances=2, training_gpus=32)
    sentences = [ask(directory, config, f"why did instance {at} pull").sentence for at in range(2)]
    assert any(", with 1 other instance, because it held version" in each for each in sentences)


def test_an_instance_that_died_says_so_and_what_it_ran_was_moved_for_that(tmp_path: Path) -> None:
    def plant(cluster: Cluster) -> None:
        def crash() -> None:
            cluster.loop.call_later(20.0, cluster.crash, cluster.rollouts[1], 1e6, False)

        cluster.on_start.append(crash)

    directory, config = recorded(tmp_path / "run", plant=plant)
    assert "i1 died or fell silent at" in ask(directory, config, "instance 1").sentence
    moved = [name for name, life in Lives(read_events(directory)).trajectories.items() if life.moves]
    answers = [ask(directory, config, f"why was {name} moved") for name in moved[:5]]
    assert any("because i1 died: it continued from its last streamed token" in each.sentence for each in answers)


def test_a_move_is_explained_by_its_decision(tmp_path: Path) -> None:
    changes = {"kv_tokens": 24_576, "group_size": 8, "cluster.lengths": "lognormal", "cluster.mean_tokens": 2500}
    directory, config = recorded(tmp_path / "run", steps=4, **changes)
    lives = Lives(read_events(directory)).trajectories
    moved = [name for name, life in lives.items() if life.moves][:6]
    assert moved, "nothing moved: the test does not test"
    for name in moved:
        answer = ask(directory, config, f"why was trajectory {name} moved")
        assert " was moved from i" in answer.sentence
        reason = answer.facts["reason"]
        assert reason in ("thrashing", "tail", "levelling")
        assert answer.facts["decided_on"]["migration"][reason] >= 1
    still = next(name for name, life in lives.items() if not life.moves)
    sentence = ask(directory, config, still).sentence
    assert f"{still} was not moved: " in sentence
    assert "0.00 s" not in sentence, "what takes no time is not worth a word"


def test_a_release_is_explained_by_its_reason(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run", **{"filter": "no-signal", "cluster.reward_success": 0.8})
    released = [event[1] for _, event in read_events(directory, kinds=["release"])]
    assert released, "nothing was released: the test does not test"
    answer = ask(directory, config, f"why was group {released[0]} released?")
    assert "all its rewards were equal" in answer.sentence
    assert answer.facts["reason"] == "no signal"
    trained = Lives(read_events(directory)).of_step(3)[0]
    answer = ask(directory, config, f"group {trained.name}")
    assert "step 3 trained it" in answer.sentence
    assert len(answer.facts["responses"]) == 4
    with pytest.raises(ConfigError, match="group p99999 is not in the record"):
        ask(directory, config, "group 99999")


# Questions


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("", Question("pace")),
        ("slow", Question("pace")),
        ("Why is this run slower than the law allows?", Question("pace")),
        ("step 12", Question("step", "12")),
        ("why is step 12 waiting", Question("step", "12")),
        ("what is the step waiting for", Question("step", "now")),
        ("instance 3", Question("instance", "i3")),
        ("why did i3 pull?", Question("instance", "i3")),
        ("why was trajectory p17/2 moved", Question("trajectory", "p17/2")),
        ("17.1/2", Question("trajectory", "p17.1/2")),
        ("why was group 17 released", Question("group", "p17")),
        ("p17.1", Question("group", "p17.1")),
    ],
)
def test_questions_are_read_leniently(text: str, question: Question) -> None:
    assert parse(text) == question


def test_what_is_not_a_question_is_refused_with_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = recorded(tmp_path / "run", steps=2)
    assert main(["why", str(directory.path), "what", "is", "love"]) == 2
    assert "'what is love' is not a question that can be answered: ask about" in capsys.readouterr().err
    assert main(["why", str(directory.path), "step", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["about"], said["facts"]["step"]) == ("step", 1)
    assert main(["why", str(directory.path)]) == 0
    assert " the pace" in capsys.readouterr().out


def test_commits_are_found_without_decoding_where_reading_everything_finds_them(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run", steps=8)
    decoded = [(each.event[1], each.time) for each in read_events(directory, kinds=["commit"])]
    assert [(each.step, each.time) for each in read_commits(directory)] == decoded
    assert len(decoded) == 8


def test_a_rate_is_not_told_as_a_time() -> None:
    facts = {"tokens_per_s": 2013.0, "trainer_idle_s": 0.5, "law": {"step_s": 2.0}}
    assert [" ".join(line.split()) for line in lines(facts)] == [
        "tokens a second 2,013",
        "trainer idle in a step 0.5 s",
        "law step 2 s",
    ]


def test_two_facts_do_not_have_one_label(tmp_path: Path) -> None:
    """Two lines said "trainer idle": seconds of a step, and a share."""
    directory, config = recorded(tmp_path / "run", steps=4)
    facts = ask(directory, config, "").facts
    labels = [title(name) for name in facts]
    assert len(labels) == len(set(labels))
    said = [" ".join(line.split()) for line in lines(facts)]
    assert any(each.startswith("trainer idle in a step ") and each.endswith(" s") for each in said)
    assert any(each.startswith("trainer idle, share of the time 0") for each in said)


def test_counts_by_version_say_which_is_the_version() -> None:
    """They were "room 6 11, 7 43"."""
    facts = {"decided_on": {"room": {"6": 11, "7": 43}, "versions": {"6": 2}, "pace": {"step_s": 2.0}}}
    assert [" ".join(line.split()) for line in lines(facts)] == [
        "decided on",
        "room for groups, by version 6: 11, 7: 43",
        "instances, by version 6: 2",
        "pace step 2 s",
    ]


def test_a_trainer_that_works_most_of_the_time_is_what_is_waited_for() -> None:
    """A run whose trainer worked for 84 % of every step was said to be bound by its tail."""
    assert binds(Observed(step_s=2.96, train_s=2.48, longest=85.3, mean=23.3)) == "training"
    assert binds(Observed(step_s=2.96, train_s=2.07, longest=85.3, mean=23.3)) == "tail"
