"""Where a run says how it is. Nobody has to listen: when the output goes away, the run continues in silence.

out = Output(sys.stdout)
print("loads the tokenizer", file=out)      # also into a pipe that head has closed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import IO


class Output:
    """A file that never fails: silent for good after its first error, a question mark for what it cannot encode."""

    def __init__(self, file: IO[str] | Output) -> None:
        self._file = file
        self._silent = False
        self.encoding: str = getattr(file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, text: str) -> int:
        self._safely(lambda: self._file.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._safely(self._file.flush)

    def _safely(self, act: Callable[[], object]) -> None:
        if self._silent:
            return
        try:
            act()
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._silent = True
