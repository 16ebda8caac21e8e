"""Plays tasksets of the package ``verifiers`` (0.4, its ``v1``) with their own harness and scoring. ::

    data: {source: "staleflow.agents.verifiers:problems", arguments: {env: {taskset: {id: my_taskset}}}, chat: true}
    environment: {play: verifiers, arguments: {env: {taskset: {id: my_taskset}}}}

``env`` is what verifiers calls the ``[env]`` block of a run. The rows name tasks by their place in the taskset. Its
agent calls the model under the key of the episode. An episode that is not ``ok`` has failed; what a limit of verifiers
ended is truncated.
"""

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from itertools import islice
from typing import Any

from staleflow.agents.client import Model
from staleflow.agents.outcome import Outcome, failed, scored, truncated
from staleflow.agents.play import Limits, in_thread
from staleflow.tasks.task import Problem

PLACE = "verifiers_task"
_kept = AsyncExitStack()
"""What environments of this worker serve, until it ends."""
_served: dict[str, Any] = {}


def problems(env: dict[str, Any], most: int = 1000) -> Iterator[dict[str, Any]]:
    """Rows for ``data.source``."""
    for at, task in enumerate(islice(_loaded(repr(env)).taskset, most)):
        data = task.data
        said = data.prompt if isinstance(data.prompt, str) else [each.model_dump() for each in data.prompt or ()]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        yield {"prompt": [*system, *messages], "answer": None, PLACE: at}


async def play(task: Problem, model: Model, limits: Limits, env: dict[str, Any]) -> Outcome:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    key = f"STALEFLOW_KEY_{abs(hash(model.api_key)):x}"
    os.environ[key] = model.api_key  # verifiers reads keys from there
    try:
        async with limits.setup():
            environment = await _serving(repr(env))
            asked = (await in_thread(_tasks, repr(env)))[task.facts[PLACE]]
        async with limits.agent():
            client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=key)
            episode = await environment.run_episode(asked, vf.ModelContext(model.name, client))
    finally:
        del os.environ[key]
    if not episode.ok:
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        return failed("; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode is not ok")
    reward = sum(trace.reward for trace in episode.traces)
    if any(trace.is_truncated for trace in episode.traces):
        return truncated(reward, next(str(t.stop_condition) for t in episode.traces if t.is_truncated))
    return scored(reward, {name: each.value for t in episode.traces for name, each in t.rewards.items() if each})


@cache
def _loaded(env: str) -> Any:
    import ast

    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    return vf.load_environment(vf.resolve_env_config(ast.literal_eval(env)))


@cache
def _tasks(env: str) -> list[Any]:
    return list(islice(_loaded(env).taskset, 1_000_000))


async def _serving(env: str) -> Any:
    if env not in _served:
        _served[env] = _loaded(env)
        await _kept.enter_async_context(_served[env].serving())
    return _served[env]
