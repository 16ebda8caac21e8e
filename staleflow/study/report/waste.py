"""What a run generated and did not train on, by cause, from the journal."""

from __future__ import annotations

from collections import Counter

from staleflow.protocol import REDUNDANT
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events

SURPLUS = "surplus"
"""Members of a group beyond those that it needed."""


def wasted_tokens(directory: RunDirectory) -> dict[str, int]:
    """Tokens by cause, most first."""
    tokens: dict[str, dict[str, int]] = {}
    scored: dict[str, set[str]] = {}
    wasted: Counter[str] = Counter()

    def drop(group: str, cause: str) -> None:
        wasted[cause] += sum(tokens.pop(group, {}).values())
        scored.pop(group, None)

    for _, event in read_events(directory):
        match event:
            case ("stream" | "generated", str(name), spans):
                tokens.setdefault(_group(name), {})[name] = sum(count for _, count in spans)
            case ("score", str(name), _):
                scored.setdefault(_group(name), set()).add(name)
            case ("occupy", str(group)):
                surplus = {name: made for name, made in tokens.get(group, {}).items() if name not in scored[group]}
                wasted[SURPLUS] += sum(surplus.values())
                tokens[group] = {name: made for name, made in tokens[group].items() if name not in surplus}
            case ("release", str(group), reason, _):
                drop(group, reason)
            case ("lease", groups):
                for group in groups:
                    scored.pop(group, None)
            case ("consume", groups, aborted):
                for group in aborted:
                    drop(group, REDUNDANT)
            case _:
                pass
    return {cause: made for cause, made in wasted.most_common() if made}


def _group(name: str) -> str:
    return name.rpartition("/")[0]
