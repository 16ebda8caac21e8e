"""TCP between machines: where somebody listens is in a file that only its owner can read, and so is the word to say.

    address = Address(*listener.getsockname(), token())
    write(folder / "control.json", address)
    end = dial(read(folder / "control.json"))       # elsewhere: says the token first
    admitted(first_bytes, address.token)            # here: whether it did

A peer that has vanished without a word is noticed within ``SILENT_S``.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from staleflow.files import write_whole

TOKEN_BYTES = 32
SUFFIX = ".json"
"""Of a file with an address."""
CONNECT_S = 5.0
SILENT_S = 15
"""Unanswered probes for this long end a connection."""


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str
    about: str = ""
    """What is there."""


def token() -> str:
    return secrets.token_hex(TOKEN_BYTES // 2)


def write(path: Path, address: Address) -> None:
    write_whole(path, msgspec.json.encode(address).decode(), mode=0o600)


def read(path: Path) -> Address | None:
    """None: nobody listens yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def dial(address: Address) -> socket.socket:
    """``OSError`` if nobody is there. The token has been said."""
    end = socket.create_connection((address.host, address.port), CONNECT_S)
    try:
        attentive(end)
        end.sendall(address.token.encode())
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end


def admitted(said: bytes | bytearray, token: str) -> bool:
    """Whether the first ``TOKEN_BYTES`` of a connection are the token."""
    return hmac.compare_digest(said, token.encode())


def attentive(end: socket.socket) -> None:
    """Send at once, and notice a peer that is gone: machines that lose their power do not say so."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(AttributeError, OSError):  # names of Linux
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 3)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 3)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
