"""What schedules are asked in their tests."""

from __future__ import annotations

from ragtag.schedules.base import Progress


def progress(
    clocks: dict[int, int],
    me: int = 0,
    *,
    since_average: int = 1,
    step_s: dict[int, float] | None = None,
    since_s: dict[int, float] | None = None,
    live: frozenset[int] | None = None,
    computed_s: float | None = None,
    round_s: float | None = None,
) -> Progress:
    return Progress(
        step=clocks.get(me, 1),
        since_average=since_average,
        n=len(clocks),
        live=frozenset(clocks) if live is None else live,
        me=me,
        clocks=clocks,
        step_s=step_s or {},
        since_s=since_s or {},
        computed_s=computed_s,
        round_s=round_s,
    )
