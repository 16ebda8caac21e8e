"""A reward worker: ``python -m staleflow.reward.worker SPEC TIMEOUT_S``; jobs on standard input, answers on output.

One job at a time; every job is answered, with a reward or with why there is none. What the reward function prints goes
to standard error, so that it cannot be taken for an answer. When the pool is gone, so is the worker, even if the reward
function never returns::

    process = subprocess.Popen([sys.executable, "-m", "staleflow.reward.worker", "exact-match", "10"], ...)
    process.stdin.write(pack(job))
"""

import asyncio
import inspect
import os
import sys
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

from staleflow.reward.function import Response, Reward, RewardError, checked, load_reward
from staleflow.reward.wire import HEAD, Answer, Job, pack, size, unpack
from staleflow.tasks.task import Problem, TaskError

READY = -1


def main(spec: str, timeout_s: float) -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        reward = load_reward(spec, timeout_s)
    except Exception as error:
        answers.write(pack(Answer(READY, why=_line(error))))
        return
    jobs: SimpleQueue[Job] = SimpleQueue()
    Thread(target=_read, args=(sys.stdin.buffer, jobs), daemon=True).start()
    answers.write(pack(Answer(READY, reward=0.0)))
    with asyncio.Runner() as runner:
        while True:
            answers.write(pack(score(reward, jobs.get(), runner)))


def score(reward: Reward, job: Job, runner: asyncio.Runner) -> Answer:
    async def awaited(value: object) -> object:
        return await value if inspect.isawaitable(value) else value

    try:
        value: object = reward(Problem(job.prompt, job.facts), Response(job.text, job.tokens))
        if inspect.isawaitable(value):
            value = runner.run(awaited(value))
        return Answer(job.number, reward=checked(value))
    except Exception as error:  # whatever the user's function raises is an answer, not the end of the worker
        return Answer(job.number, why=_line(error))


def _read(stream: BinaryIO, jobs: "SimpleQueue[Job]") -> None:
    """In a thread of its own: it must notice the end of the pool while the reward function is busy."""
    while len(head := stream.read(HEAD)) == HEAD:
        jobs.put(unpack(stream.read(size(head)), Job))
    os._exit(0)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, RewardError | TaskError) else f"{type(error).__name__}: {text}".rstrip(": ")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
