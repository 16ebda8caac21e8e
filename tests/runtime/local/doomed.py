"""An attempt at a run that dies with all its processes.

    python -m tests.runtime.local.doomed RUN MODEL VERSION AFTER [CHECKPOINT]

All are killed once the version is made, so many seconds have passed and the checkpoint is written, or two more versions
were made, as on a machine that runs out of memory.
"""

import os
import signal
import sys
import time
from pathlib import Path

from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.run import LocalRun
from tests.runtime.local.test_run import run_once


def main(run: str, model: str, version: str, after_s: str, checkpoint: str = "") -> None:
    directory, config = RunDirectory.existing(Path(run))
    due: list[float] = []

    def watch(run: LocalRun) -> None:
        if run.training and run.server.ledger.version >= int(version):
            due.append(time.monotonic() + float(after_s))
            written = (directory.checkpoints / checkpoint).is_dir()
            if (time.monotonic() >= due[0] and written) or run.server.ledger.version >= int(version) + 2:
                for child in run.crew.children.values():
                    os.kill(child.pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    run_once(config, Path(model), directory, watch=watch, tell=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
