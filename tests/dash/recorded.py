"""A small simulated run, recorded; with texts, since the simulator has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.run.directory import RunDirectory
from staleflow.run.samples import Sample
from staleflow.simulate import faults
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import setting_of

STEPS, GROUPS, SIZE = 3, 6, 4


def cluster_of(seed: int, broken: int = 0) -> Cluster:
    base = setting_of(load(PAPER, []), PAPER)
    setting = replace(base, steps=STEPS, instances=4, groups=GROUPS, group_size=SIZE, staleness=1)
    cluster = Cluster(setting, seed)
    if broken:
        faults.arm(cluster, broken)
    return cluster


def recorded(path: Path, seed: int = 1, broken: int = 0) -> tuple[RunDirectory, Cluster]:
    cluster = cluster_of(seed, broken)
    directory = RunDirectory.at(path, load(PAPER, [f"steps={STEPS}"]))
    recording = Recording(cluster, directory)
    cluster.run()
    recording.close({})
    return directory, cluster


def sample(step: int, name: str, prompt: str, response: str) -> Sample:
    rewards, ends = {"exact": 0.0, "form": 1.0}, (len(response) // 2, len(response))
    versions = (max(0, step - 2), 3), (max(0, step - 1), 4)
    return Sample(step, name, prompt, response, 0.5, rewards, versions, 7, False, ends)


def write_samples(directory: RunDirectory, samples: list[Sample]) -> None:
    with directory.samples.open("ab") as file:
        file.write(msgspec.json.Encoder().encode_lines(samples))
