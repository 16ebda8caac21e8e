"""One run of ``bench/chaos.py``: drawn by its seed, hit by volleys of faults, stopped and audited.

Case(seed=17, kinds=KINDS, folder=folder, model=model, alone=True).execute(faults=10)
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.chaos_audit import audit
from bench.chaos_lab import SHARED, Ballast, HangError, Service, Victim, age_s, shared_segments

ROLES = ("kill", "hang", "slow", "memory")
"""Kinds that hit one process."""
FULL = ("disk", "shm")
ENDS = ("control", "tree", "stop")
KINDS = (*ROLES, *FULL, "service", *ENDS)
MODES = ("hang", "error", "busy", "garbage", "twice", "gone")
DEATHS = 4
"""Of one process in a case: a run allows five in ten minutes."""
SETTLED_S = 20.0
"""A process that hangs while it starts has no measured time yet, and gets ten minutes. Older ones have."""
AMID = 0.2
"""How often a volley comes before the run has recovered from the one before it."""
BY_THEN_S = 10.0
"""What is said later after the end of a fault that passes is about something else."""
RECOVERED_S = 300.0
END_S = 120.0


EPISODES = ("agent", "environment.play=bench.chaos_lab:play", "environment.max_given=48", "environment.agent_s=5")
"""Settings of a run in which environments play."""

Plan = Sequence[Sequence[tuple[str, str]]]
"""Volleys of faults: kind and name of each."""


def plan_of(text: str) -> Plan:
    """``kill i0 + service gone, tree``: two volleys."""
    volleys = [[each.split() for each in volley.split("+")] for volley in text.split(",")]
    for kind, *_ in (words for volley in volleys for words in volley):
        if kind not in KINDS:
            raise ValueError(f"there is no fault {kind!r}: give some of {', '.join(KINDS)}")
    return [[(words[0], words[-1]) for words in volley] for volley in volleys]


@dataclass
class Fault:
    kind: str
    name: str
    """The process, or what the service does."""
    version: int
    """Steps that were committed."""
    at: float = 0.0
    seconds: float = 0.0
    """How long it lasts, if it passes."""
    noticed_s: float | None = None
    step_s: float | None = None


class Case:
    """One run and its faults."""

    def __init__(
        self,
        seed: int,
        kinds: Sequence[str],
        folder: Path,
        model: Path,
        alone: bool,
        plan: Plan = (),
        episodes: bool = False,
    ) -> None:
        """``alone``: nobody else uses the shared memory that can be seen here. ``plan``: instead of what is drawn.
        ``episodes``: environments play, and the model is one that can be asked by messages."""
        self.seed = seed
        self.episodes = episodes
        self.faults: list[Fault] = []
        self.wrong: list[str] = []
        self._draw = random.Random(f"chaos {seed}")
        self._kinds = kinds
        self._alone = alone
        self._plan = list(plan)
        self._planned = bool(plan)
        self._service = Service()
        self._deaths: Counter[str] = Counter()
        self._passing: list[threading.Thread] = []
        self._disk, self._shm = Ballast(folder), Ballast(SHARED)
        self.victim = Victim(self._settings(model), folder)

    def _settings(self, model: Path) -> list[str]:
        draw = self._draw
        http = "service" in self._kinds and (draw.random() < 0.5 or self._planned) and not self.episodes
        self._kinds = [each for each in self._kinds if http or each != "service"]
        reward = f"reward.function={self._service.address if http else 'bench.chaos_lab:evenness'}"
        workers = f"environment.workers={1 + self.seed % 2}"
        return [
            f"model={model}",
            f"seed={self.seed}",
            f"staleness={draw.choice((0, 1, 2, 4))}",
            f"rollout.instances={draw.choice((2, 2, 3, 4))}",
            workers if self.episodes else reward,
            f"evaluation.when={draw.choice(('during', 'after'))}",
            f"checkpoints.every={draw.choice((1, 3, 10))}",
            f"strategies.consume={draw.choice(('stream', 'stream', 'batch'))}",
            "steps=100000",
            "groups=4",
            "group_size=4",
            f"rollout.max_tokens={24 if self.episodes else 64}",
            "rollout.kv_tokens=4096",
            "evaluation.every=25",
            "evaluation.problems=8",
            "reward.timeout_s=3",
            "processes.hung_s=5",
            *(EPISODES if self.episodes else ()),
        ]

    def execute(self, faults: int) -> dict[str, Any]:
        """As many faults as fit, up to ``faults``. What happened, as plain values."""
        began = time.monotonic()
        victim = self.victim
        try:
            victim.start()
            victim.wait(lambda: victim.version >= 2, "the first steps")
            while len(self.faults) < faults and (volley := self._next(faults - len(self.faults))):
                if not self._planned:
                    victim.wait(lambda: not victim.alive or all(map(self._settled, volley)), "processes to hit")
                time.sleep(self._draw.choice((0.0, 0.2, 1.0)) * self._draw.random())
                self._fire(volley)
                self._passed()
                if self._planned or self._draw.random() > AMID:
                    self._recovered()
            self._recovered()
            self._end()
        except HangError as error:
            self.wrong.append(str(error))
        finally:
            victim.kill_tree()
            self._service.close()
        found = self._audited()
        self._times()
        return {
            "seed": self.seed,
            "seconds": time.monotonic() - began,
            "episodes": self.episodes,
            "settings": victim.words[1:8],
            "faults": [asdict(each) for each in self.faults],
            "restarts": victim.summary.get("restarts", {}),
            "attempts": len(victim.codes),
            "tokens_lost": victim.summary.get("tokens_lost", 0),
            "wrong": self.wrong,
            "said": [line for _, line in victim.said if not line.startswith("step ")][-60:] if self.wrong else [],
            **found,
        }

    # Faults

    def _next(self, most: int) -> list[Fault]:
        if not self._planned:
            return self._volley(most)
        version = self.victim.version
        return [Fault(kind, name, version, seconds=3.0) for kind, name in self._plan.pop(0)] if self._plan else []

    def _volley(self, most: int) -> list[Fault]:
        """Faults for the same moment: of several processes, or one that ends the run."""
        draw = self._draw
        volley: list[Fault] = []
        for _ in range(min(most, draw.choice((1, 1, 2, 3)))):
            kind = draw.choice(self._kinds)
            if kind in ENDS and volley:
                continue
            if fault := self._drawn(kind):
                volley.append(fault)
            if kind in ENDS:
                break
        return volley

    def _drawn(self, kind: str) -> Fault | None:
        draw, version = self._draw, self.victim.version
        if kind == "control":
            if self._deaths[kind] >= DEATHS:
                return None
            self._deaths[kind] += 1
        if kind in ENDS or kind in FULL:
            return Fault(kind, kind, version, seconds=draw.uniform(2, 6) if kind in FULL else 0.0)
        if kind == "service":
            return Fault(kind, draw.choice(MODES), version, seconds=draw.uniform(1, 5))
        instances = [f"i{at}" for at in range(4)]
        others = ("environment", "environment") if self.episodes else ("reward",)
        name = draw.choice((*instances, "trainer", "trainer", "evaluator", *others))
        pids = self.victim.pids(name)
        name = name if pids and self._deaths[name] < DEATHS else "i0"
        return Fault(kind, name, version) if self._deaths[name] < DEATHS else None

    def _settled(self, fault: Fault) -> bool:
        """Whether a process can be hit by it now."""
        if fault.kind not in ROLES:
            return True
        pids = self.victim.pids(fault.name)
        return bool(pids) and (fault.kind == "kill" or age_s(pids[0]) >= SETTLED_S)

    def _fire(self, volley: list[Fault]) -> None:
        for fault in volley:
            pids = self.victim.pids(fault.name)[:1] if fault.kind in ROLES else []
            if fault.kind in ROLES and not pids:
                continue  # it has just died: nobody was hit
            fault.at = time.monotonic()
            fault.version = self.victim.version
            self.faults.append(fault)
            if fault.kind in ROLES:
                self._deaths[fault.name] += fault.kind != "slow"
                self._hit(fault, pids[0])
            elif fault.kind in FULL:
                ballast = self._disk if fault.kind == "disk" else self._shm
                self._pass(fault, ballast.fill, ballast.drop)
            elif fault.kind == "service":
                self._pass(fault, partial(self._service.set, fault.name), partial(self._service.set, "well"))
            else:
                self._break(fault)

    def _hit(self, fault: Fault, pid: int) -> None:
        with suppress(ProcessLookupError):
            match fault.kind:
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "hang":
                    os.kill(pid, signal.SIGSTOP)
                case "memory":
                    size = 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[0])
                    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
                case _:
                    pauses = [self._draw.uniform(0.2, 1.5) for _ in range(3)]
                    fault.seconds = 2 * sum(pauses)
                    self._pass(fault, lambda: _stutter(pid, pauses), lambda: None)

    def _pass(self, fault: Fault, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Something that is over after a while."""

        def work() -> None:
            begin()
            if fault.kind != "slow":
                time.sleep(fault.seconds)
            end()

        self._passing.append(threading.Thread(target=work))
        self._passing[-1].start()

    def _break(self, fault: Fault) -> None:
        """End the run, and let it be resumed unless it goes on by itself."""
        victim = self.victim
        if fault.kind != "stop":
            victim.wait(lambda: any(victim.folder.glob("*/checkpoints/step-*")), "the first checkpoint")
            victim.wait(lambda: victim.control != 0, "a control plane")
            fault.at = time.monotonic()
        goes_on = fault.kind == "control" and victim.supervised
        number = signal.SIGKILL
        match fault.kind:
            case "control":
                if control := victim.control:
                    os.kill(control, signal.SIGKILL)
            case "tree":
                victim.kill_tree()
            case _:
                number = self._draw.choice((signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
                fault.name = number.name
                victim.signal(number)
        if goes_on:
            return
        code = victim.ended(END_S)
        if code != (130 if fault.kind == "stop" else -signal.SIGKILL) and not (victim.silent and code == -number):
            self.wrong.append(f"after {fault.kind} of {fault.name} the run ended with {code}: {victim.last()}")
        self._deaths.clear()
        victim.start()

    def _passed(self) -> None:
        """Until disks have room and services are well again."""
        for each in self._passing:
            each.join()
        self._passing.clear()

    def _recovered(self) -> None:
        """Until the run has made steps again after everything that happened to it."""
        seen = len(self.victim.said)
        enough = 2 + self._draw.randrange(8)

        def steps() -> bool:
            return sum(line.startswith("step ") for _, line in self.victim.said[seen:]) >= enough

        self.victim.wait(
            steps, f"steps after {', '.join(f'{each.kind} {each.name}' for each in self.faults[-3:])}", RECOVERED_S
        )

    # The end

    def _end(self) -> None:
        self.victim.signal(signal.SIGTERM)
        if (code := self.victim.ended(END_S)) != 130:
            self.wrong.append(f"the run ended with {code}: {self.victim.last()}")

    def _audited(self) -> dict[str, Any]:
        victim = self.victim
        if self.wrong:  # what did not end well does not fit together
            return {}
        assert victim.run is not None
        self.wrong += victim.left_behind()
        self.wrong += [f"shared memory {each} is left" for each in shared_segments() if self._alone]
        found = audit(victim.run, victim.summary)
        self.wrong += found.wrong
        return {key: value for key, value in asdict(found).items() if key != "wrong"}

    def _times(self) -> None:
        for fault in self.faults:
            told = self.victim.after(fault.at, _words_for(fault))
            if told is not None and (not fault.seconds or told <= fault.seconds + BY_THEN_S):
                fault.noticed_s = told
            again_s = (told or 0.0) if fault.kind in ENDS else 0.0  # what the attempt before still made does not count
            step_s = self.victim.after(fault.at + again_s, r"step ")
            fault.step_s = None if step_s is None else again_s + step_s


def _words_for(fault: Fault) -> str:
    """What the run says when it has noticed."""
    if fault.kind in ROLES and fault.name in ("reward", "environment"):
        return f"note: an? {fault.name} worker was lost"
    name = fault.name
    return {
        "kill": rf"note: {name} (died|stood still)",
        "hang": rf"note: {name} (has not moved|stood still)",
        "slow": rf"note: {name} has not moved",
        "memory": rf"note: {name} (died|stood still)",
        "disk": r"note: (paused|the checkpoint|.* cannot )",
        "shm": r"note: (paused|.*shared memory)",
        "service": r"note: (reward|the reward service)",
        "control": r"note: the control plane|run ",
        "tree": r"run ",
        "stop": r"run ",
    }[fault.kind]


def _stutter(pid: int, pauses: Iterable[float]) -> None:
    with suppress(ProcessLookupError):
        for pause in pauses:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause)
            os.kill(pid, signal.SIGCONT)
            time.sleep(pause)
