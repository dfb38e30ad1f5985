import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.groups.grid import Grid, cells_of, grid_of, line_counts, places, shuffled


@given(st.integers(1, 20_000), st.integers(2, 64))
def test_a_grid_holds_all_and_little_more(n: int, group: int) -> None:
    grid = grid_of(n, group)
    assert grid.cells >= n and max(grid.sides) <= group
    assert max(grid.sides) - min(grid.sides) <= 1
    assert n > grid.cells * (1 - 1 / max(grid.sides))
    assert max(grid.sides) < 4 or not grid.thin(n)
    assert len(grid.sides) == 1 or group ** (len(grid.sides) - 1) < n  # as few axes as hold them


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_lines_part_the_cells_along_each_axis(sides: list[int], round_: int) -> None:
    grid = Grid(tuple(sides))
    axis = grid.axis(round_)
    lines: dict[int, list[int]] = {}
    for number in range(grid.cells):
        cell = grid.cell(number)
        lines.setdefault(grid.line_key(cell, axis, seed=1), []).append(cell[axis])
    assert len(lines) == grid.cells // sides[axis]
    assert all(sorted(indices) == list(range(sides[axis])) for indices in lines.values())


def test_lines_of_other_grids_and_axes_have_other_keys() -> None:
    small, large = Grid((4, 4)), Grid((4, 5))
    keys = {g.line_key((1, 1), axis, seed) for g in (small, large) for axis in (0, 1) for seed in (0, 1)}
    assert len(keys) == 8


def test_a_grid_is_thin_where_random_groups_mix_better() -> None:
    grid = Grid((32, 32))
    golden = (math.sqrt(5) - 1) / 2
    assert grid.thin(512) and grid.thin(int(golden * 1024) - 2)
    assert not grid.thin(768) and not grid.thin(int(golden * 1024) + 2)
    assert not Grid((32,)).thin(2)  # one group has nobody to be mixed with


@pytest.mark.parametrize("sides", [(), (0,), (65, 2), (64,) * 4])
def test_impossible_grids_are_refused(sides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid of sides"):
        Grid(sides)


@pytest.mark.parametrize(("n", "group"), [(0, 8), (8, 1), (8, 65), (1 << 21, 8)])
def test_impossible_crews_are_refused(n: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"group|grid"):
        grid_of(n, group)


def test_places_is_the_inverse_of_shuffled() -> None:
    order, where = shuffled(5, 100), places(5, 100)
    assert sorted(order) == list(range(100)) and all(where[order[i]] == i for i in range(100))


@pytest.mark.parametrize(("n", "group"), [(1, 4), (8, 4), (50, 8), (900, 8), (1000, 8), (1024, 32)])
def test_each_peer_stands_in_a_cell_of_its_own_and_all_count_the_same_on_each_line(
    n: int, group: int
) -> None:
    grid, peers = grid_of(n, group), tuple(range(0, 3 * n, 3))
    cells = [grid.cell(int(number)) for number in cells_of(grid, 7, peers)]
    assert len(set(cells)) == n
    for axis, count in enumerate(line_counts(grid, 7, peers)):
        assert sum(count) == n and len(count) == grid.cells // grid.sides[axis]
        for number in {grid.line_number(cell, axis) for cell in cells}:
            assert count[number] == sum(grid.line_number(cell, axis) == number for cell in cells)


def test_lines_with_one_number_have_one_key() -> None:
    grid = Grid((3, 4, 2))
    for axis in range(3):
        keys = {
            (grid.line_number(c, axis), grid.line_key(c, axis, 1)) for c in map(grid.cell, range(grid.cells))
        }
        assert len(keys) == len({number for number, _ in keys}) == grid.cells // grid.sides[axis]


@pytest.mark.parametrize(("n", "group", "most"), [(8, 4, 4), (50, 8, 4), (1000, 8, 6), (1024, 32, 30)])
def test_a_death_moves_few_of_the_others(n: int, group: int, most: int) -> None:
    """Views of a large crew nearly always differ. With ranks in a permutation half of all would move."""
    grid, peers = grid_of(n, group), tuple(range(n))
    before = cells_of(grid, 7, peers)
    assert len(set(before)) >= min(n, grid.cells) // 2
    for dead in range(0, n, max(1, n // 12)):
        after = cells_of(grid, 7, peers[:dead] + peers[dead + 1 :])
        assert (np.delete(before, dead) != after).sum() <= most


def test_more_peers_than_cells_share_them() -> None:
    assert np.bincount(cells_of(Grid((2, 2)), 7, tuple(range(9)))).tolist() == [3, 2, 2, 2]


@pytest.mark.parametrize("sides", [(4, 4), (2, 3, 4), (5,)])
def test_on_a_full_grid_the_mean_is_exact_after_as_many_rounds_as_it_has_axes(sides: tuple[int, ...]) -> None:
    """Section 3.1 of the paper; and not a round sooner."""
    grid = Grid(sides)
    cells = [grid.cell(number) for number in range(grid.cells)]
    values, spread = [float(number**2) for number in range(grid.cells)], []
    for round_ in range(3, 3 + len(sides)):
        lines: dict[int, list[int]] = {}
        for number, cell in enumerate(cells):
            lines.setdefault(grid.line_number(cell, grid.axis(round_)), []).append(number)
        for line in lines.values():
            mean = sum(values[number] for number in line) / len(line)
            for number in line:
                values[number] = mean
        spread.append(max(values) - min(values))
    assert spread[-1] < 1e-9 < min(spread[:-1], default=1.0)
