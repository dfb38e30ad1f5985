"""Selectors by name."""

from __future__ import annotations

from ragtag.codecs.sparse import reused, threshold, topk
from ragtag.codecs.sparse.selection import Selector

SELECTIONS: dict[str, Selector] = {
    "sampled": topk.sampled,
    "exact": topk.exact,
    "random": topk.randomly,
    "chunked": topk.chunked(),
    "gaussian-k": threshold.gaussian,
    "gaussian-k-strict": threshold.gaussian_strict,
    "dgc": threshold.dgc_sampling,
    "sidco": threshold.sidco_exponential,
    "reused": reused.reused,
}


def selector_named(name: str) -> Selector:
    """Raises ValueError for a name that is none."""
    if name not in SELECTIONS:
        raise ValueError(f"selection is {name!r}; it is one of {', '.join(SELECTIONS)}, or a Selector")
    return SELECTIONS[name]
