"""What must hold after every instant of a simulated run, recomputed from the outside.

    watch(cluster)            # before cluster.run()

Cheap checks run after every instant; those that look at every trajectory after every ``every``-th, and at the end.
"""

from staleflow.protocol import StalenessLedger
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.disk import FAULT


class BrokenInvariantError(AssertionError):
    """An invariant does not hold; the message says which one and when."""


def watch(cluster: Cluster, every: int = 64) -> None:
    """Check the cluster after every instant of its run."""
    versions: dict[tuple[str, int], int] = {}
    progress = Progress(cluster)

    def check() -> None:
        _check_training(cluster)
        progress.check()
        if cluster.loop.instants % every == 0:
            check_all(cluster, versions)

    cluster.loop.on_instant = check
    cluster.on_end.append(lambda: check_all(cluster, versions))
    cluster.on_end.append(lambda: _check_end(cluster))


class Progress:
    """No version takes longer than the run may stand still, whatever else happens meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._version, self._since = 0, 0.0

    def check(self) -> None:
        cluster, version, now = self._cluster, self._cluster.weights.version, self._cluster.loop.now
        if version > self._version:
            self._version, self._since = version, now
        elif now - self._since > cluster.standstill_s:
            waits = "the control plane is down" if cluster.down else cluster.control.watch.stalled()
            raise _broken(cluster, f"no version was made for {now - self._since:.0f} s: {waits}")


def check_all(cluster: Cluster, versions: dict[tuple[str, int], int] | None = None) -> None:
    _check_instances(cluster, versions if versions is not None else {})
    _check_tokens(cluster)
    _check_groups(cluster)


def _check_end(cluster: Cluster) -> None:
    """Every step was made, and nothing is admitted, routed or reported after the last version: a checkpoint holds that
    moment. Only a control plane that takes over may note then who is there."""
    made, wanted = len(cluster.recorder.steps), cluster.setting.steps
    if made != wanted or cluster.weights.version != wanted:
        raise _broken(cluster, f"the run ended with {made} steps and version {cluster.weights.version} of {wanted}")
    allowed = (FAULT, "join") if cluster.control.term > 1 else (FAULT,)
    kinds = [event[0] for event in cluster.journal.events if event[0] not in allowed]
    if late := kinds[::-1][: kinds[::-1].index("commit")] if "commit" in kinds else []:
        raise _broken(cluster, f"after the last version was made came {', '.join(reversed(late))}")


def _check_training(cluster: Cluster) -> None:
    ledger, bound = cluster.control.ledger, cluster.setting.staleness
    if cluster.recorder.violations:
        raise _broken(cluster, "a group was trained that is older than the bound")
    for last in cluster.recorder.steps[-1:]:
        trained = cluster.trainer.trained.pop(last.step, last.groups)
        if sorted(trained) != sorted(last.groups):
            raise _broken(cluster, f"step {last.step} was made of {trained}, and {last.groups} are committed")
    if ledger.version != cluster.weights.version and ledger.version + 1 != cluster.weights.version:
        raise _broken(cluster, f"version {ledger.version} is committed, {cluster.weights.version} is durable")
    if bound == 0 and ledger.frontier > ledger.version:
        counts = ledger.counts()
        if counts["live"] != counts["leased"]:
            raise _broken(cluster, "with bound 0, generation for the next step overlaps training")


def _check_instances(cluster: Cluster, versions: dict[tuple[str, int], int]) -> None:
    for rollout in cluster.rollouts:
        if rollout.engine.instance.kv_free < 0:
            raise _broken(cluster, f"{rollout.name} holds more KV than it has memory for")
        which = (rollout.name, rollout.incarnation)
        if rollout.version < versions.get(which, -1):
            raise _broken(cluster, f"{rollout.name} went back to version {rollout.version}")
        versions[which] = rollout.version
        if rollout.version > cluster.weights.version:
            raise _broken(cluster, f"{rollout.name} serves version {rollout.version} before it is durable")


def _check_tokens(cluster: Cluster) -> None:
    """generated = trained + wasted by cause + in flight"""
    recorder = cluster.recorder
    generated = sum(each.generated_tokens() for each in cluster.rollouts)
    on_engines = sum(each.on_engine() for each in cluster.rollouts)
    ended = recorder.trained_tokens + sum(recorder.wasted.values())
    in_flight = sum(recorder.made.values()) + on_engines
    if generated != ended + in_flight:
        raise _broken(cluster, f"{generated} tokens were generated, {ended} ended and {in_flight} are in flight")


def _check_groups(cluster: Cluster) -> None:
    """Every prompt that was drawn is trained once, live, owed or given up; ledger and server know the same groups."""
    if cluster.down or len(cluster.outbox):
        return  # the recorder does not know everything that the server knew
    server = cluster.control.server
    repeated = [prompt for prompt, times in cluster.recorder.trained_prompts.items() if times > 1]
    if repeated:
        raise _broken(cluster, f"prompts {repeated[:5]} were trained more than once")
    lost = lost_prompts(cluster)
    if lost:
        raise _broken(cluster, f"prompts {sorted(lost)[:5]} are lost")
    reserved = {name: group.version for name, group in server.groups.items() if group.version is not None}
    if isinstance(server.ledger, StalenessLedger):
        oldest = server.ledger.version - cluster.setting.staleness
        if late := [name for name, version in reserved.items() if version < oldest]:
            raise _broken(cluster, f"groups {late[:5]} are live and too old for every step to come")
    known = {name for name, _, _ in server.ledger.to_state()["groups"]}
    if reserved.keys() != known:
        raise _broken(
            cluster, f"groups {sorted(reserved.keys() ^ known)[:5]} are in the server or in the ledger, not in both"
        )


def lost_prompts(cluster: Cluster) -> set[int]:
    """Prompts that were drawn and are neither trained, nor live, nor owed, nor given up for a reason."""
    server = cluster.control.server
    found = set(cluster.recorder.trained_prompts) | set(server.owed) | cluster.recorder.given_up
    found |= {group.prompt for group in server.groups.values()}
    return set(range(server.next_prompt)) - found


def _broken(cluster: Cluster, what: str) -> BrokenInvariantError:
    return BrokenInvariantError(f"at {cluster.loop.time():.3f} s: {what}")
