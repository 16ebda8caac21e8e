"""What starts processes in ``make test``, ten times in a row, while other work keeps every core busy.

    python scripts/test_busy.py [TIMES] [PYTEST ARGUMENTS]
    python scripts/test_busy.py 3 -m processes          # also those that are marked slow

A test that fails only here is a race, in the product until shown otherwise. Stops at the first failure.
"""

import os
import subprocess
import sys

SPIN = "while True: pass"


def main(times: int = 10, arguments: tuple[str, ...] = ()) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-m",
        "processes and not slow",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        for run in range(1, times + 1):
            print(f"run {run} of {times}", flush=True)
            if failed := subprocess.run(command, check=False).returncode:
                return failed
    finally:
        for each in busy:
            each.kill()
            each.wait()
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    count = int(words.pop(0)) if words and words[0].isdigit() else 10
    sys.exit(main(count, tuple(words)))
