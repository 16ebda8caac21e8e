"""Whether a process lives, as seen from outside."""

from pathlib import Path


def alive(pid: int) -> bool:
    """A process that was killed and that nobody has waited for is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
