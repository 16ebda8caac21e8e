"""Tokens and log-probabilities: whole, compact, within the memory limit, and nothing that cannot be true."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.protocol import StalenessLedger
from staleflow.servers import payloads as module
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.payloads import (
    TOKEN_BYTES,
    BadReportError,
    Chunk,
    Limits,
    Payloads,
    are_logprobs,
    pack,
    range_of,
)
from staleflow.servers.trajectories import TrajectoryServer
from tests.servers.random_server import LIMITS, RandomActs, content, image, new_server
from tests.servers.small_server import Source

repeatable = settings(derandomize=True, deadline=None)


def some(limits: Limits = LIMITS) -> Payloads:
    payloads = Payloads(limits)
    payloads.admit("p0", ["p0/0", "p0/1"])
    return payloads


@repeatable
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_chunks_that_overlap_give_each_token_once(steps: list[tuple[int, int]]) -> None:
    payloads, known = some(), 0
    for back, more in steps:
        total = min(known + more, LIMITS.max_tokens)
        news = payloads.checked("p0/0", known, total, content("p0/0", max(0, known - back), total))
        if news is not None and news.tokens:
            payloads.add("p0/0", news)
        known = total
    expected = content("p0/0", 0, known)
    assert payloads.tokens("p0/0").tobytes() == expected.tokens
    assert payloads.logprobs("p0/0").tobytes() == expected.logprobs
    assert payloads.bytes == known * TOKEN_BYTES
    assert payloads.claimed == 2 * LIMITS.max_tokens * TOKEN_BYTES
    payloads.seal("p0/0")
    assert payloads.claimed == LIMITS.max_tokens * TOKEN_BYTES + payloads.bytes
    for name in ("p0/0", "p0/1", "p0"):
        payloads.drop([name])
    assert payloads.bytes == payloads.claimed == 0


BAD = {
    "is nan: it must be <= 0": Chunk.of(0, [1, 2], [-1.0, math.nan]),
    "is -inf: it must be <= 0": Chunk.of(0, [1, 2], [-math.inf, -1.0]),
    "is 0.5: it must be <= 0": Chunk.of(0, [1, 2], [0.5, -1.0]),
    "has token 50000, outside the vocabulary of 50000": Chunk.of(0, [1, 50_000], [-1.0, -1.0]),
    "has token -1, outside": Chunk.of(0, [-1, 2], [-1.0, -1.0]),
    "must be one log-probability for each token": Chunk.of(0, [1, 2], [-1.0]),
    "sent tokens 1 to 3 of 2, but 0 are known: send all from token 0 on": Chunk.of(1, [1, 2], [-1.0, -1.0]),
    "sent tokens 0 to 1 of 2": Chunk.of(0, [1], [-1.0]),
    "reports 2 tokens, but sent only the first 0": None,
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_true_is_refused_by_name_and_leaves_no_trace(message: str) -> None:
    payloads = some()
    with pytest.raises(BadReportError, match=f"trajectory p0/0.*{message}"):
        payloads.checked("p0/0", 0, 2, BAD[message])
    assert payloads.bytes == 0


def test_more_tokens_than_allowed_are_refused() -> None:
    with pytest.raises(BadReportError, match="trajectory p0/0 reports 41 tokens, more than max_tokens=40"):
        some().checked("p0/0", 0, 41, content("p0/0", 0, 41))


def test_two_engines_that_write_to_one_trajectory_are_noticed() -> None:
    payloads = some()
    payloads.add("p0/0", content("p0/0", 0, 5))
    other = Chunk.of(3, [7, 7, 7], [-1.0] * 3)
    with pytest.raises(BadReportError, match=r"trajectory p0/0: token 3 is .* and was sent again as 7"):
        payloads.checked("p0/0", 5, 6, other)


@pytest.mark.parametrize(("length", "ids"), [(0, b""), (3, bytes(8)), (10_001, bytes(40_004))])
def test_a_prompt_of_an_impossible_length_is_refused(length: int, ids: bytes) -> None:
    with pytest.raises(BadReportError, match=r"prompt 7 has .* tokens.*leave the prompt out"):
        some().checked_prompt(7, length, ids)


# The memory limit


@pytest.mark.parametrize("seed", range(5))
def test_the_memory_limit_is_never_passed_and_the_run_continues(seed: int) -> None:
    prompts = Source(first=3)
    least = 2 * Limits(40, 400, 50_000).group_bytes(3)
    limits = Limits(40, 400, 50_000, memory=least)
    server = TrajectoryServer(StalenessLedger(2, 2), 2, 1, MemoryJournal(keep=False), Payloads(limits))
    payloads, short = server.payloads, 0
    assert payloads is not None
    acts = RandomActs(server, Random(seed))
    for _ in range(6_000):
        acts.act()
        server.admit(prompts)
        short += server.short_of_memory
        assert payloads.bytes <= payloads.claimed <= least
    assert short > 100, "the limit was never felt"
    assert server.ledger.version > 20, "the limit stopped the run"


def test_a_limit_too_small_for_one_step_is_refused_at_the_start() -> None:
    limits = Limits(1_000, 100, 50_000, memory=100_000)
    with pytest.raises(ValueError, match=r"cannot hold one step of 8 groups of 4 .* set it to at least 259,200"):
        TrajectoryServer(StalenessLedger(8, 1), 4, 0, MemoryJournal(), Payloads(limits))


# Batches


def test_a_batch_is_packed_whole() -> None:
    server = new_server(MemoryJournal())
    acts = RandomActs(server, Random(3))
    while not server.ledger.taken:
        acts.act()
    groups = [server.groups[name] for name in server.leased]
    rows = server.rows(groups)
    assert [row.name for row in rows] == [m.name for g in groups for m in g.members if m.state == "complete"]
    packed = pack(rows)
    for index, row in enumerate(rows):
        part = slice(packed.starts[index], packed.starts[index + 1])
        prompt = packed.prompt_lengths[index]
        assert np.array_equal(packed.tokens[part], np.concatenate([row.prompt, row.tokens]))
        assert np.array_equal(packed.logprobs[part][prompt:], row.logprobs)
        assert not packed.logprobs[part][:prompt].any()
        assert row.tokens.tobytes() == content(row.name, 0, row.tokens.size).tokens
        assert packed.rewards[index] == row.reward


def test_rows_share_the_memory_of_the_server() -> None:
    server = new_server(MemoryJournal())
    acts = RandomActs(server, Random(3))
    while not server.ledger.taken:
        acts.act()
    assert server.payloads is not None
    (row, *_) = server.rows(server.groups[name] for name in server.leased)
    assert np.shares_memory(row.tokens, server.payloads.tokens(row.name))
    with pytest.raises(ValueError, match="read-only"):
        row.tokens[0] = 1


def test_packing_nothing_gives_nothing() -> None:
    assert pack([]).tokens.size == 0


def test_a_server_without_payload_has_no_rows() -> None:
    server = TrajectoryServer(StalenessLedger(1, 1), 1, 0, MemoryJournal())
    with pytest.raises(ValueError, match="keeps no payload"):
        server.rows([])


# Reports that are no news, and reports that cannot be true


def running(server: TrajectoryServer) -> str:
    server.admit(Source(first=3))
    placed = server.place("p0/0", "i0", 0)
    assert placed is not None
    return placed.name


def test_refusals_name_the_trajectory_and_the_reason() -> None:
    server, heard = new_server(MemoryJournal()), list[str]()
    server.on_refused = lambda name, why: heard.append(f"{name}: {why}")
    running(server)
    assert not server.stream("p9/9", 1, ((0, 1),), content("p9/9", 0, 1))
    assert not server.generated("p0/0", 4, ((0, 1),), content("p0/0", 0, 1))
    assert not server.give_back("p0/1", 0, ())
    assert heard == [
        "p9/9: no such trajectory is live",
        "p0/0: it is in epoch 1, the report is of epoch 4",
        "p0/1: it is queued",
    ]


@pytest.mark.parametrize("call", ["stream", "generated", "give_back"])
def test_a_version_from_the_future_and_a_rewritten_past_are_refused(call: str) -> None:
    server = new_server(MemoryJournal())
    name = running(server)
    assert server.stream(name, 1, ((0, 3),), content(name, 0, 3))
    before = image(server)
    for spans, message in (
        (((0, 3), (9, 1)), "has tokens of version 9, but the newest that can exist is 0"),
        (((0, 2), (0, 2)), "which do not continue"),
    ):
        with pytest.raises(BadReportError, match=f"trajectory p0/0 .*{message}"):
            getattr(server, call)(name, 1, spans, content(name, 0, 4))
    assert image(server) == before


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -1.0, 0.0005, 0.01, -3e38])


@repeatable
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.lists(NUMBERS, max_size=20))
def test_short_chunks_are_checked_as_long_ones_are(ids: list[int], logprobs: list[float]) -> None:
    chunk = Chunk.of(0, ids, logprobs)
    with pytest.MonkeyPatch.context() as patch:
        short = range_of(chunk.tokens), are_logprobs(chunk.logprobs)
        patch.setattr(module, "FEW_BYTES", 0)
        assert short == (range_of(chunk.tokens), are_logprobs(chunk.logprobs))
    assert short[0] == ((min(ids), max(ids)) if ids else (0, 0))
    assert short[1] == all(
        math.isfinite(each) and each <= module.LOGPROB_SLACK for each in np.asarray(logprobs, np.float32).tolist()
    )
