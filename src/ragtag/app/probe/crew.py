"""Measures the links of the crew that this process was started for.

    ragtag run -n 4 -m ragtag.app.probe.crew            # or, on each machine:
    ragtag join TOKEN -m ragtag.app.probe.crew

In each slot every peer sends to one other, and gets from one other, so that no line has more than one
sender and one receiver: over the same sockets, with the same rate control and keys as averages. The receiver
counts what comes. Then all trickle to all, far below these rates: what of that does not come is lost by the
line, and not by too much at once. At last the crew makes some averages with repair, against which an estimate
can be held. Peers tell each other what they found; ``links.json`` in the run's
folder has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median

import msgspec
import numpy as np
import torch

import ragtag
from ragtag.app.crew.crew import Crew
from ragtag.app.crew.peer import Peer
from ragtag.app.crew.transport import DriverTransport
from ragtag.app.probe.links import Links, LinksError, LinkWay, Tried, require_whole, write_links
from ragtag.app.probe.view import bits_text
from ragtag.app.words import seconds
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import (
    PEERS_MAX,
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    MessageKey,
    OpenedTogether,
    PeerId,
    Run,
    Send,
    Timer,
    nobodys,
)
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES
from ragtag.network.driver.driver import Direction
from ragtag.protocols.channel.averager import Averager, Opening
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.training.exchange.dense import Replica
from ragtag.training.tensors.layout import Part

SLOT_S, SLOT_RTTS = 1.0, 40
"""How long a slot lasts, at least; or so many round trips, in which rate control has found the rate."""
SLOT_MOST_S = 10.0
CHUNKS = 1 << 16
"""At most so many (71 MB) are sent in a slot."""
MARKS = 512
"""Of what came in a slot: beyond, every second one is forgotten."""
END, DROP = "slot", "drop"
"""The timers of a slot."""
TRICKLE, TRICKLE_RATE, TRICKLE_PART = 250, 0.2, 0.75
"""Losses are told of so many chunks, or of what this part of a way's rate takes in this part of a slot."""
RAMP = 0.5
"""This part of what comes does not count: rate control has to find the rate first."""
VALUES, WARM, TRIALS, TRIED_S = 1 << 21, 4, 5, 0.5
"""Of averages that are tried: values at most; how many do not count, and do; how long one is to take."""
GATHER_S, MEET_S, LOOK_S = 120.0, 30.0, 0.02
"""How long peers that are to come are waited for; each that is there; and from look to look meanwhile."""
LOSS_MOST = 0.9
"""More is not told: of the few chunks that a slow way lets leave all may be lost by chance."""
ENOUGH = 50
"""Packets that come of what a slot sends, at least; meetings take fewer."""
FIGURES = 6
"""Numbers that a peer tells of each other one."""


@dataclass(slots=True)
class Coming:
    """What comes in a slot from one peer.

    total: chunks that it sends at most. marks: time and chunks so far, at most ``MARKS`` of them.
    """

    total: int = CHUNKS
    marks: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now_s: float, chunks: int) -> None:
        """Chunks have come."""
        so_far = self.marks[-1][1] if self.marks else 0
        self.marks.append((now_s, so_far + chunks))
        if len(self.marks) > MARKS:
            del self.marks[1:-1:2]

    @property
    def share(self) -> float:
        """The share of all its chunks that came."""
        return self.marks[-1][1] / self.total if self.marks else 0.0

    def rate(self) -> float:
        """Chunks a second, without the first part; 0: too few came."""
        if len(self.marks) < 4:
            return 0.0
        (first_s, _), (last_s, last) = self.marks[0], self.marks[-1]
        from_s = first_s + RAMP * (last_s - first_s)
        since_s, since = next(mark for mark in self.marks if mark[0] >= from_s)
        return (last - since) / (last_s - since_s) if last_s > since_s else 0.0


@dataclass(slots=True)
class Trickle:
    """Single chunks that leave evenly: how many, how far apart, from when, until when, and how many have."""

    many: int
    every_s: float
    began_s: float
    until_s: float
    left: int = 0


class Slots:
    """One peer's part in the slots of a channel, as a machine (``protocols.channel.averager.Machine``).

    In slot ``r`` the peer in place ``p`` of those that are there sends to the one in place ``p + 1 + r``,
    round the ring. An ``Average`` begins the next slot, for its deadline. Its outcome has in ``mean[0, p]``
    how many chunks a second came from peer ``p``: 0 from those that did not send to this one.

    Where ``weight`` is 0 all trickle to all in this slot: as many single chunks as the first of ``values``
    says, evenly. Then ``mean[0, p]`` is the share of those of peer ``p`` that came.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.done = self.highest = -1
        self.active: int | None = None
        self._coming: dict[int, dict[PeerId, Coming]] = {}
        self._trickle: Trickle | None = None

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event."""
        if isinstance(event, Average):
            return self._begin(now_s, event)
        if isinstance(event, Arrived):
            for run in event.runs:
                self.highest = max(self.highest, run.key.round)
                if self.done < run.key.round <= self.done + 2 and len(run.payload):
                    slot = self._coming.setdefault(run.key.round, {})
                    slot.setdefault(run.peer, Coming(run.total)).add(now_s, len(run.payload))
        elif isinstance(event, Expired) and event.timer.round == self.active:
            return self._end(event.timer.round) if event.timer.name == END else self._drop(now_s)
        return []

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        opening, number = self._opening, self.done + 1
        self.active = number
        for_s = SLOT_S if ask.deadline_s is None else ask.deadline_s
        peers = sorted(opening.peers)
        place = peers.index(opening.me)
        dest = peers[(place + 1 + number % (len(peers) - 1)) % len(peers)] if len(peers) > 1 else opening.me
        effects: list[Effect] = [Arm(Timer(opening.number, number, END), now_s + for_s)]
        if ask.weight == 0:
            many = max(1, int(ask.values[0, 0]))
            self._trickle = Trickle(many, TRICKLE_PART * for_s / many, now_s, now_s + for_s)
            return effects + self._drop(now_s)
        self._trickle = None
        if dest != opening.me:
            key, k = MessageKey(opening.number, number, 0, 0), CHUNKS
            payload = np.broadcast_to(np.zeros(CHUNK_BYTES, np.uint8), (k, CHUNK_BYTES))
            nothing = np.zeros(k, np.float32), np.zeros(k, np.uint64)
            effects.append(Send(Run(dest, key, 0, k, payload, *nothing, None, True), now_s + for_s))
        return effects

    def _drop(self, now_s: float) -> list[Effect]:
        """The next chunk of a trickle, to each peer, with those that a busy machine was late for."""
        trickle, opening, number = self._trickle, self._opening, self.done + 1
        if trickle is None or trickle.left >= trickle.many:
            return []
        at = trickle.left
        trickle.left = min(trickle.many, 1 + int((now_s - trickle.began_s) / trickle.every_s + 1e-6))
        k, key = trickle.left - at, MessageKey(opening.number, number, 0, 0)
        payload, nothing = (
            np.zeros((k, CHUNK_BYTES), np.uint8),
            (np.zeros(k, np.float32), np.zeros(k, np.uint64)),
        )
        effects: list[Effect] = [
            Send(Run(peer, key, at, trickle.many, payload, *nothing, None, False), trickle.until_s)
            for peer in sorted(opening.peers - {opening.me})
        ]
        next_s = trickle.began_s + trickle.left * trickle.every_s
        return [*effects, Arm(Timer(opening.number, number, DROP), next_s)]

    def _end(self, number: int) -> list[Effect]:
        came, self.done, self.active = self._coming.pop(number, {}), number, None
        for old in [slot for slot in self._coming if slot < number]:
            del self._coming[old]
        mean = np.zeros((1, fp32.elements), np.float32)
        for peer, coming in came.items():
            mean[0, peer] = coming.rate() if self._trickle is None else coming.share
        heard = np.array([sum(1 << peer for peer in came)], np.uint64)
        outcome = nobodys(self._opening.number, mean, np.ones(1, np.float32), heard, None)
        return [Done(replace(outcome, round=number))]

    def probed(self, probe_s: float, now_s: float) -> None:
        """Slots last as long as they are asked to."""

    def resume(self, round_: int) -> None:
        """A peer that comes late goes on with the slots of the others."""
        self.done = max(self.done, round_)

    def newer(self) -> bool:
        """Whether others are past this peer's last slot."""
        return self.highest > self.done

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """Whether a sender takes part."""
        return number >= self.done


slots = Averager("slots of a probe", Slots, "at once")
"""No average: what ``measure`` opens its channel with."""


def measure(crew: Crew, peers: int, slot_s: float = SLOT_S) -> Links:
    """The links of the crew. All peers call this alike, and get the same.

    peers: how many the crew is to have; those that come are waited for.
    slot_s: how long each way is measured, at least; there are n - 1 slots, and some seconds more.
    Raises LinksError: the crew is to have one peer, or more than average at once; not so many came; a peer
        did not tell what it found, or nothing came from one to another.
    """
    peer = crew._peer
    transport, driver = peer.transport, peer.driver
    if driver is None or not isinstance(transport, DriverTransport) or peers < 2:
        raise LinksError(
            "this peer is alone, and has no links: ragtag run -n 4 -m ragtag.app.probe.crew, or ragtag join "
            "TOKEN -m ragtag.app.probe.crew on each machine"
        )
    if peers > PEERS_MAX:
        raise LinksError(f"a crew of {peers}: links are measured where {PEERS_MAX} or fewer average")
    _gather(peer, transport, peers)
    channel = channel_of("probe/slots")
    schema = Schema((TensorSpec("slots", (fp32.elements,), "float32"),), fp32.name, slots.name)
    others = sorted(transport.live - {transport.me})
    rtts_s = _told(transport, "rtt", [max(driver.rtt_s().values(), default=0.0)])
    transport.configure(channel, schema, slots, fp32, together=OpenedTogether(MEET_S))
    slot_s = min(SLOT_MOST_S, max(slot_s, SLOT_RTTS * max(rtt_s for (rtt_s,) in rtts_s.values())))
    found: dict[PeerId, Glimpse] = {other: Glimpse() for other in others}
    for number in range(len(others)):
        _told(transport, f"slot {number}", [0.0])  # they begin together
        pending = transport.start(channel, np.zeros((1, fp32.elements), np.float32), 1.0, slot_s)
        before = driver.directions()
        outcome = pending.wait()
        peer.record_round(outcome)
        look(found, outcome.mean[0], before, driver.directions())
    _told(transport, "trickle", [0.0])
    many = np.zeros((1, fp32.elements), np.float32)
    slowest = min((seen.out for seen in found.values() if seen.out), default=0.0)
    many[:] = min(TRICKLE, TRICKLE_RATE * slowest / len(others) * TRICKLE_PART * slot_s // DATAGRAM_BYTES)
    outcome = transport.start(channel, many, 0.0, slot_s).wait()
    for other, seen in found.items():
        seen.loss = 1.0 - float(outcome.mean[0, other])
    row = [float(figure) for other, seen in found.items() for figure in (other, *astuple(seen))]
    return _try(peer, links_of(_told(transport, "found", row)))


def _gather(peer: Peer, transport: DriverTransport, peers: int) -> None:
    """Average next to nothing until all are there: in a crew that is joined, peers come one by one.

    Each says in the mean whether it sees all, so all go on after the same round. Raises LinksError.
    """
    seen = torch.zeros(fp32.elements, device="cpu")
    part = Part("seen", "values", lambda: seen)
    replica = Replica([part], transport, rps, fp32, name="probe/gather", content="links", share=False)
    peer.enter(replica.channel)
    until_s = transport.now_s() + GATHER_S
    while True:
        seen[:] = float(len(transport.live) >= peers)
        outcome = replica.average(deadline_s=MEET_S)
        peer.record_round(outcome)
        if float(seen[0]) == 1.0 and len(transport.live) >= peers:
            return
        if transport.now_s() > until_s:
            raise LinksError(
                f"{len(transport.live)} of {peers} peers are there after {GATHER_S:g} s; start as many as "
                "--peers says, or say how many there are"
            )
        transport.pause(LOOK_S)


@dataclass(slots=True)
class Glimpse:
    """What a peer saw of its link with another one.

    into, out: bytes per second, as they came here; as rate control found them.
    rtt_s, busy_rtt_s: see ``links.LinkWay``; of the way out.
    loss: of the way in.
    """

    into: float = 0.0
    out: float = 0.0
    rtt_s: float = 0.0
    busy_rtt_s: float = 0.0
    loss: float = 0.0


def look(
    found: Mapping[PeerId, Glimpse], came: Floats, before: Sequence[Direction], after: Sequence[Direction]
) -> None:
    """A slot is over. came: chunks a second by peer. before, after: the ways as the slot began and ended."""
    then = {one.peer: one.came for one in before}
    for now in after:
        seen = found.get(now.peer)
        if seen is None:
            continue
        seen.into = max(seen.into, float(came[now.peer]) * DATAGRAM_BYTES)
        seen.rtt_s = now.min_rtt_s
        if now.came - then.get(now.peer, 0) >= ENOUGH:  # this was the slot in which it was sent to
            seen.out, seen.busy_rtt_s = now.rate_bytes_per_s, max(now.min_rtt_s, now.rtt_s)


def links_of(told: Mapping[PeerId, Sequence[float]]) -> Links:
    """The table of what peers told: for each other peer its number, and what is ``Glimpse``.

    A way's rate is the larger of what its receiver counted and what its sender's rate control found: a
    machine that was busy for a moment makes either too small.
    Raises LinksError: a peer told nothing of another, or what cannot be.
    """
    peers, found = tuple(sorted(told)), dict[tuple[PeerId, PeerId], Glimpse]()
    for me, row in told.items():
        if len(row) % FIGURES:
            raise LinksError(f"peer {me} told {len(row)} figures, which is no whole number of links")
        rows = [row[at : at + FIGURES] for at in range(0, len(row), FIGURES)]
        found |= {(me, int(other)): Glimpse(*figures) for other, *figures in rows}
    ways = []
    for source, dest in ((a, b) for a in peers for b in peers if a != b):
        there, back = found.get((source, dest)), found.get((dest, source))
        if there is None or back is None or not max(there.out, back.into) > 0:
            raise LinksError(f"nothing that could be measured came from peer {source} to peer {dest}")
        rate = max(there.out, back.into)
        figures = (source, dest, rate, there.rtt_s, there.busy_rtt_s, min(back.loss, LOSS_MOST))
        try:
            ways.append(msgspec.convert(dict(zip(LinkWay.__struct_fields__, figures, strict=True)), LinkWay))
        except msgspec.ValidationError as error:
            raise LinksError(f"peers {source} and {dest} told what cannot be: {error}") from error
    return require_whole(Links(peers, tuple(ways)))


def _told(transport: DriverTransport, what: str, mine: list[float]) -> dict[PeerId, list[float]]:
    """What all peers tell at this point. Raises LinksError: one told nothing in time, or what is no row."""
    told, live = {transport.me: mine}, transport.live
    row = msgspec.msgpack.encode(mine)
    for other, blob in transport.meet(f"probe/{what}", row, MEET_S, there=live).items():
        try:
            told[other] = msgspec.msgpack.decode(blob, type=list[float])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LinksError(f"peer {other} told what cannot be read ({error})") from error
    if missing := sorted(live - told.keys()):
        raise LinksError(
            f"peers {missing} told nothing within {MEET_S:g} s: start again with those that stay"
        )
    return told


def _try(peer: Peer, links: Links) -> Links:
    """Make some averages with repair, and add how long they took."""
    slowest = min(map(links.rate, links.peers))
    values = int(min(VALUES, max(4 * fp32.elements * len(links.peers), slowest * TRIED_S / 8)))
    tensor = torch.zeros(values, device="cpu")
    part = Part("tried", "values", lambda: tensor)
    replica = Replica(
        [part],
        peer.transport,
        rps_repair,
        fp32,
        name="probe/tried",
        content="links",
        together=OpenedTogether(MEET_S),
    )
    times_s = []
    for _ in range(WARM + TRIALS):
        outcome = replica.average()
        peer.record_round(outcome)
        times_s.append(outcome.total_s)
    return msgspec.structs.replace(links, tried=Tried(rps_repair.name, values, median(times_s[WARM:])))


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description="measure the links of this crew")
    parser.add_argument("--peers", type=int, help="how many peers the crew is to have")
    parser.add_argument("--slot", type=float, default=SLOT_S, help="seconds for which each way is measured")
    asked = parser.parse_args()
    if not 0.1 <= asked.slot <= SLOT_MOST_S:
        parser.error(f"--slot {asked.slot:g}: from 0.1 to {SLOT_MOST_S:g} seconds")
    torch.set_num_threads(1)
    with ragtag.join() as crew:
        links = measure(crew, asked.peers or crew.size, asked.slot)
        folder = crew._peer.place.run_folder
        if folder is not None:
            write_links(links, folder)
        if crew.rank == min(links.peers):
            for way in links.ways:
                print(
                    f"{way.source} -> {way.dest}: {bits_text(way.rate_bytes_per_s)}, round trip "
                    f"{seconds(way.rtt_s)} (busy: {seconds(way.busy_rtt_s)}), {100 * way.loss:.2g} % lost"
                )


if __name__ == "__main__":
    main()
