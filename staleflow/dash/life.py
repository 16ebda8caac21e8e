"""One trajectory from its admission to its end, in words and as stays on instances, from the events that name it.

stays, events = tell(read_events(directory, [name, group]), name)
"""

from __future__ import annotations

from collections.abc import Iterable

from staleflow.dash.answers import Event, Stay
from staleflow.run.events import Timed
from staleflow.types import GIVEN, Spans, token_count

MOST = 400
"""Events that are told; of a long life, streams are left out first."""


def tell(found: Iterable[Timed], name: str) -> tuple[list[Stay], list[Event]]:
    stays, events = list[Stay](), list[Event]()
    known: Spans = ()
    called_back = False

    def leave(time: float, why: str, spans: Spans | None = None) -> None:
        nonlocal known
        if stays and stays[-1].end is None:
            if spans is not None:
                stays[-1].spans, known = _since(before[-1], spans), spans
            stays[-1].end, stays[-1].why = time, why

    before: list[Spans] = [()]
    for time, (kind, *values) in found:
        match kind, values:
            case "admit", [prompt, attempt, tokens, *_]:
                again = f", attempt {attempt + 1}" if attempt else ""
                events.append(Event(time, kind, f"prompt {prompt} drawn ({tokens} tokens{again})"))
            case "reserve", [_, version]:
                events.append(Event(time, kind, f"its group got a place at version {version}"))
            case (("lower" | "renew"), [_, version]):
                moved = "earlier" if kind == "lower" else "later"
                events.append(Event(time, kind, f"its group counts as version {version}: its deadline is {moved}"))
            case "route", [_, instance, _]:
                leave(time, "sent elsewhere")
                before.append(known)
                stays.append(Stay(instance, time, None, (), ""))
                called_back, carried = False, f" with {token_count(known)} tokens" if known else ""
                events.append(Event(time, kind, f"sent to {instance}{carried}"))
            case "stream", [_, spans]:
                known = spans
                if stays and stays[-1].end is None:
                    stays[-1].spans = _since(before[-1], spans)
                events.append(Event(time, kind, f"{token_count(spans)} tokens so far"))
            case "interrupt", _:
                called_back = True
                events.append(Event(time, kind, "called back"))
            case "requeue", _:
                why = "came back" if called_back else "its instance was lost"
                leave(time, why)
                events.append(Event(time, kind, f"{why}: waits for an instance with {token_count(known)} tokens"))
            case "generated", [_, spans]:
                leave(time, "ended", spans)
                events.append(Event(time, kind, f"ended with {token_count(spans)} tokens"))
            case "given", [_, count, _]:
                known = (*known, (GIVEN, count)) if count else known
                events.append(Event(time, kind, f"its environment gave {count} tokens and asks for a turn"))
            case "turn", [_, spans, reason]:
                leave(time, "its turn ended", spans)
                known = spans
                events.append(Event(time, kind, f"its turn ended ({reason}) with {token_count(spans)} tokens in all"))
            case "branch", [_, shared]:
                events.append(Event(time, kind, f"a branch was opened from its first {shared} tokens"))
            case "ended", [_, reward, masked]:
                leave(time, "its episode ended")
                cut = ", cut off: its tokens are not trained" if masked else ""
                events.append(Event(time, kind, f"its environment ended it, scored {reward:.4g}{cut}"))
            case "again", [_, why]:
                leave(time, "began anew")
                known = ()
                events.append(Event(time, kind, f"its episode begins anew: {why}"))
            case "misreport", [_, why]:
                leave(time, "misreported")
                events.append(Event(time, kind, f"its instance reported what cannot be true: {why}"))
            case "score", [_, reward]:
                events.append(Event(time, kind, f"scored {reward:.4g}"))
            case "occupy", _:
                events.append(Event(time, kind, "its group is complete"))
            case "lease", _:
                events.append(Event(time, kind, "its group went to the trainer"))
            case "consume", [groups, aborted]:
                gone = name.rpartition("/")[0] in aborted
                what = "given up: the step had enough without it" if gone else f"its step is full: {len(groups)} groups"
                events.append(Event(time, kind, what))
            case "release", [_, reason, again]:
                leave(time, "given up")
                later = "; its prompt is drawn again" if again else ""
                events.append(Event(time, kind, f"its group was given up: {reason}{later}"))
            case _:
                pass
    if len(events) > MOST:
        events = [each for each in events if each.kind != "stream"][:MOST]
    return stays, events


def _since(before: Spans, spans: Spans) -> Spans:
    """What came after the tokens of ``before``."""
    skip, rest = token_count(before), list[tuple[int, int]]()
    for version, count in spans:
        here = max(0, count - skip)
        skip = max(0, skip - count)
        if here:
            rest.append((version, here))
    return tuple(rest)
