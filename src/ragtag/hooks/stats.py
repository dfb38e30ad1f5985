"""What the sparse hook has saved, and at what price."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragtag.hooks.plan import Plan


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of the last step (``steps`` and ``skipped`` count from the beginning), of this rank.

    entries, density: how many values were sent sparsely, and their share of those that go that way.
    values: all gradient values.
    dense_values: those that go densely, their tensors being small.
    bytes_sent: what this rank sends: its messages, padded as they travel, to each of the P - 1 others, and
        the dense values' ring all-reduce.
    bytes_dense: what DDP's ring all-reduce of the same values sends, 2 (P - 1)/P times their bytes.
    saved: 1 - bytes_sent / bytes_dense (below 0: sparse costs more).
    captured: the share of the energy (squared norm) of gradient plus residual that was sent.
    residual_norm: the Euclidean norm of what is still to be sent.
    returned: entries that did not fit into the agreed room, and went back into the residual.
    """

    steps: int
    skipped: int
    entries: int
    density: float
    values: int
    dense_values: int
    bytes_sent: int
    bytes_dense: int
    saved: float
    captured: float
    residual_norm: float
    returned: int


def stats_of(plans: Iterable[Plan], steps: int, skipped: int, ranks: int) -> Stats:
    """Add up the buckets."""
    plans = tuple(plans)
    entries = sum(plan.last.entries for plan in plans)
    sparse_values = sum(plan.n_sparse for plan in plans)
    dense_values = sum(plan.n_dense for plan in plans)
    ring = 2 * (ranks - 1) / ranks * 4  # bytes that a rank sends of each value in a ring all-reduce
    messages = sum(plan.last.message_bytes for plan in plans)
    bytes_sent = round((ranks - 1) * messages + ring * dense_values)
    bytes_dense = round(ring * (sparse_values + dense_values))
    left = sum(plan.feedback.measure().residual_norm ** 2 for plan in plans)
    energy = sum(plan.last.energy for plan in plans)
    return Stats(
        steps=steps,
        skipped=skipped,
        entries=entries,
        density=entries / sparse_values if sparse_values else 0.0,
        values=sparse_values + dense_values,
        dense_values=dense_values,
        bytes_sent=bytes_sent,
        bytes_dense=bytes_dense,
        saved=1 - bytes_sent / bytes_dense if bytes_dense else 0.0,
        captured=energy / (energy + left) if energy + left else 1.0,
        residual_norm=math.sqrt(left),
        returned=sum(plan.last.returned for plan in plans),
    )
