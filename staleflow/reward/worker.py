"""A reward worker: ``python -m staleflow.reward.worker OPTIONS DECODER``; jobs on standard input, answers on output.

One job at a time; every job is answered at once, with a reward or with the reason why there is none. What the reward
function prints goes to standard error, so that it cannot be taken for an answer. When the pool ends, so does the
worker, even if the reward function never returns::

    process = subprocess.Popen([sys.executable, "-m", "staleflow.reward.worker", options, ""], ...)
    process.stdin.write(pack([job]))
"""

import asyncio
import os
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import msgspec

from staleflow.errors import StaleFlowError
from staleflow.reward.function import Response, RewardError, Score, ServiceAwayError, load_reward, reward_of
from staleflow.reward.options import Reward
from staleflow.reward.wire import READY, Answer, Job, pack
from staleflow.reward.wire import jobs as job_frames
from staleflow.tasks.task import Problem

PIECE = 1 << 20

Decode = Callable[[Sequence[int]], str]


def main(options: str, decoder: str) -> None:
    """``options``: the section ``reward``, as JSON."""
    jobs_in, answers = os.dup(0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that processes of the reward function do not read jobs
    os.dup2(2, 1)
    try:
        reward, decode = load_reward(msgspec.json.decode(options, type=Reward)), load_decoder(decoder)
    except Exception as error:
        answers.write(pack(Answer(READY, why=_line(error))))
        return
    jobs: SimpleQueue[Job] = SimpleQueue()
    Thread(target=_read, args=(jobs_in, jobs), daemon=True).start()
    answers.write(pack(Answer(READY, reward=0.0)))
    with asyncio.Runner() as runner:
        while True:
            answers.write(pack(score(reward, decode, jobs.get(), runner)))


def load_decoder(decoder: str) -> Decode | None:
    """How tokens become text: "adder", the path of a ``tokenizer.json``, or "" where responses come with their text."""
    if not decoder:
        return None
    if decoder == "adder":
        from staleflow.tasks.adder import text

        return text
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(decoder)
    except Exception as error:  # the library raises plain Exception
        raise RewardError(f"{decoder} cannot be read ({error}): save a fast tokenizer with the model") from None
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)


def score(reward: Score, decode: Decode | None, job: Job, runner: asyncio.Runner) -> Answer:
    try:
        tokens: tuple[int, ...] = struct.unpack(f"<{len(job.tokens) // 4}i", job.tokens)
        response = Response(job.text if decode is None else decode(tokens), tokens)
        return Answer(job.number, reward=reward_of(reward, Problem(job.prompt, job.facts), response, runner))
    except Exception as error:  # whatever the user's function raises must not end the worker
        return Answer(job.number, why=_line(error), away=isinstance(error, ServiceAwayError | ConnectionError))


def _read(stream: int, jobs: "SimpleQueue[Job]") -> None:
    """In a thread of its own: it must notice the end of the pool while the reward function is busy."""
    frames = job_frames()
    with suppress(OSError):  # the pool was killed
        while data := os.read(stream, PIECE):
            for together in frames.feed(data):
                for job in together:
                    jobs.put(job)
    os._exit(0)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, StaleFlowError) else f"{type(error).__name__}: {text}".rstrip(": ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
