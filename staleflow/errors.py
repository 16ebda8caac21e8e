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
    return f"{type(error).__name__}: {text_of(error)}".rstrip(": ")[:300]


def text_of(error: BaseException) -> str:
    """What an error says, in one line of UTF-8. Code of users raises it: it may hold anything, or fail to say it."""
    try:
        text = str(error)
    except Exception as another:
        text = f"(its text cannot be made: {type(another).__name__})"
    return " ".join(text.split()).encode(errors="backslashreplace").decode()


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
