"""Keyed randomness: the same key gives the same number everywhere, different keys give unrelated numbers."""

import math
import pickle
from statistics import NormalDist, correlation, fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.simulate.randomness import Keyed

KEYS = st.lists(st.integers() | st.integers(0, 9) | st.text(max_size=4), max_size=10).map(tuple)


def test_numbers_do_not_change_between_releases_processes_or_pythons():
    keyed = Keyed(7)
    assert keyed.bits("") == 16771264844805492762
    assert keyed.bits("length", 1, 2, 3) == 7932390758331458783
    assert keyed.bits("length", "a", 2) == 2203415679982039077
    assert Keyed(2**70).bits("s", 2**80) == 1177826845529003380
    assert keyed.uniform("x", -1) == 0.6150205101653768
    assert keyed.normal("x", 1, "é") == pytest.approx(1.9521158831993282, rel=1e-14)
    assert keyed.generator("f", 1).random() == 0.3909155771081101


@given(st.integers(), st.text(max_size=5), KEYS)
def test_a_draw_is_a_pure_function_of_seed_stream_and_key(seed: int, stream: str, key: tuple[int | str, ...]):
    first = Keyed(seed).uniform(stream, *key)
    Keyed(seed).normal(stream, *key, 1)
    Keyed(seed).generator(stream, *key).random()
    assert Keyed(seed).uniform(stream, *key) == first
    assert 0 < first < 1


@given(KEYS, KEYS)
def test_no_two_keys_share_a_draw(one: tuple[int | str, ...], other: tuple[int | str, ...]):
    assert (Keyed(1).bits("s", *one) == Keyed(1).bits("s", *other)) == (one == other)


def test_keys_that_look_alike_are_different():
    keys: list[tuple[int | str, ...]] = [
        *[(), (0,), (0, 0), (1,), ("1",), (12,), (1, 2), ("12",), ("1", "2"), (1, "2"), ("1", 2)],
        *[("i1;",), ("s1:a",), ("a", "b"), ("ab",), ("", "ab"), (-1,), (2**64 - 1,), (2**63,), (-(2**63),)],
        *[(0,) * 8, (0,) * 9, (0,) * 10],
    ]
    assert len({Keyed(1).bits("s", *key) for key in keys}) == len(keys)


def test_seeds_and_streams_are_kept_apart():
    pairs = [(1, "1"), (11, ""), (1, ""), (0, "a"), (0, "b"), (-1, "a"), (1, "1\0"), (1, "integers\0"), (2**64, "a")]
    assert len({Keyed(seed).bits(stream, 5) for seed, stream in pairs}) == len(pairs)


def test_the_ends_of_the_interval_are_never_drawn(monkeypatch: pytest.MonkeyPatch):
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(Keyed, "bits", lambda *_, bits=bits: bits)
        assert 0 < Keyed(0).uniform("s") < 1
        assert math.isfinite(Keyed(0).normal("s"))


def test_normal_is_the_quantile_of_uniform():
    keyed = Keyed(3)
    for key in range(50):
        assert keyed.normal("s", key) == NormalDist().inv_cdf(keyed.uniform("s", key))


def test_uniform_and_normal_have_their_moments():
    keyed, n = Keyed(11), 20_000
    uniform = [keyed.uniform("u", i) for i in range(n)]
    assert fmean(uniform) == pytest.approx(1 / 2, abs=0.01)
    assert pvariance(uniform) == pytest.approx(1 / 12, rel=0.03)
    cells = [0] * 20
    for u in uniform:
        cells[int(u * 20)] += 1
    assert sum((count - n / 20) ** 2 / (n / 20) for count in cells) < 43.8  # chi squared, 19 degrees, 0.1 %
    normal = [keyed.normal("z", i) for i in range(n)]
    assert fmean(normal) == pytest.approx(0, abs=0.03)
    assert pvariance(normal) == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("other", ["key", "seed", "stream", "length of the key"])
def test_neighbours_are_uncorrelated(other: str):
    keyed, n = Keyed(5), 10_000
    xs = [keyed.uniform("s", i, 0) for i in range(n)]
    ys = {
        "key": lambda i: keyed.uniform("s", i + 1, 0),
        "seed": lambda i: Keyed(6).uniform("s", i, 0),
        "stream": lambda i: keyed.uniform("t", i, 0),
        "length of the key": lambda i: keyed.uniform("s", i),
    }[other]
    assert abs(correlation(xs, [ys(i) for i in range(n)])) < 0.035


def test_generators_of_different_keys_differ_and_restart_alike():
    first, again, other = (Keyed(1).generator("faults", key) for key in (0, 0, 1))
    draws = [first.random() for _ in range(5)]
    assert draws == [again.random() for _ in range(5)]
    assert draws != [other.random() for _ in range(5)]


def test_a_key_that_is_not_an_integer_or_string_is_refused():
    with pytest.raises(TypeError, match=r"not 0\.5: write round\(x\) or str\(x\)"):
        Keyed(1).uniform("s", 0.5)  # pyright: ignore[reportArgumentType]


def test_survives_pickling_for_worker_processes():
    keyed = Keyed(1)
    keyed.uniform("s", 1)
    assert pickle.loads(pickle.dumps(keyed)) == keyed
