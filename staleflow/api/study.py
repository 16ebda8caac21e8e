"""``simulate``, ``compare`` and ``plan``: the commands of these names, with a configuration of this program.

row = simulate(load("paper-14b", ["staleness=1"]))
rows = compare(config, policies=["staleflow", "discard"], staleness=[1, 2], seeds=3)["rows"]
plan(config, gpus=32)["recommended"]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from staleflow.api.command import Command, caller_folder, configuration
from staleflow.config import Config, to_yaml

LOOK_S = 0.5


def simulate(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    policy: str = "staleflow",
    gpus: int | None = None,
    faults: int = 0,
    picture: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """One run under the virtual clock. None: the paper's 14B setting."""
    return _answer("simulate", config, policy=policy, gpus=gpus, faults=faults, picture=picture)


def compare(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    policies: str | Iterable[str] = "all",
    staleness: int | Iterable[int] | None = None,
    seeds: int = 3,
    gpus: int | None = None,
    tune_split: bool = False,
    faults: int = 0,
    jobs: int | None = None,
    picture: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Several policies on one simulated workload, paired by seed: ``rows`` has one for each policy and bound."""
    return _answer(
        "compare",
        config,
        policies=policies if isinstance(policies, str) else ",".join(policies),
        staleness=",".join(map(str, staleness)) if isinstance(staleness, Iterable) else staleness,
        seeds=seeds,
        gpus=gpus,
        tune_split=tune_split,
        faults=faults,
        jobs=jobs,
        picture=picture,
    )


def plan(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    model: str | os.PathLike[str] | None = None,
    most_staleness: int = 3,
    most_groups: int = 512,
    jobs: int | None = None,
    picture: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Which bound, batch, length cap and split to train with: ``recommended``; and whether ``train`` can: ``train``.

    ``run_dir``: a finished run, whose lengths and costs are taken. ``gpu``, ``model``: a kind of GPU and a model
    folder, from which costs and memory follow.
    """
    found = {"most_staleness": most_staleness, "most_groups": most_groups, "jobs": jobs, "picture": picture}
    found |= {"gpus": gpus, "nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": gpu, "model": model}
    return _answer("plan", config, run_dir=run_dir, **found)


def _answer(name: str, config: Config | str | os.PathLike[str] | None, **options: Any) -> dict[str, Any]:
    """What the command prints with ``--json``; ``StaleFlowError`` if it refuses."""
    words = [f"--{option.replace('_', '-')}" for option, value in options.items() if value is True]
    for option, value in options.items():
        if value is not None and not isinstance(value, bool):
            words += [
                f"--{option.replace('_', '-')}",
                os.fspath(value) if isinstance(value, os.PathLike) else str(value),
            ]
    with caller_folder() as folder:
        if (config := configuration(config)) is not None:
            file = folder / "config.yaml"
            Path(file).write_text(to_yaml(config), encoding="utf-8")
            words = [str(file), *words]
        with Command([name, *words, "--json"], folder, answer=True) as command:
            while command.running(LOOK_S):
                pass
            return json.loads(command.result()[1])
