"""Searching ``samples.jsonl``: no more than 64 MiB by its own limit, held as it is and decoded where a line may match.

texts = Texts(directory.samples)
texts.read_on()
found, before = texts.search("apples", limit=20)        # the latest first; continue with before=before
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from staleflow.dash.lines import Lines
from staleflow.run.bounded_log import MOST_BYTES
from staleflow.run.samples import Sample


class Texts:
    def __init__(self, path: Path) -> None:
        self._file = Lines(path)
        self._lines: list[bytes] = []
        self._bytes = 0
        self._decoder = msgspec.json.Decoder(Sample)

    def __len__(self) -> int:
        return len(self._lines)

    def read_on(self) -> bool:
        """Whether something was new."""
        news = False
        while True:
            again, lines = self._file.read()
            if again:
                self._lines, self._bytes = [], 0
            self._lines += lines
            self._bytes += sum(map(len, lines))
            while self._bytes > 2 * MOST_BYTES:
                self._bytes -= len(self._lines.pop(0))
            news = news or again or bool(lines)
            if not lines:
                return news

    def search(
        self, text: str = "", step: int | None = None, name: str = "", before: int = 0, limit: int = 20
    ) -> tuple[list[Sample], int]:
        """Of samples with this text in prompt, response or name; and from where to continue (0: that was all)."""
        words = msgspec.json.encode(text)[1:-1].lower()
        of_step = b'"step":%d,' % step if step is not None else b""
        of_name = msgspec.json.encode(name)[1:-1]
        found: list[Sample] = []
        lines = self._lines
        at = min(before, len(lines)) if before else len(lines)
        while at > 0:
            line = lines[at - 1]
            if of_step in line and of_name in line and words in line.lower():
                if len(found) == limit:
                    return found, at
                if (sample := self._sample(line)) is not None and _has(sample, text, step, name):
                    found.append(sample)
            at -= 1
        return found, 0

    def _sample(self, line: bytes) -> Sample | None:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):  # torn
            return None


def _has(sample: Sample, text: str, step: int | None, name: str) -> bool:
    """Not only in the names of fields."""
    prompt: Any = sample.prompt
    said = prompt if isinstance(prompt, str) else "\n".join(str(each.get("content", "")) for each in prompt)
    here = f"{sample.name}\n{said}\n{sample.response}".lower()
    return text.lower() in here and step in (None, sample.step) and name in ("", sample.name)
