"""One worker of environments, as the pool sees it: start, messages in both directions, and its end. ::

player = await Player.start(options, stderr, listener)       # ConfigError if the environment cannot be loaded
player.send(Begin(...))                                      # the listener hears what it answers, or its loss
await player.end()
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from typing import Protocol

import msgspec

from staleflow.agents.options import Environment
from staleflow.agents.tools import gone, kill_tree
from staleflow.agents.worker_messages import Begin, Cancel, Ended, Entered, Over, Ready, from_worker, pack
from staleflow.errors import ConfigError, ending
from staleflow.reward.process import started

START_S = 60.0
"""Time limit for a worker to import the environment."""
LAST_WORDS_S = 2.0
"""How long a worker whose output has ended may take to exit."""
PIECE = 1 << 18


class Listener(Protocol):
    def heard(self, player: Player, message: Entered | Ended) -> None: ...

    def lost(self, player: Player, why: str) -> None:
        """It has died, or talks nonsense: it can no longer be used."""
        ...


class Player:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        listener: Listener,
    ) -> None:
        self.numbers: set[int] = set()
        """Episodes that it plays."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._listener = listener
        self._frames = from_worker()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, options: Environment, stderr: int | None, listener: Listener) -> Player:
        command = (sys.executable, "-m", "staleflow.agents.worker", msgspec.json.encode(options).decode())
        connection, process = started(command, stderr, options.environment, "environment.environment")
        self = cls(process, *await asyncio.open_connection(sock=connection), listener)
        try:
            async with asyncio.timeout(START_S):
                why = await self._ready()
        except TimeoutError:
            why = f"it was not loaded within {START_S:g} s"
        except BaseException:
            await self.end()
            raise
        if why:
            await self.end()
            setting = f"environment.play={options.play}"
            raise ConfigError(why if why.startswith(setting) else f"{setting}: {why}")
        self._task = asyncio.get_running_loop().create_task(self._read())
        return self

    @property
    def hears(self) -> bool:
        """Whether it is there. Of its end the listener is told a moment later: how it ended is found out first."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    def send(self, message: Begin | Over | Cancel) -> None:
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes) -> None:
        if self.hears:
            self._writer.write(frame)

    async def end(self) -> None:
        """Kill it with everything that it started; when this returns, they are gone."""
        if self._task is not None:
            self._task.cancel()
        killed = kill_tree(self._process.pid)
        self._writer.close()
        await asyncio.to_thread(self._process.wait)
        await gone(killed)

    async def _ready(self) -> str:
        while data := await self._reader.read(PIECE):
            for message in self._frames.feed(data):
                return message.why if isinstance(message, Ready) else "its worker answered nonsense"
        return await self._last_words()

    async def _read(self) -> None:
        why = ""
        try:
            while data := await self._reader.read(PIECE):
                for message in self._frames.feed(data):
                    if isinstance(message, Ready) or message.number not in self.numbers:
                        raise ValueError(f"{type(message).__name__}, which was not expected")
                    self._listener.heard(self, message)
        except ValueError as error:
            why = f"its worker answered nonsense ({error})"
        except OSError:
            pass
        self._listener.lost(self, why or await self._last_words())

    async def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, LAST_WORDS_S)
        return f"its worker ended: {ending(self._process.returncode)}"
