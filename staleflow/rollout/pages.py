"""Paged KV memory: who holds which page, which pages can be shared, and which only cache a prefix.

A page holds the KV entries of ``page_size`` consecutive tokens. Every page is exactly one of

- *used*: held by one or more sequences (its reference count),
- *cached*: held by none, but its content is known by a key, so a sequence with the same prefix can take it again,
- *free*.

A page's key is a hash of all tokens up to its last filled entry. All content stems from the present weights: ``forget``
drops every key when they change, which is why a key needs no version. A full page is never written again, so any
number may share it. A page that is partly filled has one writer; another sequence gets a copy of it. Its writer only
appends, so a key for its first entries stays true. ::

    pool = PagePool(tokens=4096, page_size=16)
    prefix = pool.match(chain, tokens)      # what is there already
    pages = pool.take(prefix, count=7)      # seven pages, the shared ones first
    pool.release(pages)
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import NamedTuple

Key = bytes


def digest(before: Key, tokens: Sequence[int]) -> Key:
    """The key of a page with ``tokens`` that follows the page with key ``before``."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Prefix(NamedTuple):
    """What is known of a sequence: whole pages to share, and perhaps a partly filled one to continue."""

    pages: tuple[int, ...] = ()
    tail: int | None = None
    tail_tokens: int = 0
    adopt: bool = False
    """No sequence holds the tail, so it can be taken over; otherwise it must be copied."""


class Taken(NamedTuple):
    pages: list[int]
    copy: tuple[int, int] | None
    """(from, to): to be carried out before anything is written."""


class PagePool:
    def __init__(self, tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.total = tokens // page_size
        self.references: list[int] = []
        """How many sequences hold each page."""
        self._every = list(range(self.total))
        self._free: list[int] = []
        """A heap: the lowest goes first, so that pages in use lie close together and can be read in place."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._page_of: dict[Key, int] = {}
        self._keys: dict[int, list[tuple[int, Key]]] = {}
        """The keys of a page, each with the number of entries that it covers."""
        self.clear()

    def clear(self) -> None:
        """Every page is free, whoever held it."""
        self.references = [0] * self.total
        self._free = self._every.copy()
        self._cached.clear()
        self._page_of.clear()
        self._keys.clear()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return len(self._free) + len(self._cached)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, chain: Sequence[Key], tokens: Sequence[int]) -> Prefix:
        """The longest known prefix of ``tokens``, whose full pages have the keys ``chain``."""
        pages: list[int] = []
        for key in chain:
            page = self._page_of.get(key)
            if page is None:
                return Prefix(tuple(pages))
            pages.append(page)
        rest = tokens[len(pages) * self.page_size :]
        if not rest:
            return Prefix(tuple(pages))
        key = digest(chain[-1] if chain else b"", rest)
        tail = self._page_of.get(key)
        if tail is None:
            return Prefix(tuple(pages))
        longest = max(filled for filled, _ in self._keys[tail])
        adopt = not self.references[tail] and longest == len(rest)
        return Prefix(tuple(pages), tail, len(rest), adopt)

    def room_for(self, prefix: Prefix, count: int) -> int:
        """Pages that would be left after ``take(prefix, count)``; negative if it cannot be done."""
        idle = sum(not self.references[page] for page in prefix.pages)
        return self.available - idle - (count - len(prefix.pages))

    def take(self, prefix: Prefix, count: int) -> Taken:
        """``count`` pages for a sequence, which begin with what is known. Ask ``room_for`` first."""
        for page in prefix.pages:
            self._hold(page)
        pages = list(prefix.pages)
        copy = None
        if prefix.tail is not None:
            if prefix.adopt:
                self._hold(prefix.tail)
                pages.append(prefix.tail)
            else:
                pages.append(self.allocate())
                copy = (prefix.tail, pages[-1])
        while len(pages) < count:
            pages.append(self.allocate())
        return Taken(pages, copy)

    def allocate(self) -> int:
        """An exclusive page; the least recently used prefix goes if need be. Ask ``available`` first."""
        if self._free:
            page = heappop(self._free)
        else:
            page, _ = self._cached.popitem(last=False)
            self._unkey(page)
        self.references[page] = 1
        return page

    def register(self, page: int, filled: int, key: Key) -> None:
        """The first ``filled`` entries of ``page`` are computed and known by ``key``. The first such page is kept."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._keys.setdefault(page, []).append((filled, key))

    def release(self, pages: Sequence[int]) -> list[int]:
        """A sequence lets go of its pages. Returns those that no one holds now.

        The last page becomes the oldest of them in the cache: without its beginning a prefix is worth nothing.
        """
        idle: list[int] = []
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page]:
                continue
            idle.append(page)
            if page in self._keys:
                self._cached[page] = None
            else:
                heappush(self._free, page)
        return idle

    def discard(self, pages: Sequence[int]) -> None:
        """Forget the content of these pages: it is not to be trusted."""
        for page in pages:
            self._unkey(page)
            if page in self._cached:
                del self._cached[page]
                heappush(self._free, page)

    def forget(self) -> None:
        """The weights changed: no content is known any more. Pages in use stay with their holders."""
        self._page_of.clear()
        self._keys.clear()
        self._free.extend(self._cached)
        heapify(self._free)
        self._cached.clear()

    def _hold(self, page: int) -> None:
        if not self.references[page]:
            del self._cached[page]
        self.references[page] += 1

    def _unkey(self, page: int) -> None:
        for _, key in self._keys.pop(page, ()):
            del self._page_of[key]
