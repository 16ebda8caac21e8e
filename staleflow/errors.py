"""What can go wrong and is not a bug: every error that a user can cause is a ``StaleFlowError``.

Its message is one line that says what was wrong, the value seen, and what to write instead. Commands print that line
and end with exit code 2, or 1 if a run got stuck. Anything else is a bug and keeps its traceback.
"""

import signal

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells expect it."""


class StaleFlowError(Exception):
    """Base class of all errors that a user can put right."""

    exit_code = 2


class ConfigError(StaleFlowError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class RunError(StaleFlowError, RuntimeError):
    """A run cannot start or continue."""


def line_of(error: BaseException) -> str:
    """An error of another library as part of a message: its type and text, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def shown(value: object) -> str:
    """A value as part of a message: ``repr`` on one line, and short enough to read."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def ending(code: int | None) -> str:
    """How a process ended, by its exit status, for people."""
    if code is None:
        return "closed its connection"
    if code == -signal.SIGKILL:
        return "killed (SIGKILL; out of memory?)"
    if code < 0:
        try:
            return f"killed ({signal.Signals(-code).name})"
        except ValueError:
            return f"killed (signal {-code})"
    return f"exit code {code}"
