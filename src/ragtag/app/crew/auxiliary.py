"""``ragtag join TOKEN --auxiliary``: a peer that averages for its crew, and trains nothing.

It has no script and no model, and imports no torch. What is averaged it learns from the crew
(``protocols.crew.serving``), and it ends when the crew does.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ragtag import __version__
from ragtag.app.crew.membership import Entrance, admitted, asked
from ragtag.app.crew.transport import rates_of
from ragtag.app.crew.way import Way, resolved_token, until_seated
from ragtag.app.environment import Place, place_from_environment
from ragtag.app.launch.signals import Signals
from ragtag.app.words import bytes_text, clock, counted, these_peers
from ragtag.codecs.dense import DENSE, fp32
from ragtag.core.types import Assisted, PeerId, Posted, Role
from ragtag.network.driver.driver import Driver
from ragtag.protocols.channel.shares import Line, write_line
from ragtag.protocols.crew.board import PAGES, RATES
from ragtag.protocols.crew.joining import Joining
from ragtag.protocols.crew.serving import ChannelForm, Serving

DEADLINE_S = 120.0
"""How long it waits to be let in, and for the first peer that trains (as ``ragtag.join``)."""
LOOK_S = 0.2
"""How often it looks which peers there are, and whether the crew has ended."""
TELL_S = 10.0
"""How often it says what it has done."""
_LEAVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Assistance:
    """What an auxiliary has done.

    rounds: those of which it has averaged its blocks.
    short: those of them in which a peer's share did not come in time.
    peers: those whose values it has averaged.
    took_s: from its seat to its end.
    why: what ended it.
    exit_code: 0 where the crew has ended; 128 and the signal's number where one came; else 1.
    """

    crew: str
    seat: PeerId
    rounds: int
    short: int
    peers: tuple[PeerId, ...]
    bytes_received: int
    bytes_sent: int
    took_s: float
    why: str
    exit_code: int

    def __str__(self) -> str:
        did = f"{counted(self.rounds, 'round')} averaged"
        if self.peers:
            did += f" for {these_peers(self.peers)}"
        if self.short:
            did += f", {self.short} without a share that was late or lost"
        moved = f"{bytes_text(self.bytes_received)} in, {bytes_text(self.bytes_sent)} out"
        return f"{did}; {moved} in {clock(self.took_s)}"

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        return {"ok": self.exit_code == 0, **told}


class _Serving:
    """What the driver's thread does for the crew: it opens channels, and counts rounds.

    told: what is to be said, by its thread.
    """

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.channels = Serving()
        self.open: dict[int, ChannelForm] = {}
        self.rounds: Counter[int] = Counter()
        self.short = 0
        self.peers: set[PeerId] = set()
        self.told: list[str] = []
        self.line: Line | None = None

    def watch(self, now_s: float, what: Posted | Assisted) -> None:
        """A post came, or the blocks of a round are averaged. In the driver's thread."""
        driver = self.driver
        if driver is None:
            return
        if isinstance(what, Assisted):
            outcome = what.outcome
            self.rounds[outcome.channel] += 1
            self.short += bool(outcome.missed)
            self.peers.update(set(outcome.waited_for) - set(outcome.missed))
            driver.tell_measurements(now_s)
            planned = any(form.planned for form in self.open.values())
            line = Line(rates_of(driver), auxiliary=True)
            if planned and line.differs(self.line):
                self.line = line
                driver.post(RATES, write_line(line))
        elif what.topic in PAGES:
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """Open what the crew averages. In the driver's thread."""
        driver = self.driver
        assert driver is not None
        for form in self.channels.look(driver.node):
            self.open.pop(form.channel, None)
            why = self._opened(now_s, form)
            if why:
                self.told.append(f"something is averaged by {form.by}, in which this peer has no part: {why}")

    def _opened(self, now_s: float, form: ChannelForm) -> str:
        """Open a channel; why not, if not."""
        driver = self.driver
        assert driver is not None
        if not form.assisted:
            return "only blocks of RPS, AllReduce and TopK can be an auxiliary's"
        codec = fp32 if form.codec == "" else DENSE.get(form.codec)
        rtt_s = max(1e-4, driver.rto_s())
        try:
            if codec is None:
                return f"it knows no codec {form.codec!r}"
            driver.open(now_s, form.channel, form.opened(codec, rtt_s), form.hash32)
        except ValueError as error:
            return str(error)
        self.open[form.channel] = form
        values = form.fragments * form.chunks * codec.elements
        rows = f"up to {counted(form.chunks, 'row')} of each peer"
        self.told.append(f"averages {f'{values:,} values' if form.codec else rows} by {form.by}")
        return ""


def assist(token: str, say: Callable[[str], None], deadline_s: float = DEADLINE_S) -> Assistance:
    """Join a crew by a token, and average for it until it ends.

    say: takes lines to print.

    Raises:
        JoinError: nobody lets this peer in, or nobody trains within ``deadline_s``; the message says why.
    """
    place = place_from_environment({**os.environ, "RAGTAG_TOKEN": token})
    assert place is not None
    way = Way(replace(place, role=Role.AUXILIARY), None, time.monotonic(), deadline_s)
    found = replace(resolved_token(token), begins=False)  # it never begins a crew
    joining = Joining(found.crew, __version__, deadline_s, asked(found))
    serving = _Serving()
    way.watch = serving.watch
    driver, entrance, _ = until_seated(way, joining, admitted(joining, found, way.phases))
    with ExitStack() as undo:
        undo.callback(driver.close, _LEAVE_S)
        serving.driver = driver
        driver.call(serving.look)  # what came before
        return _until_over(way.place, driver, entrance, serving, say)


def _until_over(
    place: Place, driver: Driver, entrance: Entrance, serving: _Serving, say: Callable[[str], None]
) -> Assistance:
    began_s = told_s = time.monotonic()
    there: dict[PeerId, str] = {}
    said = ""
    say(f"auxiliary of crew {place.crew!r}, in seat {entrance.seat}; Ctrl-C ends it")
    with Signals() as signals:
        poll = select.poll()
        poll.register(signals.fd, select.POLLIN)
        while True:
            poll.poll(LOOK_S * 1e3)
            now_s, stopped = time.monotonic(), signals.take()
            there = _tell_changes(driver, there, say)
            while serving.told:
                say(serving.told.pop(0))
            why, code = _end(driver, there, serving)
            if stopped:
                why, code = "interrupted", 128 + stopped[0]
            traffic = driver.traffic()
            done = Assistance(
                place.crew, entrance.seat, sum(serving.rounds.values()), serving.short,
                tuple(sorted(serving.peers)), traffic.bytes_received, traffic.bytes_sent,
                now_s - began_s, why, code,
            )  # fmt: skip
            if why:
                return done
            if serving.open and not entrance.card.averaging:
                entrance.card = msgspec.structs.replace(entrance.card, averaging=True)
                driver.describe(entrance.card)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                if str(done.rounds) != said:
                    said = str(done.rounds)
                    say(str(done))


def _tell_changes(driver: Driver, there: dict[PeerId, str], say: Callable[[str], None]) -> dict[PeerId, str]:
    """Say which peers that train have come and gone; those that are there now, by seat."""
    seats = driver.seats
    now = {p: h.name for p, h in seats.items() if h.live and h.card.role is not Role.AUXILIARY}
    for peer in sorted(there.keys() | now.keys()):
        before, after = there.get(peer), now.get(peer)
        if before is not None and before != after:
            say(f"peer {peer} ({before}) is gone")
        if after is not None and before != after:
            say(f"peer {peer} ({after}) is there")
    return now


def _end(driver: Driver, there: dict[PeerId, str], serving: _Serving) -> tuple[str, int]:
    """Why it is over, and with which exit code; empty: it is not."""
    if driver.lost_seat:
        return driver.lost_seat, 1
    if not driver.alive:
        return "this peer's driver has ended on an error", 1
    if not there:
        return "the crew has ended", 0
    known = serving.channels.known
    if known and not serving.open:
        by = ", ".join(sorted({form.by for form in known.values()}))
        return f"the crew averages by {by}, in which an auxiliary has no part: it owns no blocks there", 1
    return "", 0
