"""Selections by an estimated threshold: GaussianK, DGC's sampling, SIDCo's exponential fit.

Their counts are about k, not k. Where a paper's estimate selects nothing, the largest entry is selected;
where it selects more than ``EXCESS_MAX`` times k, only the largest of those are.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from ragtag.codecs.sparse.selection import (
    FLOAT_MAX,
    NONE,
    PASS,
    Indices,
    Selection,
    Selector,
    State,
    at_least,
    bounded,
    largest_of,
    magnitudes,
    require_finite,
    require_k,
    require_vector,
    select_at,
    stateless,
)
from ragtag.codecs.sparse.topk import sampled_top_k, top_k
from ragtag.core.seed import uniforms
from ragtag.core.types import Floats

GAUSSIAN_ROUNDS = 3
DGC_SHARE = 0.01
DGC_LOW, DGC_HIGH, DGC_ROUNDS = 0.8, 1.3, 10
SIDCO_FIRST = 0.25
SIDCO_STAGES = 6
SIDCO_EVERY = 5
SIDCO_OFF = 0.2


def gaussian_k(u: Floats, k: int, *, strict: bool = False) -> Selection:
    """GaussianK: the threshold that would be right if ``u`` were normal, corrected at most three times.

    Shi, Chu, Cheung, See 2019 (arXiv 1911.08772), algorithm 1: t = mu + sigma z, z the normal's quantile at
    1 - k/(2d); below 2k/3 selected, t is halved, above 4k/3 it grows by half. Unlike the published code, the
    third correction is used. strict: exactly k: the largest of what was selected, or where that is
    less, of all (so the result is top-k's).

    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    if not d:
        return NONE
    least = gaussian_threshold(u, k)
    for _ in range(GAUSSIAN_ROUNDS):
        found, count = _above(u, least, k)
        if count < 2 * k / 3:
            least *= 0.5
        elif count > 4 * k / 3:
            least *= 1.5
        else:
            break
    else:
        found, count = _above(u, least, k)
    if not strict:
        return _bound(u, k, found, count)
    return largest_of(u, found, k) if k <= count == len(found) else sampled_top_k(u, k)


def gaussian_threshold(u: Floats, k: int) -> float:
    """GaussianK's first threshold: mean plus the two-sided normal quantile of k/d, in standard deviations.

    Raises NotFinite where the mean or deviation is not (then some value is not, or is too large to square).
    """
    total = squares = 0.0
    for start in range(0, len(u), PASS):
        part = u[start : start + PASS].astype(np.float64)
        total += float(part.sum())
        squares += float(part @ part)
    if not math.isfinite(squares):
        require_finite(u)
    mean = total / len(u)
    deviation = math.sqrt(max(0.0, squares / len(u) - mean * mean))
    quantile = NormalDist().inv_cdf(max(0.5, 1 - k / len(u) / 2))
    return mean + deviation * quantile


def dgc(u: Floats, k: int, key: int) -> Selection:
    """DGC: the threshold is the top of a random sample of 1 %.

    Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018, section 5 (hierarchical selection):
    where more than 1.3 k pass, the top k of them are taken; below .8 k, the threshold falls by a fifth, at
    most ten times. A sample holds 1,000 values at least, or the whole vector.

    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    if not d:
        return NONE
    size = max(min(d, 1000), math.ceil(d * DGC_SHARE))
    drawn = magnitudes(u, (uniforms(key, size) * d).astype(np.int64)).view(np.float32)
    if not np.isfinite(drawn).all():
        require_finite(u)
    rank = max(1, round(k * size / d))
    least = float(np.partition(drawn, size - rank)[size - rank])
    for _ in range(DGC_ROUNDS):
        found, count = _above(u, least, k)
        if count >= DGC_LOW * k:
            break
        least *= DGC_LOW
    else:
        found, count = _above(u, least, k)
    if count > DGC_HIGH * k:
        return largest_of(u, found, k) if count == len(found) else top_k(u, k)
    return _bound(u, k, found, count)


def sidco(u: Floats, k: int, stages: int) -> Selection:
    """SIDCo with exponential fits: |u| above each threshold is taken for exponential, to find the next one.

    Abdelmoniem, Elzanaty, Alouini, Canini, "An efficient statistical-based gradient compression technique
    for distributed training systems", MLSys 2021, section 2.3: t += mean(|u| - t) log(1 / share), over what
    is above t; the first stage keeps a quarter, the others the rest in equal shares.

    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    require_finite(u)
    if not d:
        return NONE
    ratio = k / d
    first = max(ratio, SIDCO_FIRST) if stages > 1 else ratio
    shares = [first] + [(ratio / first) ** (1 / max(1, stages - 1))] * (stages - 1)
    above, least = np.abs(u), 0.0
    for share in shares:
        if not len(above):
            break
        excess = float(above.mean(dtype=np.float64)) - least
        least += excess * math.log(1 / share)
        above = above[above >= np.float32(min(least, FLOAT_MAX))]
    found, count = _above(u, least, k)
    return _bound(u, k, found, count)


def _sidco(u: Floats, k: int, state: State, key: int) -> Selection:
    """One round; every few rounds, when the mean count was off by more than a fifth, one stage more.

    state: stages, entries selected and rounds since the number of stages was last looked at. The paper
    moves the number both ways; a fit to the far tail alone is never worse, so here it only grows.
    """
    chosen = sidco(u, k, int(state[0]))
    state[1] += len(chosen.indices)
    state[2] += 1
    if state[2] >= SIDCO_EVERY:
        off = abs(state[1] / state[2] / k - 1) > SIDCO_OFF
        state[:] = min(SIDCO_STAGES, state[0] + off), 0, 0
    return chosen


def _above(u: Floats, least: float, k: int) -> tuple[Indices, int]:
    """What is at least a threshold; one of 0 or less lets pass whatever is not 0."""
    bits = 1 if not least > 0 else max(1, int(np.float32(min(least, FLOAT_MAX)).view(np.uint32)))
    return at_least(u, bits, bounded(k, len(u)))


def _bound(u: Floats, k: int, found: Indices, count: int) -> Selection:
    """Never nothing, never without bound."""
    if count == 0:
        return top_k(u, 1)
    if count > len(found):
        return sampled_top_k(u, bounded(k, len(u)))
    return select_at(u, found)


gaussian = Selector("gaussian-k", stateless, lambda u, k, state, key: gaussian_k(u, k), bounded)
"""GaussianK as published, its count bounded."""

gaussian_strict = Selector(
    "gaussian-k, strict", stateless, lambda u, k, state, key: gaussian_k(u, k, strict=True), lambda k, d: k
)
"""GaussianK that always sends k."""

dgc_sampling = Selector("dgc", stateless, lambda u, k, state, key: dgc(u, k, key), lambda k, d: min(d, 2 * k))
"""DGC's sampled threshold."""

sidco_exponential = Selector("sidco-exponential", lambda: np.array([1.0, 0.0, 0.0]), _sidco, bounded)
"""SIDCo's multi-stage exponential fit."""
