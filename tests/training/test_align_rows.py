"""Rows of an alignment: what was written is read; anything else is passed over."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.wire import CHUNK_BYTES
from ragtag.training.align.rows import (
    PER_ROW,
    Came,
    Given,
    came_rows,
    digest_rows,
    read_came,
    read_digests,
    read_values,
    rows_of,
    value_rows,
)


def vector(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def offered(unit: int, values: np.ndarray, *, sender: int = 1, votes: int = 2, form: int = 7) -> np.ndarray:
    return value_rows(Given(unit, sender, form, votes, values), 9)


@given(st.integers(0, 63), st.integers(0, 100), st.integers(1, 700))
def test_digests_are_read_in_any_order(sender: int, first: int, n: int) -> None:
    digests = np.random.default_rng(n).integers(0, 1 << 32, n).astype(np.uint32)
    rows = digest_rows(sender, 5, first, digests)
    assert rows.shape == (rows_of(n), CHUNK_BYTES) and rows.dtype == np.uint8
    order = np.random.default_rng(0).permutation(len(rows))
    found = read_digests(rows[order], 5, first, n)
    assert list(found.digests) == [sender] and (found.digests[sender] == digests).all()
    assert found.voters == {sender}
    assert read_digests(digest_rows(sender, 5, first, digests, False), 5, first, n).voters == frozenset()
    assert read_digests(rows, 6, first, n).digests == {}, "of another round"
    assert read_digests(rows, 5, first + 1, n).digests == {}, "of other units"
    if len(rows) > 1:
        assert read_digests(rows[1:], 5, first, n).digests == {}, "not all came"


@given(st.integers(1, 2000), st.integers(0, 9))
def test_a_unit_is_read_where_all_of_it_came(n: int, unit: int) -> None:
    values = vector(n)
    rows = offered(unit, values)
    [found] = read_values(rows[::-1], 9, [2000] * 10)
    assert (found.unit, found.sender, found.votes, found.form) == (unit, 1, 2, 7)
    assert found.values.tobytes() == values.tobytes()
    assert read_values(rows[:-1], 9, [2000] * 10) == []
    assert read_values(rows, 8, [2000] * 10) == []
    assert read_values(rows, 9, [n - 1] * 10) == [], "too many values"
    assert read_values(rows, 9, [2000] * unit) == [], "no such unit"
    assert len(read_values(np.concatenate([rows, rows]), 9, [2000] * 10)) == 1


def test_of_two_givers_the_one_with_more_behind_it_counts_and_then_the_lower() -> None:
    few, most, same = offered(0, vector(5, 1), sender=0, votes=1), offered(0, vector(5, 2), votes=3), None
    same = offered(0, vector(5, 3), sender=4, votes=3)
    for rows in ([few, most, same], [same, few, most]):
        [found] = read_values(np.concatenate(rows), 9, [5])
        assert (found.sender, found.votes) == (1, 3)
    half = offered(0, vector(600), sender=0, votes=9)[:1]
    [found] = read_values(np.concatenate([half, few]), 9, [600])
    assert found.sender == 0 and found.votes == 1, "what is not whole counts for nothing"


def test_values_that_are_not_finite_are_refused() -> None:
    for bad in (np.nan, np.inf):
        values = vector(PER_ROW + 3)
        values[-1] = bad
        assert read_values(offered(0, values), 9, [PER_ROW + 3]) == []


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.integers(0, 700), min_size=1, max_size=2))
def test_what_a_giver_had_of_the_last_rounds_is_read_in_any_order(counts: dict[int, int]) -> None:
    came = {number: np.arange(number % 7, number % 7 + n, dtype=np.uint32) for number, n in counts.items()}
    rows = came_rows(3, 9, came)
    [(sender, found)] = read_came(rows[::-1], 9).items()
    assert sender == 3 and list(found) == list(came)
    assert all(np.array_equal(found[number], names) for number, names in came.items())
    assert read_came(rows[1:], 9) == {} == read_came(rows, 8)
    assert not len(came_rows(3, 9, {}))


def test_values_that_lack_rows_are_read_with_what_came_of_these_and_else_not_at_all() -> None:
    came: Came = {8: np.array([5], np.uint32)}
    values = value_rows(Given(0, 1, 7, 2, vector(9), came), 9)
    said = came_rows(1, 9, came)
    [found] = read_values(np.concatenate([values, said]), 9, [9])
    assert found.came[8].tolist() == [5]
    assert not len(read_values(np.concatenate([values, came_rows(2, 9, came)]), 9, [9]))
    broken = said.copy()
    broken[:, 32 + 4] = 3  # so many names, of which there is one
    assert not len(read_values(np.concatenate([values, broken]), 9, [9]))
    [other] = read_values(np.concatenate([values, offered(0, vector(9), sender=4, votes=1)]), 9, [9])
    assert other.sender == 4 and not other.came


@given(st.binary(max_size=4 * CHUNK_BYTES), st.booleans())
def test_noise_is_passed_over(data: bytes, header: bool) -> None:
    rows = np.frombuffer(data[: len(data) // CHUNK_BYTES * CHUNK_BYTES], np.uint8).reshape(-1, CHUNK_BYTES)
    read_digests(rows, 0, 0, 10)
    read_values(rows, 0, [1000] * 10)


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 255)), max_size=6), st.booleans())
def test_a_damaged_header_does_no_harm(flips: list[tuple[int, int]], digests: bool) -> None:
    rows = digest_rows(3, 9, 0, np.arange(300, dtype=np.uint32)) if digests else offered(2, vector(300))
    rows = rows.copy()
    for at, value in flips:
        rows[0, at] = value
    for found in read_digests(rows, 9, 0, 300).digests.values():
        assert found.shape == (300,)
    for given_ in read_values(rows, 9, [400] * 10):
        assert given_.unit < 10 and 0 < len(given_.values) <= 400
