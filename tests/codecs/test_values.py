"""bfloat16, int8 and 2-bit values: nearest, saturating, exact on what they have made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragtag.codecs.values import from_2bit, from_bf16, from_int8, groups, to_2bit, to_bf16, to_int8
from tests.codecs.vectors import heavy

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

ANY = hnp.arrays(np.float32, st.integers(0, 600), elements=st.floats(width=32))
FINITE = hnp.arrays(
    np.float32, st.integers(0, 600), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(ANY)
def test_bf16_is_torchs_but_saturates(values) -> None:
    ours = from_bf16(to_bf16(values))
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    saturated = np.isinf(theirs) & np.isfinite(values)
    assert np.array_equal(ours[~saturated], theirs[~saturated], equal_nan=True)
    assert np.isfinite(ours[saturated]).all()
    assert np.array_equal(to_bf16(ours[~np.isnan(ours)]), to_bf16(values[~np.isnan(values)]))


@given(FINITE)
@example(np.array([63 * SMALLEST, -SMALLEST], np.float32))
@example(np.array([64 * SMALLEST, -SMALLEST], np.float32))
def test_int8_is_off_by_half_a_scale_at_most(values) -> None:
    scales, steps = to_int8(values)
    assert len(scales) == groups(len(values)) and len(steps) == len(values)
    back = from_int8(scales, steps)
    assert np.isfinite(back).all()
    spread = np.repeat(from_bf16(scales), 256)[: len(values)].astype(np.float64)
    ordinary = np.abs(values) < 3e38  # above, the largest scale saturates
    off = np.abs(back.astype(np.float64) - values)
    vanishing = 63 * SMALLEST  # over 127 it is 0
    assert (off <= np.maximum(spread * 0.501, vanishing))[ordinary].all()
    assert (off <= np.maximum(spread, vanishing)).all()


def test_int8_squared_error() -> None:
    """2e-5 or so of the energy, of the largest entries of a heavy-tailed vector."""
    u = heavy(1_000_000)
    chosen = u[np.abs(u) > np.quantile(np.abs(u), 0.999)]
    off = from_int8(*to_int8(chosen)) - chosen
    assert 5e-6 < float((off**2).sum() / (chosen**2).sum()) < 4e-5


@pytest.mark.parametrize("scale", [0x7C01, 0x7F80, 0x7FC0, 0x8000, 0xFFFF])
def test_scales_that_cannot_be_are_refused(scale) -> None:
    with pytest.raises(ValueError, match="scale"):
        from_int8(np.array([scale], np.uint16), np.ones(3, np.uint8))


def by_all_pairs(magnitudes: np.ndarray) -> float:
    """The least squared error that two levels can have, by trying every cut."""
    found = np.sort(magnitudes.astype(np.float64))
    cuts = [(found[:i], found[i:]) for i in range(1, len(found) + 1)]
    return min(sum(float(((p - p.mean()) ** 2).sum()) for p in cut if len(p)) for cut in cuts)


@given(FINITE)
def test_2bit_keeps_signs_and_stays_within_each_groups_range(values) -> None:
    levels, packed = to_2bit(values)
    assert levels.shape == (groups(len(values)), 2) and len(packed) == (len(values) + 3) // 4
    back = from_2bit(levels, packed, len(values))
    assert np.isfinite(back).all() and back.dtype == np.float32
    assert np.array_equal(np.signbit(back), np.signbit(values))
    for start in range(0, len(values), 256):
        part, got = np.abs(values[start : start + 256]), np.abs(back[start : start + 256])
        assert len(np.unique(got)) <= 2
        low, high = float(part.min()), float(part.max())
        assert low * (1 - 2**-8) - 1e-40 <= float(got.min()) <= float(got.max()) <= high * (1 + 2**-8) + 1e-40


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-100, 100, width=32)))
def test_2bit_levels_are_the_best_two(values) -> None:
    back = from_2bit(*to_2bit(values), len(values))
    off = float(((back - values).astype(np.float64) ** 2).sum())
    energy = float((values.astype(np.float64) ** 2).sum())
    assert off <= by_all_pairs(np.abs(values)) + 2**-15 * energy + 1e-30  # levels are bfloat16


def test_2bit_on_two_magnitudes_is_exact() -> None:
    values = np.array([1, -1, 4, -4, 4, 1, 1], np.float32)
    assert np.array_equal(from_2bit(*to_2bit(values), 7), values)
    assert not from_2bit(*to_2bit(np.zeros(5, np.float32)), 5).any()


def test_2bit_squared_error() -> None:
    """A few hundredths of the energy of what top-k selects, where the signs alone lose a quarter."""
    u = heavy(1_000_000)
    chosen = u[np.abs(u) > np.quantile(np.abs(u), 0.999)]
    energy = float((chosen**2).sum())
    off = from_2bit(*to_2bit(chosen), len(chosen)) - chosen
    flat = np.abs(chosen).mean() * np.sign(chosen) - chosen
    assert float((off**2).sum()) / energy < 0.4 * float((flat**2).sum()) / energy
    assert 0.01 < float((off**2).sum()) / energy < 0.06


@pytest.mark.parametrize("level", [0x7F80, 0x7FC0, 0x8000, 0xFFFF])
def test_levels_that_cannot_be_are_refused(level) -> None:
    with pytest.raises(ValueError, match="level"):
        from_2bit(np.array([[0, level]], np.uint16), np.ones(1, np.uint8), 3)
