"""A mean is held to the values that it names, as near as a codec lets it be, and no nearer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, bf16, fp32, int8
from ragtag.core.seed import generator
from ragtag.core.types import Floats
from ragtag.simulation.check.means import is_mean
from ragtag.simulation.check.rounds import TOLERANCE


def through(codec: Codec, values: Floats) -> Floats:
    out = np.empty_like(values)
    codec.decode(codec.encode(values), out)
    return out


def averaged(codec: Codec, shares: list[Floats], weights: Floats) -> Floats:
    """As the owner, which is the first peer, does it: its own values are not rounded."""
    sent = [shares[0], *(through(codec, share) for share in shares[1:])]
    total = np.sum([share * w for share, w in zip(sent, weights, strict=True)], axis=0, dtype=np.float32)
    return through(codec, np.asarray(total / weights.sum(), np.float32))


def shares_of(codec: Codec, seed: int, n: int, width: int, spread: float) -> list[Floats]:
    """Three rows for each peer. ``width`` values of a row are not 0; rows differ by ``spread`` magnitudes."""
    draws = generator(seed, "test means")
    values = draws.normal(size=(n, 3, codec.elements)) * 10 ** draws.uniform(-spread, spread, (n, 3, 1))
    values[:, :, width:] = 0.0
    return [share.astype(np.float32) for share in values]


@pytest.mark.parametrize("codec", [fp32, bf16, int8], ids=lambda codec: codec.name)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 12),
    width=st.sampled_from([1, 2, 5, 300, 2000]),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_what_a_codec_rounds_is_a_mean(codec: Codec, seed: int, n: int, width: int, spread: float) -> None:
    shares = shares_of(codec, seed, n, width, spread)
    weights = generator(seed, "test means' weights").uniform(0.1, 10.0, n).astype(np.float32)
    mean = averaged(codec, shares, weights)
    assert is_mean(mean, shares, weights.astype(np.float64), TOLERANCE, codec)


@pytest.mark.parametrize("name", DENSE)
def test_what_it_cannot_have_rounded_is_none(name: str) -> None:
    codec, n = DENSE[name], 4
    shares, weights = shares_of(DENSE[name], 1, n, 2000, 0.0), np.ones(n)
    mean = averaged(codec, shares, np.ones(n, np.float32))
    off = 1.2 if codec is int8 else 1.05
    twice, other = [*shares[:-1], 2 * shares[-1]], [*shares[:-1], shares[-1][::-1]]
    assert is_mean(mean, shares, weights, TOLERANCE, codec)
    assert not is_mean(off * mean, shares, weights, TOLERANCE, codec)
    assert not is_mean(mean, twice, weights, TOLERANCE, codec)
    assert not is_mean(mean, other, weights, TOLERANCE, codec)
    assert not is_mean(np.full_like(mean, np.nan), shares, weights, TOLERANCE, codec)
    if codec is not fp32:
        assert not is_mean(mean, shares, weights, TOLERANCE, fp32)
