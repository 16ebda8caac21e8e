"""Which node each role of a run gets: one placement group for each, so that its parts stay together.

Instances are spread: the next one goes to the node that has the fewest of them and has room. Where none has, the group
waits until there is room somewhere, and a cluster that grows by itself sees what is missing. ::

    places = Places(run, token, need)
    place = places.take("i0", "instance")       # the place that this name has already, if it is alive
    places.give(place)
    places.close()

Every call may block: make it in a thread.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

from staleflow.runtime.ray.host import About, Host
from staleflow.runtime.ray.spreading import Node, spread
from staleflow.types import Role

ray: Any = importlib.import_module("ray")  # by name: the type checker does not need it
groups: Any = importlib.import_module("ray.util.placement_group")
strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
errors: Any = importlib.import_module("ray.exceptions")
FAILURES = errors.RayActorError, errors.RayTaskError, errors.GetTimeoutError
"""An actor has died, its method has failed, or it does not answer."""

MOST_THREADS = 256
"""Roles that can wait for a place at the same time."""
TRY_S = 2.0
"""How long one node may take to say whether it has room."""
ANSWER_S = 5.0
"""An actor that does not answer within this time is given up."""
START_S = 120.0
"""For an actor to start, and for what it imports."""
SILENT_S = 60.0
"""How long a node where an actor did not answer is the last choice: Ray may not have noticed yet that it is dead."""
NODE_LABEL = "ray.io/node-id"

Need = dict[str, float]


class Place(NamedTuple):
    """An actor for one role, and what it has reserved."""

    name: str
    """Of actor and group: that of the role, and something that tells it from those before it."""
    host: Any
    about: About

    @property
    def role_name(self) -> str:
        return self.name.partition(".")[0]


class Closed(Exception):  # noqa: N818  # an event, not a mistake
    """Nobody needs a place any more."""


class Places:
    def __init__(self, run: str, token: str, need: Callable[[Role], Need]) -> None:
        self._run = run
        self._token = token
        self._need = need
        self._taken: dict[str, Place] = {}
        self._meant: dict[str, tuple[Role, str]] = {}
        """By name: role, and the node that it is on or is to be on."""
        self._silent: dict[str, float] = {}
        """By node: when an actor there did not answer."""
        self.threads = ThreadPoolExecutor(MOST_THREADS, "places")
        """For those who cannot block."""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def left(self) -> list[Place]:
        """Those of an earlier control plane. One that does not answer is killed."""
        hosts = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
        asked = {name: host.about.remote() for name, host in hosts.items()}
        for name, host in hosts.items():
            try:
                about = About(*ray.get(asked[name], timeout=ANSWER_S))
            except FAILURES:
                self._free(name, host)
                continue
            place = Place(name, host, about)
            role = place.role_name if place.role_name in ("trainer", "evaluator") else "instance"
            self._taken[place.role_name] = place
            self._meant[place.role_name] = cast("Role", role), about.node
        return list(self._taken.values())

    def of(self, name: str) -> Place:
        return self._taken[name]

    def take(self, name: str, role: Role, unwanted: Callable[[], bool] = lambda: False) -> Place:
        """``Closed`` if it becomes ``unwanted`` meanwhile; one of ``FAILURES`` if the actor cannot work on its node."""
        if (place := self._taken.get(name)) is not None:
            if self._answers(place):
                return place
            self.give(place)
        need = self._need(role)
        unique = f"{name}.{secrets.token_hex(3)}"
        group = self._group(unique, name, role, need, unwanted)
        try:
            options: dict[str, Any] = {
                "name": unique,
                "lifetime": "detached",
                "max_restarts": 0,
                "num_cpus": need.get("CPU", 0.0),
                "num_gpus": need.get("GPU", 0.0),
                "resources": {kind: amount for kind, amount in need.items() if kind not in ("CPU", "GPU")},
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, 0),
            }
            host = ray.remote(Host).options(**options).remote(self._run, self._token)
            about = About(*ray.get(host.about.remote(), timeout=START_S))
        except BaseException:
            self._silent[self._meant.get(name, (role, ""))[1]] = time.monotonic()
            groups.remove_placement_group(group)
            raise
        place = Place(unique, host, about)
        with self._lock:
            self._taken[name] = place
            self._meant[name] = role, about.node
        if self._closed.is_set() or unwanted():
            self.give(place)
            raise Closed
        return place

    def give(self, place: Place) -> None:
        with self._lock:
            if (now := self._taken.get(place.role_name)) is not None and now.name == place.name:
                del self._taken[place.role_name]
                self._meant.pop(place.role_name, None)
        self._free(place.name, place.host)

    def close(self) -> None:
        self._closed.set()
        for place in list(self._taken.values()):
            self.give(place)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _answers(self, place: Place) -> bool:
        try:
            ray.get(place.host.about.remote(), timeout=ANSWER_S)
        except FAILURES:
            self._silent[place.about.node] = time.monotonic()
            return False
        return True

    def _free(self, name: str, host: Any) -> None:
        ray.kill(host)
        try:
            groups.remove_placement_group(groups.get_placement_group(name))
        except ValueError:  # it is gone
            return

    def _group(self, unique: str, name: str, role: Role, need: Need, unwanted: Callable[[], bool]) -> Any:
        nodes = [Node(each["NodeID"], each["Resources"]) for each in ray.nodes() if each["Alive"]]
        with self._lock:
            others = [each for key, each in self._meant.items() if key != name]
            since = time.monotonic() - SILENT_S
            silent = {node for node, at in self._silent.items() if at > since}
            order = spread(nodes, need, role, others, ray.get_runtime_context().get_node_id(), silent)
            if order:
                self._meant[name] = role, order[0]
        for node in order:
            group = _reserved(unique, need, [{NODE_LABEL: node}])
            if group.wait(TRY_S):
                return group
            groups.remove_placement_group(group)
        group = _reserved(unique, need)
        while not group.wait(1.0):
            if self._closed.is_set() or unwanted():
                groups.remove_placement_group(group)
                raise Closed
        return group


def _reserved(name: str, need: Need, where: list[dict[str, str]] | None = None) -> Any:
    more: dict[str, Any] = {"bundle_label_selector": where} if where else {}
    return groups.placement_group([need], strategy="STRICT_PACK", name=name, lifetime="detached", **more)
