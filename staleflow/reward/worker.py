"""A reward worker: ``python -m staleflow.reward.worker OPTIONS DECODER``; jobs on standard input, answers on output.

One job at a time; every job is answered at once, with a reward or with the reason why there is none, and how long it
took. What the reward function prints goes to standard error, so that it cannot be taken for an answer. When the pool
ends, so does the worker, even if the reward function never returns, and with it what the function has started::

    process = subprocess.Popen([sys.executable, "-m", "staleflow.reward.worker", options, ""], ...)
    process.stdin.write(pack([job]))
"""

import asyncio
import os
import signal
import struct
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from staleflow.errors import StaleFlowError, text_of
from staleflow.reward.function import NONE, Response, RewardError, Rewards, Score, ServiceAwayError, load_rewards
from staleflow.reward.options import Reward
from staleflow.reward.wire import READY, Answer, Job, pack
from staleflow.reward.wire import jobs as job_frames
from staleflow.tasks.task import Problem

PIECE = 1 << 20
MOST_LOGGED = 20
"""Failures of a reward that a worker logs in full."""
EXCERPT = 2000
"""Characters of a prompt or response in the log."""
_logged = 0

Decode = Callable[[Sequence[int]], str]


def main(options: str, decoder: str) -> None:
    """``options``: the section ``reward``, as JSON."""
    serve(os.dup(0), os.dup(1), msgspec.json.decode(options, type=Reward), decoder)


def serve(jobs_in: int, answers_out: int, options: Reward, decoder: str, own: Mapping[str, Score] = NONE) -> None:
    """Score what comes in on one descriptor, and answer on the other. ``own``: functions by name, as ``load_rewards``
    takes them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that processes of the reward function do not read jobs
    os.dup2(2, 1)
    answers = os.fdopen(answers_out, "wb", buffering=0, closefd=False)
    try:
        rewards, decode = load_rewards(options, own), load_decoder(decoder)
    except Exception as error:
        answers.write(pack(Answer(READY, why=_line(error))))
        return
    jobs: SimpleQueue[Job] = SimpleQueue()
    Thread(target=_read, args=(jobs_in, jobs), daemon=True).start()
    answers.write(pack(Answer(READY, reward=0.0)))
    with asyncio.Runner() as runner:
        while True:
            job, began = jobs.get(), time.perf_counter()
            answer = score(rewards, decode, job, runner)
            answer.seconds = time.perf_counter() - began
            answers.write(pack(answer))


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


def score(rewards: Rewards, decode: Decode | None, job: Job, runner: asyncio.Runner) -> Answer:
    problem, response = Problem(_prompt(job.prompt), job.facts), Response("")
    try:
        tokens: tuple[int, ...] = struct.unpack(f"<{len(job.tokens) // 4}i", job.tokens)
        response = Response(job.text if decode is None else decode(tokens), tokens, job.cut)
        reward, parts = rewards.of(problem, response, runner)
        return Answer(job.number, reward, parts=parts)
    except (Exception, SystemExit) as error:  # whatever the user's function raises must not end the worker
        away = isinstance(error, ServiceAwayError | ConnectionError)
        if not away:
            _log(error, problem, response)
        return Answer(job.number, why=_line(error), away=away)


def _prompt(prompt: str | list[Any]) -> Any:
    """As it was before it was sent: token ids are a tuple."""
    return tuple(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else prompt


def _log(error: BaseException, problem: Problem, response: Response) -> None:
    """To the log of the workers, and never more than some: a reward that is wrong is wrong thousands of times."""
    global _logged
    _logged += 1
    if _logged > MOST_LOGGED:
        return
    print(f"the reward failed, for the prompt\n{_excerpt(problem.prompt)}\nand the response", file=sys.stderr)
    print(_excerpt(response.text), file=sys.stderr)
    print(f"with the facts\n{_excerpt(problem.facts)}", file=sys.stderr)
    if isinstance(error, StaleFlowError):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error, file=sys.stderr)
    if _logged == MOST_LOGGED:
        print(f"this worker logs no more than {MOST_LOGGED} failures", file=sys.stderr)
    sys.stderr.flush()


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return textwrap.indent(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}... ({len(text):,} characters)", "    ")


def _read(stream: int, jobs: "SimpleQueue[Job]") -> None:
    """In a thread of its own: it must notice the end of the pool while the reward function is busy."""
    frames = job_frames()
    with suppress(OSError):  # the pool was killed
        while data := os.read(stream, PIECE):
            for together in frames.feed(data):
                for job in together:
                    jobs.put(job)
    if os.getpgrp() == os.getpid():  # a pool that was killed cannot do it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _line(error: BaseException) -> str:
    """In one line, with the place where it was raised if that is not ours."""
    text = text_of(error)[:500]
    if isinstance(error, StaleFlowError):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}, line {last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {text}".rstrip(": ") + place


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
