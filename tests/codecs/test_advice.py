"""The by-pass decision: whichever takes less time, dense where it is a draw, and the rate where it turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragtag.codecs.sparse.advice import Cost, choose, choose_for, fastest

BYTES = st.integers(0, 1 << 40)
SECONDS = st.floats(0, 1e4)
RATES = st.floats(1.0, 1e12)
DENSE = Cost("fp32", 100_000_000, dense=True)
SPARSE = Cost("top-k", 61_000, 0.010, 0.001, 0.0005)


@given(BYTES, BYTES, SECONDS, SECONDS, RATES, SECONDS)
def test_what_takes_less_time_is_sent(dense, sparse, select_s, encode_s, rate, decode_s) -> None:
    choice = choose(dense, sparse, select_s, encode_s, rate, decode_s)
    assert choice.dense_s == dense / rate
    assert choice.sparse_s == pytest.approx(select_s + encode_s + decode_s + sparse / rate)
    assert choice.sparse == (choice.sparse_s < choice.dense_s)
    if choice.sparse:
        assert sparse < dense and choice.gain > 1


@given(BYTES, BYTES, st.floats(1e-6, 1e3), SECONDS)
def test_below_the_break_even_rate_sparse_is_sent_and_above_it_dense(
    dense, sparse, select_s, encode_s
) -> None:
    even = choose(dense, sparse, select_s, encode_s, 1.0).break_even_bytes_per_s
    if even == 0:
        assert sparse >= dense
        return
    assume(even > 1e-6)
    assert choose(dense, sparse, select_s, encode_s, 0.99 * even).sparse
    assert not choose(dense, sparse, select_s, encode_s, 1.01 * even).sparse


def test_a_draw_and_a_free_link_go_to_dense() -> None:
    assert not choose(1000, 1000, 0.0, 0.0, 10.0).sparse
    assert not choose(1000, 500, 50.0, 0.0, 10.0).sparse
    assert choose(1000, 500, 49.9, 0.0, 10.0).sparse
    free = choose(1000, 10, 1e-9, 0.0, math.inf)
    assert not free.sparse and free.dense_s == 0
    assert choose(1000, 10, 0.0, 0.0, 1e9).break_even_bytes_per_s == math.inf
    assert choose(10, 0, 0.0, 0.0, 1.0).gain == math.inf


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ((-1, 1, 0.0, 0.0, 1.0), "0 or more"),
        ((1, -1, 0.0, 0.0, 1.0), "0 or more"),
        ((1, 1, -1.0, 0.0, 1.0), "selecting takes -1.0 s"),
        ((1, 1, 0.0, math.nan, 1.0), "encoding takes nan s"),
        ((1, 1, 0.0, 0.0, 1.0, math.inf), "decoding takes inf s"),
        ((1, 1, 0.0, 0.0, 0.0), "a rate of 0.0"),
        ((1, 1, 0.0, 0.0, math.nan), "a rate of nan"),
    ],
)
def test_what_cannot_have_been_measured(wrong, match) -> None:
    with pytest.raises(ValueError, match=match):
        choose(*wrong)


def test_what_a_peer_sends_in_a_crew() -> None:
    assert [DENSE.sent_bytes(n) for n in (1, 2, 4)] == [0, 100_000_000, 150_000_000]
    assert [SPARSE.sent_bytes(n) for n in (1, 2, 4)] == [0, 61_000, 183_000]
    assert SPARSE.read_s(4) == pytest.approx(0.0015)
    assert Cost("int8", 100, decode_s=1.0, dense=True).read_s(4) == 1.5
    assert Cost("odd", 101, dense=True).sent_bytes(4) == 152


def test_the_fastest_of_a_crew() -> None:
    small = Cost("smaller, slower", 20_000, 0.1, 0.0, 0.0)
    assert fastest(DENSE, [SPARSE, small], 4, 1e4) is small
    assert fastest(DENSE, [SPARSE, small], 4, 1e7) is SPARSE
    assert fastest(DENSE, [SPARSE, small], 4, 1e11) is DENSE
    assert choose_for(DENSE, SPARSE, 4, 1e7).sparse
    with pytest.raises(ValueError, match="2 or more"):
        choose_for(DENSE, SPARSE, 1, 1e7)
