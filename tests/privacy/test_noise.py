"""Noise for privacy: its distribution, exactly where it is discrete, and where its key comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from ragtag.privacy.noise import DEVIATION_MAX, NoiseStream


def test_a_seed_gives_the_same_numbers_and_the_system_others() -> None:
    first, again, other = (NoiseStream.of(seed, "noise", 2) for seed in (1, 1, 2))
    words = first.words(8)
    assert np.array_equal(words, again.words(8)) and not np.array_equal(words, other.words(8))
    assert not np.array_equal(words, first.words(8)), "each number is drawn once"
    assert not np.array_equal(NoiseStream.fresh().words(8), NoiseStream.fresh().words(8))


def test_normals_are_normal() -> None:
    drawn = NoiseStream.of(1, "normals").normals(40_000)
    assert kstest(drawn, norm.cdf).pvalue > 0.001
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("deviation", [1, 2, 7])
def test_discrete_noise_has_the_chances_of_a_discrete_gaussian(deviation: int) -> None:
    n = 20_000
    drawn = NoiseStream.of(3, "discrete", deviation).discrete_gaussians(n, deviation)
    reach = 4 * deviation
    values = np.arange(-reach, reach + 1)
    wide = np.arange(-60 * deviation, 60 * deviation + 1)
    chances = np.exp(-(values**2) / (2 * deviation**2)) / np.exp(-(wide**2) / (2 * deviation**2)).sum()
    counts = np.array([(drawn == value).sum() for value in values])
    tails = np.append(counts, n - counts.sum()), np.append(chances, 1 - chances.sum()) * n
    few = tails[1] < 5
    merged = [np.append(part[~few], part[few].sum()) for part in tails]
    assert chisquare(*merged).pvalue > 0.001


def test_wide_discrete_noise_is_nearly_normal() -> None:
    deviation = 1 << 16
    drawn = NoiseStream.of(4, "wide").discrete_gaussians(20_000, deviation)
    assert kstest(drawn / deviation, norm.cdf).pvalue > 0.001
    assert len(np.unique(drawn % 16)) == 16, "every last digit comes about"


def test_deviations_for_which_there_is_no_room_are_refused() -> None:
    stream = NoiseStream.of(1, "x")
    for deviation in (0, DEVIATION_MAX + 1):
        with pytest.raises(ValueError, match="from 1 to"):
            stream.discrete_gaussians(1, deviation)
    assert len(stream.discrete_gaussians(0, 5)) == 0
    assert math.isfinite(float(stream.discrete_gaussians(100, DEVIATION_MAX).std()))
