import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.grid import Grid, grid_of, places, shuffled


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
        cell = grid.place(number)
        lines.setdefault(grid.line(cell, axis, seed=1), []).append(cell[axis])
    assert len(lines) == grid.cells // sides[axis]
    assert all(sorted(indices) == list(range(sides[axis])) for indices in lines.values())


def test_lines_of_other_grids_and_axes_have_other_keys() -> None:
    small, large = Grid((4, 4)), Grid((4, 5))
    keys = {g.line((1, 1), axis, seed) for g in (small, large) for axis in (0, 1) for seed in (0, 1)}
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
