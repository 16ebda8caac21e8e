"""Randomness that is looked up, not drawn: each number is a function of the seed, a stream's name and a key.

There is no state, so the order of the draws does not matter and one draw never shifts another: two policies under the
same seed meet the same lengths and the same faults, and their difference is the policies' own. The numbers are the
same in every process, on every platform and for every Python version (``normal`` up to the last bit of ``log``).

    keyed = Keyed(seed=7)
    keyed.uniform("length", prompt, sample)             # in (0, 1), the same whenever and wherever it is asked
    keyed.generator("faults", instance).expovariate(1)  # a random.Random of its own, for schedules
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from statistics import NormalDist

Key = int | str

_PACK = [struct.Struct(f"<{count}q").pack for count in range(9)]
_STEP = 2.0**-52
_NORMAL_QUANTILE = NormalDist().inv_cdf


@dataclass(frozen=True, slots=True)
class Keyed:
    """A plain value: copy it, pickle it, compare it. Keys that differ in type differ: ``1`` is not ``"1"``."""

    seed: int

    def bits(self, stream: str, *key: Key) -> int:
        """64 random bits: BLAKE2b of (seed, stream, key)."""
        try:
            packed = _PACK[len(key)](*key)
        except (struct.error, IndexError):
            hasher = _prefix(self.seed, stream, "general").copy()
            hasher.update(_encode(key))
        else:
            hasher = _prefix(self.seed, stream, "integers").copy()
            hasher.update(packed)
        return int.from_bytes(hasher.digest(), "little")

    def uniform(self, stream: str, *key: Key) -> float:
        """A number in the open interval (0, 1), so that any quantile function may be applied to it."""
        # 52 bits, not 53: the largest value is then 1 - 2**-53, which a float can hold without rounding to 1.
        return ((self.bits(stream, *key) >> 12) + 0.5) * _STEP

    def normal(self, stream: str, *key: Key) -> float:
        """Standard normal: the normal quantile of ``uniform`` with the same stream and key."""
        return _NORMAL_QUANTILE(((self.bits(stream, *key) >> 12) + 0.5) * _STEP)

    def generator(self, stream: str, *key: Key) -> Random:
        """A fresh generator, for draws whose number is not known beforehand."""
        return Random(self.bits(stream, *key))


@lru_cache(maxsize=4096)
def _prefix(seed: int, stream: str, kind: str) -> blake2b:
    # The two encodings of a key start from different hashes, so that they cannot meet.
    return blake2b(f"{seed}\0{kind}\0{stream}\0".encode(), digest_size=8)


def _encode(key: tuple[Key, ...]) -> bytes:
    """Any key, so that no two keys give the same bytes: each part says its type and where it ends."""
    parts: list[bytes] = []
    for part in key:
        if isinstance(part, str):
            text = part.encode()
            parts.append(b"s%d:%b" % (len(text), text))
        elif isinstance(part, int):
            parts.append(b"i%d;" % part)
        else:
            raise TypeError(f"a key holds integers and strings, not {part!r}: write round(x) or str(x)")
    return b"".join(parts)
