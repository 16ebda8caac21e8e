"""Reward functions that the tests name; they run in worker processes."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

from staleflow.reward.function import Response
from staleflow.tasks.task import Problem

NOT_A_FUNCTION = 1


def behave(problem: Problem, response: Response) -> Any:
    """Does what the text of the response says."""
    print("what a reward prints is not an answer", flush=True)
    match response.text:
        case "hang":
            threading.Event().wait()
        case "hang with a child":
            child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
            with open(problem.facts["file"], "w") as file:
                file.write(str(child.pid))
            child.wait()
        case "crash":
            os._exit(3)
        case "exception":
            raise KeyError("no such\nthing")
        case "nan":
            return float("nan")
        case "infinite":
            return float("inf")
        case "string":
            return "1.0"
        case "none":
            return None
        case "pid":
            return float(os.getpid())
    return problem.facts.get("reward", 0.5)


async def later(problem: Problem, response: Response) -> float:
    await asyncio.sleep(0)
    if response.text == "exception":
        raise RuntimeError("too late")
    return len(problem.prompt) + sum(response.tokens)


def spelled(problem: Problem, response: Response) -> float:
    """Whether the text is the answer."""
    return float(response.text == problem.facts["answer"])


def environment(problem: Problem, response: Response) -> float:  # noqa: ARG001
    """Whether the variable that the response names is set."""
    return float(response.text in os.environ)


def weighed(_: Problem, response: Response, weight: float = 1.0) -> float:
    return weight * len(response.text)


def sleeps_for_odd(problem: Problem, response: Response) -> float:  # noqa: ARG001
    if problem.facts["at"] % 2:
        threading.Event().wait()
    return 1.0


def raises_always(problem: Problem, response: Response) -> float:  # noqa: ARG001
    raise RuntimeError("the judge is broken")


def starts(_problem: Problem, _response: Response) -> float:
    """A process that never ends; its id."""
    return float(subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]).pid)
