"""One peer's part in a round as prose: when, what happened, and what it did about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ragtag.core.types import (
    Arm,
    Arrived,
    Assisted,
    Average,
    Begin,
    Bools,
    Done,
    Effect,
    Event,
    Expired,
    Left,
    Noted,
    Offer,
    Outcome,
    Run,
    Send,
)
from ragtag.protocols.groups import host
from ragtag.protocols.rounds.asking import HERE, NEVER, QUESTION, QUESTIONS
from ragtag.protocols.rounds.base import BLOCK_BITS, GATHER, NACK, SCATTER
from ragtag.protocols.rounds.repair import BITS, requested
from tests.protocols.harness import World, members

T = TypeVar("T")
STAGES = {SCATTER: "copy", GATHER: "average"}
MATCHING = {
    host.ANNOUNCE: "looks for a group",
    host.WAIT: "hosts that group: wait",
    host.ROSTER: "these are the group's members",
    host.BEHIND: "that group met without you",
    host.MET: "I have a group",
}


def transcript(
    world: World, me: int, title: str, note: str, from_s: float = 0.0, rounds: bool = False
) -> str:
    """What peer ``me`` saw and did from ``from_s`` on; ``note`` says beforehand what to look for.

    rounds: of each message, say of which round it is.
    """
    lines = [title, note, ""]
    for now_s, peer, event, effects in world.log:
        if now_s >= from_s and peer == me and (effects or isinstance(event, Arrived)):
            lines.append(f"{_ms(now_s):>7}  {_event(event, rounds)}")
            lines += [f"{'':9}  -> {line}" for effect in effects for line in _effect(now_s, effect, rounds)]
    return "\n".join(lines) + "\n"


def _event(event: Event, rounds: bool) -> str:
    if isinstance(event, Offer):
        return f"asked to offer {len(event.rows)} rows with weight {event.weight:g}"
    if isinstance(event, Left):
        return f"told that peer {event.peer} has left"
    if isinstance(event, Average):
        return f"asked to average {len(event.values)} chunks with weight {event.weight:g}"
    if isinstance(event, Expired):
        return f"timer {event.timer.name!r} of round {event.timer.round} runs out"
    if isinstance(event, Arrived):
        return " and ".join(f"from {run.peer}: {_run(run, rounds)}" for run in event.runs)
    assert not isinstance(event, Begin)
    return str(event)


def _effect(now_s: float, effect: Effect, rounds: bool) -> Iterable[str]:
    if isinstance(effect, Send):
        yield f"to {effect.run.peer}: {_run(effect.run, rounds)}; by {_ms(effect.deadline_s)}"
    elif isinstance(effect, Arm):
        yield f"timer {effect.timer.name!r} at {_ms(effect.at_s)}"
    elif isinstance(effect, Noted):
        yield f"note: peer {effect.peer} {effect.what} {effect.detail}".rstrip()
    elif isinstance(effect, Assisted):
        short = f", without {', '.join(map(str, effect.outcome.missed))}" if effect.outcome.missed else ""
        yield f"round {effect.outcome.round} is served: {effect.outcome.averaged.sum()} chunks{short}"
    elif isinstance(effect, Done):
        yield from _outcome(effect.outcome)


def _outcome(outcome: Outcome) -> Iterable[str]:
    how = "by its deadline" if outcome.expired else "with all that was to come"
    missed = f"; missed {_names(outcome.missed)}" if outcome.missed else ""
    yield f"round {outcome.round} done {how} after {_ms(outcome.total_s)}{missed}"
    for first, last, (averaged, heard) in _spans(
        [(bool(a), tuple(members(h))) for a, h in zip(outcome.averaged, outcome.heard, strict=True)]
    ):
        what = f"the mean of {_names(heard)}" if averaged else "its own values"
        yield f"  {_chunks(first, last)}: {what}"
    if outcome.gathered is not None:
        late = [f"{len(part.rows)} rows of round {number}" for number, part in outcome.gathered.late]
        yield f"  {len(outcome.gathered.rows)} rows" + "".join(f", {rows} late" for rows in late)


def _run(run: Run, rounds: bool) -> str:
    return _message(run) + (f" [round {run.key.round}]" if rounds else "")


def _message(run: Run) -> str:
    stage, block = run.key.stage, run.key.block & (1 << BLOCK_BITS) - 1
    if stage in QUESTIONS:
        return f"is the {STAGES[stage & ~QUESTION]} of block {block} still to come?"
    if stage in (HERE, NEVER):
        return f"I am here (block {block})" if stage == HERE else f"of block {block} nothing comes any more"
    if stage in MATCHING:
        return MATCHING[stage]
    if stage & NACK:
        asked = requested(run, BITS)  # these crews' messages are far smaller than one part of a bitmap
        return f"request for {_mask(asked, 0)} of the {STAGES[stage & ~NACK]} of block {block}"
    k = len(run.payload)
    ends = ", no more to come" if run.ended else ""
    if k == 0:
        return f"end of the {STAGES[stage]} of block {block}"
    there = _chunks(run.first, run.first + k - 1) if run.mask is None else _mask(run.mask, run.first)
    who = sorted({tuple(members(h)) for h in run.heard})
    summed = stage == GATHER or max(map(len, who)) > 1
    heard = f" ({' or '.join(_names(peers) for peers in who)})" if summed else ""
    what = "sum" if summed and stage == SCATTER else STAGES[stage]
    return f"{what} of block {block}, {there} of {run.total}{heard}{ends}"


def _mask(mask: Bools, first: int) -> str:
    spans = [_chunks(first + a, first + b) for a, b, there in _spans(mask.tolist()) if there]
    return ", ".join(spans) if spans else "no chunk"


def _chunks(first: int, last: int) -> str:
    return f"chunk {first}" if first == last else f"chunks {first}-{last}"


def _names(peers: Iterable[int]) -> str:
    return "+".join(map(str, peers)) or "nobody"


def _spans(values: list[T]) -> Iterable[tuple[int, int, T]]:
    """Runs of equal values: first and last index, and the value."""
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[start]:
            yield start, i - 1, values[start]
            start = i


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.1f} ms"
