"""Processes for tests that kill them: forked from a server process that has imported everything once, so that one more
costs milliseconds.

There is one such server for each process that runs tests, and it imports what it is told before it starts: so it is
told everything at once, or the second kind of process would import torch anew every time.
"""

import multiprocessing
from typing import Any

KINDS = ["tests.servers.weights_processes", "tests.training.trainer_process", "tests.training.rank_processes"]

START_S = 300.0
"""For the first one: importing takes seconds, and minutes where every core is busy."""


def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(KINDS)
    return found
