"""Recorded lengths, replayed in file order: one group of rows for each prompt, from the start again at the end.

A trace is a CSV file (``.csv`` or ``.csv.gz``) with the column ``output_tokens`` and perhaps ``prompt_tokens`` and,
where several rows are samples of one prompt, ``group``. Mistakes are reported in one line: file, line, column, the
value seen and what to write instead.

    trace = read_trace("lengths.csv", group_size=16)
    trace.length(prompt=0, sample=3, attempt=0)
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from staleflow.errors import ConfigError, shown
from staleflow.simulate.lengths import require

# Names that public traces use for the same thing (Azure, Mooncake); ours come first.
PROMPT_NAMES = ("prompt_tokens", "input_tokens", "ContextTokens")
OUTPUT_NAMES = ("output_tokens", "GeneratedTokens")
MOST_TOKENS = 1_000_000_000

Record = tuple[str | None, int, int, int]
"""Group, prompt tokens (0 if there is no such column), output tokens, line number."""


@dataclass(frozen=True, slots=True)
class Trace:
    """``outputs[g]`` are the recorded output lengths of group ``g``, ``prompts[g]`` the length of its prompt."""

    prompts: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    has_prompts: bool = True
    """Whether the lengths of prompts were recorded; otherwise all have the length that was given."""

    def __post_init__(self) -> None:
        require(len(self.prompts) > 0, "prompts", self.prompts, "at least one prompt length")
        require(len(self.outputs) == len(self.prompts), "outputs", len(self.outputs), "one group for each prompt")
        for rows in self.outputs:
            require(len(rows) > 0 and min(rows) >= 1, "a group", rows, "at least one length, each from 1 upwards")
        require(min(self.prompts) >= 1, "prompts", min(self.prompts), "lengths from 1 upwards")

    def length(self, prompt: int, sample: int, attempt: int) -> int:  # noqa: ARG002 - a retry replays its row
        rows = self.outputs[prompt % len(self.outputs)]
        return rows[sample % len(rows)]

    def prompt_length(self, prompt: int) -> int:
        return self.prompts[prompt % len(self.prompts)]

    def weighted_lengths(self) -> Iterator[tuple[float, float]]:
        """Every length with its share: prompts are equally likely, and so are the rows of a prompt."""
        for rows in self.outputs:
            share = 1 / (len(self.outputs) * len(rows))
            for row in rows:
                yield share, row

    def weighted_prompt_lengths(self) -> Iterator[tuple[float, float]]:
        for tokens in self.prompts:
            yield 1 / len(self.prompts), tokens

    def with_seed(self, seed: int) -> "Trace":  # noqa: ARG002 - nothing here is random
        return self


def read_trace(path: str | Path, group_size: int = 16, prompt_tokens: int = 512) -> Trace:
    """Rows with the same ``group`` are samples of one prompt; without that column, ``group_size`` rows in a row are.

    ``prompt_tokens`` is the length of all prompts if the file has none.
    """
    require(group_size >= 1, "group_size", group_size, "a whole number from 1 upwards")
    file = _File(Path(path))
    try:
        rows = list(file.rows())
    except csv.Error as cause:
        raise file.error(f"is not CSV ({cause}): write the path of a .csv or .csv.gz trace") from None
    if not rows:
        raise file.error("the file holds no rows: write a header and one row for each trajectory")
    recorded = rows[0][1] > 0
    if not recorded:
        rows = [(group, prompt_tokens, output, line) for group, _, output, line in rows]
    groups = _by_name(file, rows) if rows[0][0] else _consecutive(rows, group_size)
    return Trace(*groups, recorded)


Groups = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The prompts and the outputs of a trace."""


def _by_name(file: "_File", rows: list[Record]) -> Groups:
    prompts: dict[str | None, int] = {}
    outputs: dict[str | None, list[int]] = {}
    for group, prompt, output, line in rows:
        if prompts.setdefault(group, prompt) != prompt:
            raise file.error(
                f"line {line}: group {shown(group)} has prompt_tokens {prompt} here and {prompts[group]} before: "
                "rows of a group share one prompt, so write the same number or another group"
            )
        outputs.setdefault(group, []).append(output)
    return tuple(prompts.values()), tuple(tuple(lengths) for lengths in outputs.values())


def _consecutive(rows: list[Record], group_size: int) -> Groups:
    """The first row of each group gives the prompt: such files record requests that share no prompt."""
    groups = [rows[start : start + group_size] for start in range(0, len(rows), group_size)]
    return tuple(group[0][1] for group in groups), tuple(tuple(row[2] for row in group) for group in groups)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {problem}")

    def rows(self) -> Iterator[Record]:
        reader = csv.DictReader(self._lines())
        header = [name.strip() for name in reader.fieldnames or ()]
        if not header:
            raise self.error("the file is empty: write a header line prompt_tokens,output_tokens and then the rows")
        reader.fieldnames = header
        output, prompt = _column(header, OUTPUT_NAMES), _column(header, PROMPT_NAMES)
        if output is None:
            name, seen = OUTPUT_NAMES[0], shown(",".join(header))
            raise self.error(f"line 1: no column {name}, only {seen}: name it {name} in the header")
        for row in reader:
            line = reader.line_num
            if None in row:
                raise self.error(f"line {line}: more values than the {len(header)} columns: write 1024, not 1,024")
            group = self._group(line, row["group"]) if "group" in header else None
            before = 0 if prompt is None else self._tokens(line, prompt, row[prompt])
            yield group, before, self._tokens(line, output, row[output]), line

    def _tokens(self, line: int, column: str, text: str | None) -> int:
        digits = (text or "").strip()
        if digits.isascii() and digits.isdecimal() and len(digits) <= 10 and 1 <= int(digits) <= MOST_TOKENS:
            return int(digits)
        seen = f"is {shown(digits)}" if digits else "is missing"
        raise self.error(f"line {line}: {column} {seen}: write a whole number of tokens from 1 to {MOST_TOKENS}")

    def _group(self, line: int, text: str | None) -> str:
        if not text or not text.strip():
            raise self.error(f"line {line}: group is missing: write the name of the prompt the row belongs to")
        return text.strip()

    def _lines(self) -> Iterator[str]:
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rt", encoding="utf-8-sig", newline="") as lines:
                text = lines.read()
        except FileNotFoundError:
            raise self.error("no such file: write the path of a .csv or .csv.gz trace") from None
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as cause:
            reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            raise self.error(f"cannot be read ({reason}): write the path of a .csv or .csv.gz trace") from None
        if "\0" in text:
            raise self.error("holds binary data: write the path of a .csv or .csv.gz trace")
        return io.StringIO(text, newline="")


def _column(header: list[str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in header), None)
