"""Which nodes could take a role, the best first. A pure function of the cluster.

spread([Node("a", {"CPU": 8}), Node("b", {"CPU": 8})], {"CPU": 1}, "instance", [("instance", "a")], home="a")
# ["b", "a"]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from staleflow.types import Role


class Node(NamedTuple):
    id: str
    resources: Mapping[str, float]
    """Of the whole node."""


def spread(
    nodes: Sequence[Node],
    need: Mapping[str, float],
    role: Role,
    taken: Iterable[tuple[Role, str]],
    home: str,
    silent: Collection[str] = (),
) -> list[str]:
    """Those that answer, then those with the fewest of this role, then with the fewest of all, then ``home``, which is
    the control plane's. ``taken``: role and node of those that are there."""
    others = list(taken)

    def order(node: Node) -> tuple[bool, int, int, bool]:
        here = [kind for kind, where in others if where == node.id]
        return node.id in silent, here.count(role), len(here), node.id != home

    fitting = [node for node in nodes if all(node.resources.get(kind, 0.0) >= size for kind, size in need.items())]
    return [node.id for node in sorted(fitting, key=order)]
