"""Blocks and owners: the same on every peer, rotating, and moved one by one when owners die."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.rounds.layout import fixed_owners, layout_of, rotating_owners

SIZES = st.integers(1, 64)


@given(st.integers(1, 10_000), SIZES)
def test_blocks_cut_a_vector_into_consecutive_parts(n_chunks: int, n_blocks: int) -> None:
    layout = layout_of(n_chunks, n_blocks)
    assert layout.starts[0] == 0
    assert sum(layout.sizes) == n_chunks
    for block in range(n_blocks):
        span = layout.spans[block]
        assert (span.start, span.stop - span.start) == (layout.starts[block], layout.sizes[block])
        if block:
            assert span.start == layout.spans[block - 1].stop
    assert max(layout.sizes) - min(layout.sizes) <= 1


def test_a_name_that_no_block_has_is_no_blocks_number() -> None:
    layout = layout_of(10, 3, (1, 0, 4))
    assert [layout.number(name) for name in layout.names[::2]] == [0, 2]
    assert layout.number(layout.starts[2] + 1) == -1, "it compares with numbers, as all that comes does"


@given(st.integers(0, 2**32), st.integers(0, 2**32 - 1), SIZES)
def test_owners_are_a_permutation(seed: int, round_: int, n: int) -> None:
    assert sorted(rotating_owners(seed, round_, n, frozenset(range(n)))) == list(range(n))
    assert fixed_owners(n, frozenset(range(n))) == tuple(range(n))


@given(st.integers(0, 2**32), st.integers(2, 64), st.data())
def test_only_a_dead_owners_block_moves(seed: int, n: int, data: st.DataObject) -> None:
    """Views that differ in one peer differ in the owner of one block."""
    everyone = frozenset(range(n))
    alive = data.draw(st.sets(st.integers(0, n - 1), min_size=2).map(frozenset))
    dies = data.draw(st.sampled_from(sorted(alive)))
    for owners in (lambda live: rotating_owners(seed, 7, n, live), lambda live: fixed_owners(n, live)):
        whole, before, after = owners(everyone), owners(alive), owners(alive - {dies})
        for j in range(n):
            assert after[j] in alive - {dies}
            if whole[j] in alive:
                assert before[j] == whole[j]
            if before[j] != dies:
                assert after[j] == before[j]
        lost = [j for j in range(n) if whole[j] == dies]
        assert len(lost) == 1
        assert after[lost[0]] != dies


def test_of_a_row_of_dead_owners_no_peer_takes_all_blocks() -> None:
    """Of 64 peers the first eight die, one after the other: then nobody owns more than three of the blocks
    that they had, and a death takes no more than that along.
    """
    for dead in range(1, 9):
        owners = fixed_owners(64, frozenset(range(dead, 64)))[:dead]
        assert max(Counter(owners).values()) <= 3


def test_every_peer_owns_every_block_in_turn() -> None:
    """600 rounds of 6 peers: each (block, owner) pair about 100 times (5 deviations: 46)."""
    everyone = frozenset(range(6))
    pairs = Counter(pair for r in range(600) for pair in enumerate(rotating_owners(1, r, 6, everyone)))
    assert len(pairs) == 36
    assert all(54 < count < 146 for count in pairs.values())


def test_rounds_and_seeds_rotate_differently() -> None:
    everyone = frozenset(range(16))
    drawn = {rotating_owners(seed, r, 16, everyone) for seed in range(4) for r in range(25)}
    assert len(drawn) == 100


@given(st.integers(0, 2**31), st.integers(4, 32))
def test_what_a_silent_peer_owned_goes_to_one_that_gives_and_to_no_auxiliary(seed: int, n: int) -> None:
    everybody, auxiliary, silent = frozenset(range(n)), frozenset({n - 1}), 0
    whole = rotating_owners(seed, 5, n, everybody, everybody, auxiliary)
    without = rotating_owners(seed, 5, n, everybody - {silent}, everybody, auxiliary)
    moved = whole.index(silent)
    assert without[moved] in everybody - auxiliary - {silent}
    assert without[:moved] + without[moved + 1 :] == whole[:moved] + whole[moved + 1 :]
