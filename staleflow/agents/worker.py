"""A worker of environments: ``python -m staleflow.agents.worker OPTIONS``; episodes come in on standard input.

Many at once, in one event loop; each is answered once, with its outcome. Whatever an environment raises is a failure of
that episode, with the traceback on standard error, where its prints go too. When the pool ends, so does the worker,
with everything that it has started::

    process = subprocess.Popen([sys.executable, "-m", "staleflow.agents.worker", options], ...)
    process.stdin.write(pack(Begin(...)))
"""

import asyncio
import ctypes
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import msgspec

from staleflow.agents.client import Model
from staleflow.agents.options import Environment
from staleflow.agents.outcome import Outcome, checked, failed
from staleflow.agents.play import LimitError, Limits, Play, load_play
from staleflow.agents.tools import kill_tree
from staleflow.agents.worker_messages import Begin, Cancel, Ended, Entered, Over, Ready, pack, to_worker
from staleflow.errors import StaleFlowError, line_of, text_of
from staleflow.tasks.task import Problem

PIECE = 1 << 20
MOST_LOGGED = 50
"""Failures that a worker logs in full."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class Playing:
    task: asyncio.Task[None]
    limits: Limits
    cancelled: bool = False
    over: str = ""
    """Why it was ended, if its phase took too long and the environment did not say which phases it has."""


class Worker:
    def __init__(self, play: Play, options: Environment, out: int) -> None:
        self._play = play
        self._options = options
        self._out = out
        self._playing: dict[int, Playing] = {}
        self._logged = 0

    def say(self, message: Ready | Entered | Ended) -> None:
        data = memoryview(pack(message))
        while data:
            data = data[os.write(self._out, data) :]

    def hear(self, message: Begin | Over | Cancel) -> None:
        if isinstance(message, Begin):
            limits = Limits(self._options, lambda phase: self.say(Entered(message.number, phase)))
            task = asyncio.get_running_loop().create_task(self._episode(message, limits))
            self._playing[message.number] = Playing(task, limits)
        elif (playing := self._playing.get(message.number)) is None:
            return  # it has ended meanwhile
        elif isinstance(message, Cancel):
            playing.cancelled = True
            playing.task.cancel()
        elif not playing.limits.over():
            playing.over = playing.limits.why()
            playing.task.cancel()

    async def _episode(self, asked: Begin, limits: Limits) -> None:
        model = Model(asked.base_url, asked.api_key)
        prompt = tuple(asked.prompt) if _is_tokens(asked.prompt) else asked.prompt
        outcome: Outcome | None
        try:
            outcome = checked(await self._play(Problem(prompt, asked.facts), model, limits))  # pyright: ignore[reportArgumentType]
        except asyncio.CancelledError:
            playing = self._playing[asked.number]
            outcome = None if playing.cancelled else failed(playing.over or "the environment cancelled itself")
        except LimitError as error:
            outcome = failed(f"{error} (catch LimitError, and return truncated(reward, why), to keep it)")
        except BaseException as error:  # whatever the environment raises must not end the others
            self._log(asked.name, error)
            outcome = failed(text_of(error) if isinstance(error, StaleFlowError) else line_of(error))
        await model.close()
        del self._playing[asked.number]
        try:
            self.say(Ended(asked.number, outcome))
        except ValueError as error:  # it is too long, or no text
            self.say(Ended(asked.number, failed(f"its outcome cannot be sent ({line_of(error)}): make it plain text")))

    def _log(self, name: str, error: BaseException) -> None:
        self._logged += 1
        if self._logged > MOST_LOGGED:
            return
        print(f"episode {name} failed:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
        if self._logged == MOST_LOGGED:
            print(f"this worker logs no more than {MOST_LOGGED} failures", file=sys.stderr)
        sys.stderr.flush()


def _is_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


async def _serve(into: int, out: int, options: Environment) -> None:
    try:
        play = load_play(options)
    except Exception as error:
        why = text_of(error) if isinstance(error, StaleFlowError) else line_of(error)
        os.write(out, pack(Ready(why or "the environment cannot be loaded")))
        return
    worker = Worker(play, options, out)
    Thread(target=_read, args=(into, worker, asyncio.get_running_loop()), daemon=True).start()
    worker.say(Ready())
    await asyncio.Event().wait()


def _read(stream: int, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
    """In a thread of its own: it must notice the end of the pool while an environment blocks the loop."""
    frames = to_worker()
    with suppress(OSError, RuntimeError):  # the pool was killed; the loop has ended
        while data := os.read(stream, PIECE):
            for message in frames.feed(data):
                loop.call_soon_threadsafe(worker.hear, message)
    kill_tree(os.getpid(), itself=False)
    os._exit(0)


def main(options: str) -> None:
    """``options``: the section ``environment``, as JSON."""
    with suppress(OSError, AttributeError):  # so that what outlives its parent is still below this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    into, out = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that processes of the environment do not read messages
    os.dup2(2, 1)
    asyncio.run(_serve(into, out, msgspec.json.decode(options, type=Environment)))


if __name__ == "__main__":
    main(sys.argv[1])
