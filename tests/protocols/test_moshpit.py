from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.types import PEERS_MAX
from ragtag.protocols.groups.grid import Grid
from ragtag.protocols.groups.keys import MoshpitKeys, RandomKeys, View, n_groups


def groups(keys: list, view: View, round_: int) -> Counter[int]:
    return Counter(k.place(round_, view).key for k in keys)


def test_a_view_is_the_same_however_it_came_about() -> None:
    view = View([3, 1, 2]).joined(9).left(1)
    other = View([9, 2, 3])
    assert view.peers == other.peers == (2, 3, 9)
    assert 9 in view and 1 not in view and view.rank(3) == 1 and len(view) == 3
    assert all(view.hosts(key, 3) == other.hosts(key, 3) for key in (0, 1 << 63, (1 << 64) - 1))
    assert view.joined(3) is view and view.left(7) is view and View([4]).left(4).peers == (4,)
    with pytest.raises(ValueError, match="no peers"):
        View([])


def test_a_death_moves_only_its_own_keys_to_another_host() -> None:
    view = View(range(100))
    keys = [k * (1 << 64) // 1000 for k in range(1000)]
    without = view.left(50)
    for key in keys:
        before, after = view.hosts(key, 1), without.hosts(key, 1)
        assert before == after or before == (50,)
        assert view.hosts(key, 2)[1] == after[0] or before == after


def test_all_peers_stand_in_cells_of_their_own_and_meet_in_full_lines() -> None:
    view = View(range(0, 2048, 2))  # numbers need not be dense
    keys = [MoshpitKeys(me, 7, 32) for me in view.peers]
    for round_ in (0, 1, 2):
        assert sorted(groups(keys, view, round_).values()) == [32] * 32
    assert len({k.cell for k in keys}) == 1024 and {k.grid for k in keys} == {Grid((32, 32))}


def test_where_peers_stand_follows_from_the_seed_in_all_versions() -> None:
    cells, lines = View(range(8)).cells_on(Grid((4, 2)), 7)
    assert cells.tolist() == [6, 5, 3, 2, 7, 4, 0, 1] and lines == ([4, 4], [2, 2, 2, 2])


def test_the_grid_follows_the_live_number() -> None:
    view, keys = View(range(100)), MoshpitKeys(0, 7, 10)
    keys.place(0, view)
    assert keys.grid == Grid((10, 10))
    keys.place(1, View(range(70)))
    assert keys.grid == Grid((9, 8))
    keys.place(2, View(range(7)))
    assert keys.grid == Grid((7,))


def test_the_index_that_was_reduced_is_appended_and_nothing_where_nobody_was_met() -> None:
    keys = MoshpitKeys(0, 7, 4)
    view = View(range(16))
    keys.place(0, view)
    before = keys.cell
    keys.moved(0, None)
    assert keys.cell == before
    keys.moved(1, (before[1] + 1) % 4)
    assert keys.cell == (before[0], (before[1] + 1) % 4)
    keys.moved(2, 60)  # an index from a group that was larger than the side: no cell of the grid
    assert keys.cell == (before[0], (before[1] + 1) % 4)


def test_a_half_empty_grid_is_left_for_random_groups() -> None:
    view = View(range(512))
    keys = [MoshpitKeys(me, 7, 32, Grid((32, 32))) for me in view.peers]
    assert sorted(groups(keys, view, 0).values()) == [32] * 16
    assert all(k.thin for k in keys)
    full = View(range(1000))
    keys[0].place(1, full)
    assert not keys[0].thin


@given(st.integers(2, 130), st.integers(2, 9), st.integers(0, 99))
def test_no_grid_leaves_a_peer_alone(n: int, group: int, seed: int) -> None:
    """Each peer that averages in groups meets another in each round, as long as all views agree."""
    view = View(range(n))
    keys = [MoshpitKeys(me, seed, group) for me in view.peers]
    for round_ in range(4):
        sizes = groups(keys, view, round_)
        assert min(sizes.values()) > 1 and max(sizes.values()) < 2 * group
        assert sum(sizes.values()) == n


def test_peers_whose_views_differ_in_one_peer_meet_in_the_same_random_groups() -> None:
    view = View(range(1000))
    without = view.left(137)
    for round_ in range(5):
        moved = expected = 0
        for me in without.peers:
            keys = RandomKeys(me, 3, 8)
            before, after = keys.place(round_, view), keys.place(round_, without)
            moved += before.key != after.key
            expected += before.most != after.most
        assert moved < 0.14 * len(without)  # one of eight: the one at the edge of each group after the gap
        assert expected < 0.2 * len(without)


@given(st.integers(1, 1024), st.integers(2, PEERS_MAX))
def test_so_many_groups_hold_everybody_and_change_rarely(n: int, group: int) -> None:
    groups_n = n_groups(n, group)
    assert 1 <= groups_n <= max(1, n // group, -(-n // PEERS_MAX))  # groups are no smaller than was asked for
    assert -(-n // groups_n) <= PEERS_MAX
    assert groups_n > 0.9 * (n // group)
    assert len({n_groups(m, 8) for m in range(900, 1000)}) <= 5


def test_random_groups_are_of_one_size_and_new_each_round() -> None:
    view = View(range(900))
    keys = [RandomKeys(me, 7, 32) for me in view.peers]
    sizes = groups(keys, view, 0)
    assert len(sizes) == 28 and set(sizes.values()) == {32, 33}
    places = [k.place(0, view) for k in keys]
    assert all(place.most == sizes[place.key] for place in places)
    assert len({(p.key, p.index) for p in places}) == 900
    assert not set(sizes) & set(groups(keys, view, 1))
    with pytest.raises(ValueError, match="2 to 64"):
        RandomKeys(0, 7, 65)
