"""Whether a row of the data can be sent to a reward worker: checked when it is read, while its line is known."""

from collections.abc import Mapping
from typing import Any

import msgspec

from staleflow.tasks.task import TaskError

LARGEST = 64 * 2**20
"""Most bytes of a row, which is sent to a reward worker with each response."""

_encode = msgspec.msgpack.Encoder().encode


def refuse_unsendable(where: str, row: Mapping[str, Any]) -> None:
    """``TaskError`` if the row cannot be sent; ``where`` names file and line."""
    try:
        size = len(_encode(dict(row)))
    except UnicodeEncodeError as error:
        raise TaskError(f"{where}: half a character ({error.object[error.start]!a}): correct the text") from None
    except OverflowError:
        raise TaskError(f"{where}: an integer of more than 64 bits: write it as a text") from None
    except RecursionError:
        raise TaskError(f"{where}: nested too deeply for a reward worker: write it flat") from None
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}: cannot be sent to a reward worker ({error}): keep to JSON values") from None
    if size > LARGEST:
        raise TaskError(
            f"{where}: a row of {size / 2**20:,.0f} MiB, more than the {LARGEST // 2**20} MiB that can go to a reward "
            "worker with each response: leave large columns out, or write paths instead"
        )
