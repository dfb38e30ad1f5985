"""Give a fresh machine the events that another one was given: it must come to the same outcomes, bit for bit.

The events may come from a world (``World(record=True).recordings``) or from a real peer's driver. So a
failure over real datagrams can be seen again here, in any debugger, as often as needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragtag.core.types import Done, Effect, Event, Machine, Outcome


def effects(node: Machine, log: Iterable[tuple[float, Event]]) -> list[Effect]:
    """The effects of ``node`` when it is given each ``(now_s, event)`` of a log.

    node: fresh, and configured as the recorded one was.

    Raises:
        ValueError: the log's time goes backwards, so it is not of one machine.
    """
    answers: list[Effect] = []
    last_s = float("-inf")
    for now_s, event in log:
        if now_s < last_s:
            raise ValueError(f"the log goes back from {last_s} s to {now_s} s; it must be in order")
        last_s = now_s
        answers += node.step(now_s, event)
    return answers


def replay(node: Machine, log: Iterable[tuple[float, Event]]) -> list[Outcome]:
    """The outcomes among these effects."""
    return [effect.outcome for effect in effects(node, log) if isinstance(effect, Done)]
