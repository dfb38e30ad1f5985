"""bfloat16 and int8 values: nearest, saturating, exact on what they have made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragtag.codecs.values import from_bf16, from_int8, groups, to_bf16, to_int8
from tests.codecs.vectors import heavy

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
def test_int8_is_off_by_half_a_scale_at_most(values) -> None:
    scales, steps = to_int8(values)
    assert len(scales) == groups(len(values)) and len(steps) == len(values)
    back = from_int8(scales, steps)
    assert np.isfinite(back).all()
    spread = np.repeat(from_bf16(scales), 256)[: len(values)].astype(np.float64)
    ordinary = np.abs(values) < 3e38  # above, the largest scale saturates
    off = np.abs(back.astype(np.float64) - values)
    assert (off <= spread * 0.501 + 1e-40)[ordinary].all()
    assert (off <= spread).all()


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
