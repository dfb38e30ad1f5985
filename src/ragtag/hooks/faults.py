"""What is said of gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from ragtag.hooks import message as wire
from ragtag.hooks.backward import Names


def complaint(faults: Sequence[tuple[int, wire.Head]], names: Names) -> str:
    """What ranks reported of one step, in words: the same on every rank."""
    rank, head = min(faults)  # callbacks run in any order
    others = len({number for number, _ in faults} - {rank})
    where = names.described(head.number)
    also = f" (and {others} more ranks have such values)" if others else ""
    if head.fault == wire.GRADIENT:
        counts = f"{head.nans} NaN and {head.infinite} infinite of {head.values} values"
        what = f"the gradient of {where} has {counts}"
    else:
        what = f"gradient plus residual overflow in the bucket of {where}"
    return (
        f"rank {rank}: {what}{also}. Nothing of that bucket was sent, residuals are finite; this step must "
        "not be taken on any rank (all raise this). Lower the learning rate or clip gradients; with "
        'GradScaler, give not_finite="skip"'
    )
