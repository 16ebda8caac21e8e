"""More or fewer rollout instances while a run is alive, as ``staleflow scale`` asks for.

    scaling = Scaling(run)
    for name in scaling.begin(found=[]): run.start_instance(name)
    scaling.look()                      # now and then: takes what was asked, and answers once it is done

One that leaves is drained first: its trajectories come back with all their tokens and continue elsewhere. Those leave
that have the least to prefill again. The number is kept in the run's ``config.yaml``, so a resumed run has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from staleflow.errors import RunError, StaleFlowError
from staleflow.run.requests import Request, Requests

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

DONE_S = 60.0
"""After this time the answer says what is still under way."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Change:
    before: int
    after: int
    started: list[str]
    stopped: list[str]


class Scaling:
    def __init__(self, run: LocalRun) -> None:
        self.names: list[str] = []
        """The instances that stay."""
        self._run = run
        self._requests = Requests(run.directory)
        self._answering: set[asyncio.Task[None]] = set()
        self._failed: dict[str, str] = {}
        """By instance that was given up: why."""

    def begin(self, found: Collection[str]) -> list[str]:
        """The names of all instances to start, or to adopt where an earlier control plane left them. If it left more
        than are wanted, the others are adopted to be drained."""
        run = self._run
        wanted, names = run.config.rollout.instances, sorted(filter(_is_instance, found), key=_number)
        self.names = [*names[:wanted], *unused(wanted - len(names), taken=names)]
        run.crew.leaving |= set(names[wanted:])
        run.crew.place(run.site.places([*self.names, *names[wanted:]]))
        return [*self.names, *names[wanted:]]

    def look(self) -> None:
        for request in self._requests.take():
            task = asyncio.get_running_loop().create_task(self._answer(request), name="answer to staleflow scale")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        for task in self._answering:
            task.cancel()

    def given_up(self, name: str, why: str) -> None:
        """One that was added has never worked, and is not started again."""
        if name in self.names:
            self.names.remove(name)
            self._failed[name] = why
            with suppress(OSError):  # then a resume tries it again
                self._keep(len(self.names))
            self._retire(name)

    def drained(self, name: str) -> None:
        """The control plane has everything back that this instance had. Once it cannot be forgotten, it may end."""
        self._run.outbox.send(self._retire, name)

    async def _answer(self, request: Request) -> None:
        try:
            answer = await self._scale(request.values.get("rollout"))
        except (StaleFlowError, OSError) as error:
            answer: dict[str, Any] = {"error": str(error)}
        except Exception as error:  # a bug
            self._run.crew.fail(error)
            return
        with suppress(OSError):  # whoever asked hears that nothing came
            self._requests.answer(request, answer)

    async def _scale(self, wanted: object) -> dict[str, Any]:
        if not isinstance(wanted, int) or wanted < 1:
            raise RunError(f"rollout={wanted}: give 1 or more instances")
        await self._refuse_too_many(wanted)
        change = self._change(wanted)
        with suppress(TimeoutError):
            async with asyncio.timeout(DONE_S):
                while not self._done(change):
                    await asyncio.sleep(LOOK_S)
        text = self._told(change)
        self._run.incidents.note(text)
        if failed := [f"{name} {self._failed.pop(name)}" for name in change.started if name in self._failed]:
            raise RunError(f"{text}; {'; '.join(failed)}")
        return {"text": text, "instances": sorted(self.names)} | {
            name: getattr(change, name) for name in ("before", "after", "started", "stopped")
        }

    async def _refuse_too_many(self, wanted: int) -> None:
        run = self._run
        there = sum(name in run.instances for name in self.names)
        if wanted > there:
            config = replace(run.config, rollout=replace(run.config.rollout, instances=wanted))
            if (problem := await asyncio.to_thread(run.site.refuses, config, wanted - there)) is not None:
                raise RunError(problem)

    def _change(self, wanted: int) -> Change:
        run, before = self._run, len(self.names)
        if run.ending:
            raise RunError(f"the run in {run.directory.path} is ending: nothing was changed")
        self._keep(wanted)
        stopped = lightest(self.names, self._work, before - wanted)
        started = unused(wanted - before, taken={*self.names, *run.crew.children})
        self.names = [*(name for name in self.names if name not in stopped), *started]
        if started or stopped:
            step, seconds = run.server.ledger.version, run.time.seconds
            run.record.scaled.append({"step": step, "seconds": seconds, "from": before, "to": wanted})
            run.server.note("scale", before, wanted)
            run.crew.place(run.site.places(self.names))
        for name in stopped:
            run.crew.leaving.add(name)
            if run.training and name in run.control.members:
                run.control.drain(name)
            elif run.training or not run.in_place:  # it has not begun to work
                self._retire(name)
        for name in started:
            run.crew.optional.add(name)
            run.start_instance(name)
        return Change(before, wanted, started, stopped)

    def _keep(self, wanted: int) -> None:
        """The number, for a resume. If it cannot be written, nothing is changed."""
        run = self._run
        config = replace(run.config, rollout=replace(run.config.rollout, instances=wanted))
        run.directory.write_config(config)
        run.config = config

    def _work(self, name: str) -> int:
        """Tokens that would be prefilled again if it left."""
        member = self._run.control.members.get(name)
        return member.context if member is not None else -1

    def _retire(self, name: str) -> None:
        if name in self.names:
            return  # another has its name by now
        self._run.time.instance_left(name)
        self._run.crew.optional.discard(name)
        self._run.crew.retire(name)

    def _done(self, change: Change) -> bool:
        children = self._run.crew.children
        starting = [name for name in change.started if name in children and not children[name].ready.is_set()]
        return not starting and not any(name in children for name in change.stopped)

    def _told(self, change: Change) -> str:
        children = self._run.crew.children
        said: dict[str, list[str]] = {}
        for name in change.started:
            if name in children:
                said.setdefault("started" if children[name].ready.is_set() else "still starting", []).append(name)
        for name in change.stopped:
            said.setdefault("still to be drained" if name in children else "drained and stopped", []).append(name)
        if not said and not change.started:
            return f"instances {change.after}: nothing to change"
        what = "; ".join(f"{', '.join(names)} {how}" for how, names in said.items())
        return f"instances {change.before} -> {change.after}{': ' if what else ''}{what}"


def unused(most: int, taken: Collection[str] = ()) -> list[str]:
    """The first names of instances that are not taken."""
    names = (f"i{at}" for at in count())
    return [name for name, _ in zip((each for each in names if each not in taken), range(most), strict=False)]


def lightest(names: Collection[str], work: Callable[[str], int], most: int) -> list[str]:
    """Whose end costs the least; among equals, the latest."""
    return sorted(names, key=lambda name: (work(name), -_number(name)))[: max(0, most)]


def _number(name: str) -> int:
    return int(name[1:])


def _is_instance(name: str) -> bool:
    return name[:1] == "i" and name[1:].isdecimal()
