"""Tell a fresh machine what another one was told: the same outcomes must come of it, bit for bit.

What is told may come from a world (``World(record=True).recordings``) or from the driver of a real peer,
so a failure seen over real datagrams is looked at again here, in any debugger, as often as needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragtag.core.types import Done, Effect, Event, Machine, Outcome


def effects(node: Machine, log: Iterable[tuple[float, Event]]) -> list[Effect]:
    """Give ``node``, fresh and configured as the recorded one was, each ``(now_s, event)``; what it does.

    Raises:
        ValueError: the log's time goes backwards: it is not what one machine was given.
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
    """The outcomes that ``node`` comes to, told what ``log`` says (see ``effects``)."""
    return [effect.outcome for effect in effects(node, log) if isinstance(effect, Done)]
