"""No page has two writers, none is lost, and memory is never exceeded, whatever is asked of the engine."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staleflow.rollout import attention
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Request, Result, Sampling
from staleflow.rollout.pages import PagePool, digest
from tests.rollout.conftest import VOCABULARY, Tiny, drain, resume

Models = Callable[..., Tiny]


def check(engine: TorchEngine) -> None:
    """Everything that must hold of the pages at a step boundary."""
    pool, running = engine.pool, engine.scheduler.running
    held = Counter(page for sequence in running.values() for page in sequence.pages)
    assert [held[page] for page in range(pool.total)] == pool.references
    assert pool.used == len(held)
    assert pool.used + pool.free + pool.cached == pool.total
    free, cached = set(pool._free), set(pool._cached)
    assert len(free) == pool.free
    assert not free & cached
    assert not (free | cached) & set(held)
    assert cached <= set(pool._keys), "a cached page that nobody can find"
    assert not free & set(pool._keys), "a free page that somebody could find"
    assert {key: page for page, keys in pool._keys.items() for _, key in keys} == pool._page_of
    writable = [page for sequence in running.values() for page in sequence.pages[sequence.computed // pool.page_size :]]
    assert all(held[page] == 1 for page in writable), "a page that is still to be written has two holders"
    for sequence in running.values():
        assert len(sequence.pages) * pool.page_size >= sequence.computed
        assert len(set(sequence.pages)) == len(sequence.pages)
        table = engine.rows.tables[sequence.row]
        assert table[: len(sequence.pages)].tolist() == sequence.pages
        assert (table[len(sequence.pages) :] == engine.attention.null_page).all()
    rows = [sequence.row for sequence in running.values()]
    assert len(set(rows)) == len(rows) == engine.options.max_running - engine.rows.free
    assert all(sequence.row < 0 and not sequence.pages for sequence in engine.scheduler.waiting)
    assert len(running) + len(engine.scheduler.waiting) == len(engine._requests)


Act = tuple[str, int, int]
NAMES = ["submit", "submit", "submit", "step", "steps", "steps", "interrupt", "abort", "pull", "resume"]
ACTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 30), st.integers(1, 60)), min_size=25, max_size=60)


class Story:
    """Plays acts on an engine whose every result is compared with an engine of its own for each request."""

    def __init__(self, model: Tiny, kv_on_pull: str) -> None:
        self.engine = model.engine(kv_tokens=84, page_size=4, max_running=4, prefill_tokens=9, kv_on_pull=kv_on_pull)
        self.tensors = model.tensors()
        self.requests: dict[str, Request] = {}
        self.away: list[Result] = []
        self.finished: dict[str, Result] = {}
        self.gone: set[str] = set()

    def play(self, acts: list[Act]) -> None:
        for act, which, size in acts:
            self.act(act, which, size)
            check(self.engine)
        for _ in range(3000):
            if not self.engine.busy and not self.away:
                break
            self.resume()
            self.steps(1)
        assert not self.engine.busy
        assert self.engine.pool.used == 0
        assert set(self.finished) | self.gone == set(self.requests)

    def act(self, act: str, which: int, size: int) -> None:
        if act == "submit":
            self.submit(which, size)
        elif act == "step":
            self.steps(1)
        elif act == "steps":
            self.steps(size % 20)
        elif act == "interrupt":
            self.engine.interrupt(self._some(which))
        elif act == "abort":
            self.gone |= set(self._some(which))
            self.engine.abort(self._some(which))
        elif act == "pull":
            self.engine.pull(self._load, self.engine.version + 1)
        elif act == "resume":
            self.resume()

    def submit(self, which: int, size: int) -> None:
        name = f"t{len(self.requests)}"
        group = which % 4  # few prompts, so that pages are shared
        prompt = [(group * 31 + at * 7) % VOCABULARY for at in range(1 + group * 5 + which % 3)]
        request = Request(name, 1, prompt, group=f"g{which % 12}", sampling=Sampling(max_tokens=size))
        self.requests[name] = request
        self.engine.submit([request])

    def steps(self, count: int) -> None:
        for _ in range(count):
            output = self.engine.step()
            assert not output.failed
            self.finished |= {result.name: result for result in output.finished}
            self.away += output.returned
            check(self.engine)

    def resume(self) -> None:
        self.engine.submit([resume(result, self.requests[result.name]) for result in self.away])
        self.away = []

    def _some(self, which: int) -> list[str]:
        return [name for at, name in enumerate(self.engine._requests) if (at + which) % 3 == 0]

    def _load(self, into: Mapping[str, torch.Tensor]) -> int:
        """The same weights under a new number, so that results can be foretold."""
        for name, target in into.items():
            target.copy_(self.tensors[name])
        return self.engine.version + 1


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_on_pull", ["recompute", "keep"])
def test_pages_are_accounted_for_after_every_operation(
    tiny: Models, kv_on_pull: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(attention, "SMALL", 0)  # so that shared pages are attended to as in large models
    expected: dict[tuple[str, int], list[int]] = {}

    @given(ACTS)
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    def stories(acts: list[Act]) -> None:
        story = Story(model, kv_on_pull)
        story.play(acts)
        for name, result in story.finished.items():
            request = story.requests[name]
            assert sum(count for _, count in result.spans) == len(result.tokens) == len(result.logprobs)
            assert result.tokens == alone(model, request, expected)[: len(result.tokens)]

    stories()


def alone(model: Tiny, request: Request, known: dict[tuple[str, int], list[int]]) -> list[int]:
    """What the request gives with an engine to itself; a trajectory of 60 tokens begins like one of 10."""
    key = (request.name, hash(tuple(request.prompt)))
    if key not in known:
        engine = model.engine()
        engine.submit([Request(request.name, 1, request.prompt, sampling=Sampling(max_tokens=60))])
        known[key] = drain(engine)[0][request.name].tokens
    return known[key]


def keys(tokens: list[int], size: int) -> Iterator[bytes]:
    before = b""
    for begin in range(0, len(tokens) // size * size, size):
        before = digest(before, tokens[begin : begin + size])
        yield before


def test_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    pool = PagePool(tokens=16, page_size=4)
    old, new = list(range(8)), list(range(50, 58))
    for tokens in (old, new):
        pages = pool.take(pool.match([], []), 2).pages
        for page, key in zip(pages, keys(tokens, 4), strict=True):
            pool.register(page, 4, key)
        pool.release(pages)
    assert (pool.cached, pool.free) == (4, 0)
    pool.allocate()
    assert len(pool.match(list(keys(old, 4)), old).pages) == 1
    assert len(pool.match(list(keys(new, 4)), new).pages) == 2


def test_same_tokens_after_another_beginning_are_another_prefix() -> None:
    assert list(keys([1, 2, 3, 4], 2))[1] != list(keys([9, 2, 3, 4], 2))[1]
    assert digest(b"", [1, 2]) != digest(b"", [1, 2, 0])
