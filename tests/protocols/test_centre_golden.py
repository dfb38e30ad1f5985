"""Transcripts of one peer at a central state, kept in tests/golden/centre/ and read by people.

To accept a change: ``pytest --regenerate``, and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ragtag.core.types import Arm, Arrived, Average, Done, Effect, Event, Expired, Left, Noted, Run, Send
from ragtag.protocols.central.block import Rule
from ragtag.protocols.central.wire import (
    ASK,
    COPY,
    FETCH,
    HOLD,
    PULL,
    PUSH,
    STATE,
    TELL,
    blob_of,
    block_of,
    decode_ask,
    decode_holdings,
    echoed,
    state_version,
    without_pace,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.base import NACK
from ragtag.schedules import BackupWorkers, ProgressiveGrouping
from ragtag.training.exchange.central import Centre, Judged
from tests.conftest import GOLDEN
from tests.protocols.centres import Centres, Each
from tests.protocols.harness import members

BLOCKS = 3
NAMES = {PUSH: "update", STATE: "state", COPY: "copy"}


def version(number: int) -> str:
    return f"{number >> 6}/{number & 63}" if number else "none"


def told(run: Run) -> str:
    stage, block = run.key.stage, block_of(run.key)
    if stage & NACK:
        return f"holes of the {NAMES[stage & ~NACK]} of block {block}"
    blob = blob_of(run) or b""
    if stage == PULL:
        return f"asks for block {block}"
    if stage == HOLD:
        return "stand by"
    if stage == FETCH:
        return f"fetches its copy of block {block}"
    if stage == ASK:
        return f"which copies of blocks {decode_ask(blob, BLOCKS)} are there?"
    if stage == TELL:
        answer = decode_holdings(blob, BLOCKS)
        assert answer is not None
        has = ", ".join(f"{b} at {version(v)}" for b, v in answer.versions.items())
        return f"has blocks {has}; owns {sorted(answer.mine)}"
    if not len(run.payload):
        return f"end of the {NAMES[stage]} of block {block}"
    if stage == PUSH:
        bases, step_s = without_pace(run.heard)
        pace = "" if step_s is None else f", at clock {run.key.block >> 6}, of steps of {step_s * 1e3:.0f} ms"
        return f"update {run.key.round} of block {block}, made from {version(int(bases[0]))}{pace}"
    if stage == COPY:
        return f"copy of block {block} at {version(int(run.heard[0]))}"
    number, stale, clock = echoed(float(run.weight[0]))
    made = "+".join(map(str, members(run.heard[0]))) or "nobody"
    at = version(state_version(run.key))
    at += f", clock {clock}" if clock else ""
    return f"block {block} at {at} for {number}, {stale} stale; new in it: {made}"


def event_told(event: Event) -> str:
    if isinstance(event, Average):
        return "turn begins" if event.weight else "turn begins that only takes"
    if isinstance(event, Arrived):
        return " and ".join(f"from {run.peer}: {told(run)}" for run in event.runs)
    if isinstance(event, Expired):
        return f"timer {event.timer.name!r} runs out"
    assert isinstance(event, Left)
    return f"peer {event.peer} is gone"


def effect_told(effect: Effect) -> str:
    if isinstance(effect, Send):
        return f"to {effect.run.peer}: {told(effect.run)}"
    if isinstance(effect, Arm):
        return f"timer {effect.timer.name!r} at {effect.at_s * 1e3:.1f} ms"
    if isinstance(effect, Noted):
        return f"note: {effect.what}, {effect.detail}" if effect.detail else f"note: {effect.what}"
    assert isinstance(effect, Done)
    outcome = effect.outcome
    how = f"by its deadline, without {outcome.missed}" if outcome.expired else "whole"
    who = ["+".join(map(str, members(heard))) or "nobody" for heard in outcome.heard]
    return f"turn {outcome.round} done {how}; new by block: {', '.join(who)}; stale {outcome.stale}"


def transcript(world: Centres, me: int, until_s: float) -> Iterable[str]:
    for now_s, peer, event, effects in world.log:
        if peer == me and now_s <= until_s and (effects or isinstance(event, Arrived)):
            yield f"{now_s * 1e3:7.1f} ms  {event_told(event)}"
            yield from (f"{'':12}-> {effect_told(effect)}" for effect in effects)


CASES: dict[str, tuple[Rule | Averager, str]] = {
    "an_owner_dies": (
        Each(),
        "Every update is a step. Peer 2 dies at 18 ms, in mid-turn; 5 ms later the others are told.\n"
        "Its blocks go on from the newest copies.",
    ),
    "a_barrier": (
        Judged(BackupWorkers(0)),
        "All wait for all. Peer 2 dies at 18 ms; nobody is told for 60 ms. Barriers end by deadline.",
    ),
    "groups": (
        Centre(ProgressiveGrouping()),
        "Progressive grouping. Peer 2's steps take six times as long: all wait for the first of them, which\n"
        "says so; then peers 0 and 1 step without it.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_transcript(golden: Callable[[str, str], None], name: str) -> None:
    rule, note = CASES[name]
    told_s = 0.005 if name == "an_owner_dies" else 0.060
    how = {"slow": {2: 6.0}} if name == "groups" else {"gone": {2: 0.018}}
    world = Centres(3, rule, n_chunks=BLOCKS, turns=4, told_s=told_s, **how).run()
    owners = Centres(3, rule, n_chunks=BLOCKS).node(0).owners
    title = (
        f"A central state of {BLOCKS} blocks, of peers {', '.join(str(owners[b]) for b in range(BLOCKS))}."
    )
    lines = [f"{title} Peer 0 tells; a version is its count/its owner.", note, "", *transcript(world, 0, 0.2)]
    golden(f"centre/{name}", "\n".join(lines) + "\n")


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in (GOLDEN / "centre").glob("*.txt")} == set(CASES)
