"""Turns in step, as ``bench/agents_policies.py`` simulates them: what it compares with is what it says."""

from dataclasses import replace

from bench.agents_policies import GPUS, IN_STEP, InStep, InStepCluster, policy_of, with_split
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.setting import Setting, preset

TURNS = 3


def setting() -> Setting:
    base = preset("paper-14b", "groups=2", "group_size=3", "steps=3", "rollout.instances=2")
    return with_split(replace(base, turns=TURNS, tool_s=30.0, tool_tokens=50), 0, 2)


class Noted(InStep):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.wanted: dict[str, int] = {}
        """By episode that is played: the latest turn that it has asked for."""
        self.begun: list[int] = []

    def left(self, episode: str) -> None:
        self.wanted.pop(episode, None)
        super().left(episode)

    async def before_turn(self, episode: str, turn: int) -> None:
        self.wanted[episode] = turn
        await super().before_turn(episode, turn)
        assert min(self.wanted.values()) == turn, "somebody has not ended the turn before"
        self.begun.append(turn)


class NotedCluster(InStepCluster):
    environments_kind = Noted


def test_nobody_begins_a_turn_before_all_have_ended_the_one_before() -> None:
    policy = policy_of(IN_STEP)
    noted = NotedCluster(policy.fit(setting()), 1, policy=policy)
    noted.run()
    assert isinstance(noted.environments, Noted)
    assert noted.environments.begun == [turn for _ in range(3) for turn in range(TURNS) for _ in range(2 * 3)]
    free = Cluster(policy.fit(setting()), 1, policy=policy)
    free.run()
    assert noted.recorder.trained_tokens == free.recorder.trained_tokens
    assert noted.loop.time() > free.loop.time()


def test_every_split_has_all_gpus() -> None:
    assert with_split(setting(), 1, 3).gpus == GPUS
