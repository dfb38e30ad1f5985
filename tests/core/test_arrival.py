"""What has arrived counts the others, whoever they are: of all peers, of a group, of owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.arrival import arrived, others_in
from ragtag.core.types import Outcome, nobodys

ME = 1


def outcome(
    heard: Sequence[set[int]],
    waited_for: tuple[int, ...] = (0, 2, 3),
    averaged: Sequence[bool] | None = None,
    members: tuple[int, ...] = (),
) -> Outcome:
    """heard: bits of each chunk."""
    bits = np.array([sum(1 << bit for bit in chunk) for chunk in heard], np.uint64)
    one = np.zeros((len(heard), 1), np.float32)
    none = nobodys(0, one, one[:, 0], bits, None)
    came = np.array([len(chunk) > 1 for chunk in heard] if averaged is None else averaged, np.bool_)
    return replace(none, averaged=came, waited_for=waited_for, members=members)


@pytest.mark.parametrize(
    ("of", "share"),
    [
        (outcome([{0, 1, 2, 3}] * 2), 1.0),
        (outcome([{0, 1, 2, 3}, {1}]), 0.5),  # own values were kept of one chunk
        (outcome([{0, 1}, {0, 1, 2, 3}]), 4 / 6),  # two were too late at an owner
        (outcome([{0, 2, 3}]), 1.0),  # one's own were lost, and the others are all there
        (outcome([{1}] * 3), 0.0),  # alone, as far as this round tells
        (outcome([{1}], (), [True]), 1.0),  # a crew of one
        (outcome([{0, 1}], ()), 1.0),  # nobody was waited for, and one came
        (outcome([{0, 1, 2}], (0,)), 1.0),  # one stands aside, and came in time
        (outcome([{0, 1, 2, 3}] * 2, averaged=[True, False]), 0.5),
        (outcome([{0, 1}], (7,), members=(7, ME)), 1.0),  # in a group, bits count members
        (outcome([{0, 2}], (7, 90), members=(7, ME, 90)), 1.0),
        (outcome([{0, 1}], (7, 90), members=(7, ME, 90)), 0.5),
        (replace(outcome([{1}, {0, 1}], (0,), [True, False]), stale=(0,)), 0.5),  # blocks of a central state
    ],
)
def test_it_is_the_share_of_what_the_others_sent(of: Outcome, share: float) -> None:
    assert arrived(of, ME) == pytest.approx(share)
    assert arrived(of, ME, alone=True) == 0.0


def test_who_is_in_it() -> None:
    assert others_in(outcome([{1, 0}, {1, 3}]), ME) == {0, 3}
    assert others_in(outcome([{0, 2}], members=(7, ME, 90)), ME) == {7, 90}
    assert others_in(outcome([{1}]), ME) == frozenset()


@given(
    st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=5),
    st.sets(st.integers(0, 6)).map(lambda peers: tuple(sorted(peers - {ME}))),
)
def test_it_lies_between_nothing_and_all(heard: list[set[int]], waited_for: tuple[int, ...]) -> None:
    share = arrived(outcome(heard, waited_for), ME)
    assert 0.0 <= share <= 1.0
    if share == 1.0 and waited_for:
        assert all(set(waited_for) <= chunk for chunk in heard)
