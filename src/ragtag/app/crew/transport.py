"""How training reaches its crew: over a driver, or, alone, not at all."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from ragtag.app.crew.membership import Entrance
from ragtag.app.crew.phases import Phases
from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32, known_name
from ragtag.core.errors import Error
from ragtag.core.schema import Schema, SchemaMismatch
from ragtag.core.types import (
    PEERS_MAX,
    RATE_MAX,
    RATE_MIN,
    Arm,
    Average,
    Bytes,
    Done,
    Expired,
    Floats,
    Left,
    Met,
    Offer,
    OpenedTogether,
    Outcome,
    PeerId,
    Publish,
    Start,
    Tell,
    nobodys,
)
from ragtag.core.wire import NAMED, name_hash
from ragtag.network.driver.driver import Driver
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.overlap import Overlap
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.crew.joining import (
    ChannelEvent,
    ChannelWay,
    Differs,
    Heard,
    IsOpen,
    Newer,
    Nobody,
    ProbeRound,
    StateHere,
    TakesPart,
    Timed,
)
from ragtag.protocols.crew.posting import Posting
from ragtag.protocols.crew.serving import Forms, form_of
from ragtag.protocols.crew.standing import Standing
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.publish.channel import Publisher, publisher_of
from ragtag.protocols.rounds.gather import nothing_gathered
from ragtag.protocols.rounds.rps import rps, rps_repair

_LOOK_S = 1.0  # how often a waiting trainer makes sure that the driver lives
_SAID_AFTER_S = 5.0  # a peer that waits for others to open a channel says so then
_SEAT_LOOK_S = 0.1  # how often one that meets the others makes sure that its number is its own
_AHEAD_LOOK_S = 0.05  # how often one that waits for others' rounds looks whether anybody is to begin one

_log = logging.getLogger("ragtag")
T = TypeVar("T")


class SeatLost(Error, RuntimeError):
    """This peer was taken for dead, and its place was given to another one."""


@dataclass(frozen=True, slots=True)
class DriverPending:
    """A round that a driver has under way. ended: called once it was waited for."""

    future: concurrent.futures.Future[Outcome]
    driver: Driver
    overlap: Overlap
    ended: Callable[[], None]

    @property
    def over(self) -> bool:
        """Whether the round is done."""
        self.overlap.asked(self.driver.now_s())
        return self.future.done()

    def wait(self) -> Outcome:
        """Wait until the round is done. The machine's deadlines bound it; the driver's death ends it."""
        self.overlap.asked(self.driver.now_s())
        outcome = _result(self.future, self.driver)
        self.ended()
        return outcome


def _result(future: concurrent.futures.Future[T], driver: Driver) -> T:
    """What the driver's thread comes to, as long as that lives."""
    while True:
        try:
            return future.result(timeout=_LOOK_S)
        except TimeoutError:
            if not driver.alive and not future.done():
                raise RuntimeError("the driver's thread has ended without an outcome") from None


@dataclass(frozen=True, slots=True)
class DonePending:
    """A round that is done already."""

    outcome: Outcome
    over = True

    def wait(self) -> Outcome:
        """The outcome."""
        return self.outcome


def await_meeting(
    driver: Driver,
    meeting: concurrent.futures.Future[Met],
    deadline_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Met:
    """What a meeting came to. meanwhile: called now and then until it is over.

    Raises:
        SeatLost: another peer has this one's number, so nobody answers it.
    """
    until_s = driver.now_s() + deadline_s
    while True:
        try:
            return meeting.result(timeout=min(_SEAT_LOOK_S, max(0.0, until_s - driver.now_s())))
        except TimeoutError:
            meanwhile()
            if driver.lost_seat:
                raise SeatLost(driver.lost_seat) from None
            if not meeting.done() and driver.now_s() >= until_s:
                raise


def known_to(driver: Driver, met: Met, channel: int | None = None) -> Heard:
    """What a meeting came to, and what a driver knows by now, also of a channel."""
    node = driver.node
    heard_of = -1 if channel is None else node.heard_of(channel)
    return Heard(met, node.n, node.gone, driver.rto_s(), heard_of, driver.other_versions)


def rates_of(driver: Driver) -> dict[PeerId, float]:
    """Bytes a second that the way to each peer delivers, by rate control; those not known are left out."""
    return {
        way.peer: way.rate_bytes_per_s
        for way in driver.directions()
        if RATE_MIN <= way.rate_bytes_per_s <= RATE_MAX and way.peer < PEERS_MAX
    }


class SoloTransport(Posting):
    """A crew of one: every average is one's own."""

    may_grow = late = False
    deadline_s = 0.0

    def __init__(self, seed: int) -> None:
        self._node = node = Node(0, 1, seed)
        super().__init__(0, node.board, lambda post: node.step(0.0, post))
        self.n = 1

    @property
    def live(self) -> frozenset[PeerId]:
        """This peer."""
        return self._node.live

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """Nobody."""
        return frozenset()

    @property
    def clients(self) -> frozenset[PeerId]:
        """Nobody: alone, a peer owns all."""
        return frozenset()

    def rates(self) -> dict[PeerId, float]:
        """Nothing: there is no line."""
        return {}

    def configure(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        *,
        together: OpenedTogether | None = None,
    ) -> None:
        """Open a channel."""
        chunks = schema.n_chunks(codec.elements)
        method = method if method.gathers or method.kind == "published" else rps
        parts = schema.fragments
        opened = Channel(method, codec, chunks, probe_s=1e-3, rtt_s=1e-3, fragments=parts)
        self._node.configure(channel, opened)

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> DonePending:
        """Average with nobody."""
        return self._done(Average(channel, values, weight, deadline_s, number=number))

    def newer(self, channel: int) -> bool:
        """Nobody else begins rounds."""
        return False

    def goes_on_after(self, channel: int, round_: int) -> None:
        """Alone, no round went by."""

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        number: int = -1,
    ) -> DonePending:
        """Gather one's own rows."""
        return self._done(Offer(channel, rows, weight, deadline_s, number=number))

    def publish(self, ask: Publish) -> None:
        """Keep values that nobody else takes."""
        self._node.step(self.now_s(), ask)

    def published(self, channel: int) -> tuple[Publisher, float]:
        """One's own values."""
        return publisher_of(self._node, channel), self.now_s()

    def _done(self, event: Average | Offer) -> DonePending:
        for effect in self._node.step(0.0, event):
            if isinstance(effect, Done):
                return DonePending(effect.outcome)
        raise RuntimeError("a crew of one did not end its round")  # pragma: no cover

    def absent(self, topic: int) -> frozenset[PeerId]:
        """Nobody is."""
        return frozenset()

    @property
    def coming(self) -> frozenset[PeerId]:
        """Nobody is."""
        return frozenset()

    def heard_of(self, channel: int) -> int:
        """Nobody else begins rounds."""
        return -1

    def meet(
        self,
        name: str,
        blob: bytes,
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        there: frozenset[PeerId] | None = None,
    ) -> dict[PeerId, bytes]:
        """There is nobody to meet."""
        return {}

    def now_s(self) -> float:
        """Seconds, by the monotonic clock."""
        return time.monotonic()

    def pause(self, for_s: float) -> None:
        """Sleep."""
        time.sleep(for_s)


class DriverTransport:
    """A crew over a driver.

    deadline_s: how long peers wait for each other to configure a channel.
    on_ready: called with the name of the averager once the first channel is ready to be averaged on.
    entrance: through which membership tells of the other peers (``None``: there is no membership).
    phases: told how long each phase of the way in takes.
    """

    def __init__(
        self,
        driver: Driver,
        deadline_s: float,
        on_ready: Callable[[str], None] | None = None,
        entrance: Entrance | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._driver, self.deadline_s, self._on_ready = driver, deadline_s, on_ready
        self._entrance = entrance
        self._phases = phases or Phases()
        self.me = driver.node.me
        self._method = ""
        self._opened: dict[int, tuple[Schema, Averager, Codec]] = {}
        self._together: set[int] = set()
        self._openings: dict[int, ChannelWay] = {}
        self._after: dict[int, int] = {}
        self._overlaps: dict[int, Overlap] = {}
        self._begun: set[int] = set()
        """Channels with a round that was begun, and not waited for yet."""
        self._forms = Forms()
        self.standing = Standing(self, self._living)

    @property
    def may_grow(self) -> bool:
        """Whether peers may come."""
        return self._entrance is not None

    @property
    def late(self) -> bool:
        """Whether the crew averaged before this peer came: it has to ``take_part`` on each channel, once."""
        return self._entrance is not None and self._entrance.late

    @property
    def takes_part(self) -> bool:
        """Whether this peer has told the crew that it averages."""
        return self._entrance is None or self._entrance.card.averaging

    @property
    def n(self) -> int:
        """How many places the crew has, taken or not; it may grow."""
        return self._driver.node.n

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """The peers that average and compute nothing."""
        return self._driver.node.auxiliary

    @property
    def clients(self) -> frozenset[PeerId]:
        """The peers that compute and own nothing of what is averaged."""
        return self._driver.node.clients

    def rates(self) -> dict[PeerId, float]:
        """Bytes a second that the way to each peer delivers, by rate control."""
        return rates_of(self._driver)

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers believed to take part now: none but itself, where another has this one's number."""
        return frozenset({self.me}) if self._driver.lost_seat else self._driver.node.live

    def configure(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        *,
        together: OpenedTogether | None = None,
    ) -> None:
        """Open a channel: compare schemas with all peers, then measure how long averaging takes.

        In a crew of more than ``PEERS_MAX`` seats it compares with a few peers (``protocols.crew.district``),
        and measures in a group.

        Raises:
            SchemaMismatch: more peers agree on another schema than on this one, or as many.
            ValueError: the crew has more seats than the method can average, or the channel is open.
        """
        if channel in self._opened:
            raise ValueError("something is averaged under this name already: give each its own")
        late, deadline_s = (self.late, self.deadline_s) if together is None else (False, together.deadline_s)
        self._open(channel, schema, method, codec, late, deadline_s, together)

    def _open(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        late: bool,
        deadline_s: float,
        together: OpenedTogether | None = None,
    ) -> None:
        chunks = schema.n_chunks(codec.elements)
        hash32 = schema.hash32()
        if channel >= NAMED:  # two models may have one schema; their datagrams are told apart all the same
            hash32 = name_hash(f"{channel}/{hash32}")
        there = None if together is None else together.peers
        opening = ChannelWay(self.me, channel, schema, chunks, deadline_s, late, there)
        rtt_s = max(1e-4, self._driver.rto_s())
        parts = schema.fragments
        opens = form_of(channel, hash32, method, known_name(codec), chunks, parts)
        form, topic, told = self._forms.add(opens)
        opened = Channel(
            method, codec, chunks, deadline_s, rtt_s, reuse=True, fragments=parts,
            edges=schema.edges(codec.elements), assisted=form.assisted, among=there,
        )  # fmt: skip
        by = rps_repair if self.n <= PEERS_MAX else method
        probe = Channel(
            by, fp32, opening.probe_chunks, probe_s=deadline_s, rtt_s=rtt_s, passing=True, among=there
        )
        # both channels are open before the peers meet: the one that is done first sends at once
        self._driver.configure(channel, opened, hash32).result(deadline_s)
        self._driver.configure(opening.probes, probe, name_hash(f"probe/{channel}/{hash32}")).result(
            deadline_s
        )
        if topic >= 0:
            self.post_soon(topic, told)
        self._agree(opening, channel)
        self._openings[channel] = opening
        if method.kind != "published":  # which is no way to average
            self._method = method.name
        self._opened[channel] = schema, method, codec
        if together is not None:
            self._together.add(channel)
        self._tell_room()
        if not late and self._method:
            self._ready()

    def _tell_room(self) -> None:
        """Tell the crew, and so those who come, how many seats it may have for all that is averaged here."""
        entrance = self._entrance
        seats = min(method.seats_max for _, method, _ in self._opened.values())
        if entrance is not None and entrance.card.seats != seats:
            entrance.card = msgspec.structs.replace(entrance.card, seats=seats)
            self._driver.describe(entrance.card)

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> DriverPending | DonePending:
        """Begin the channel's next round. A peer whose place is another's averages with nobody."""
        if self._driver.lost_seat:
            parts = self._opened[channel][0].fragments if channel in self._opened else 1
            k = len(values) // parts
            bit, members = (self.me, ()) if self.me < PEERS_MAX else (0, (self.me,))
            heard = np.full(k, 1 << bit, np.uint64)
            none = nobodys(channel, values[:k], np.full(k, weight, np.float32), heard, None)
            return DonePending(replace(none, members=members))
        due = max(due, self._after.get(channel, -1) + 1)
        return self._begin(Average(channel, values, weight, deadline_s, aside, due, number=number))

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        number: int = -1,
    ) -> DriverPending | DonePending:
        """Begin the channel's next round with rows to be gathered; without a place, nobody has them."""
        if self._driver.lost_seat:
            return DonePending(nothing_gathered(channel))
        due = self._after.get(channel, -1) + 1
        return self._begin(Offer(channel, rows, weight, deadline_s, aside, due, number=number))

    def publish(self, ask: Publish) -> None:
        """Have the driver tell the others of these values. A peer whose place is another's tells nobody.

        Raises ragtag.network.driver.mailbox.DriverFailed where the driver has ended.
        """
        if not self._driver.lost_seat:
            _result(self._driver.publish(ask), self._driver)

    def published(self, channel: int) -> tuple[Publisher, float]:
        """What a channel has brought, and what time it is on the driver's clock."""
        return publisher_of(self._driver.node, channel), self._driver.now_s()

    def _begin(self, ask: Average | Offer) -> DriverPending:
        if ask.channel in self._begun:
            # The trainer was interrupted (Ctrl-C in a notebook) amid the last one, and goes on. A channel has
            # one round at a time: that one ends first, by its own deadlines; nobody takes what comes of it.
            _result(self._driver.idle(ask.channel), self._driver)
        self._begun.add(ask.channel)
        overlap = self._overlaps.setdefault(ask.channel, Overlap())
        ask = replace(ask, overlap_s=overlap.begins(self._driver.now_s()))
        ended = partial(self._begun.discard, ask.channel)
        return DriverPending(self._driver.average(ask), self._driver, overlap, ended)

    def moved(self, driver: Driver, entrance: Entrance) -> None:
        """This peer has joined anew: open on ``driver`` what was open before.

        What all opened together has served: peers that came later never open it, and would be waited for.
        """
        self._driver, self._entrance, self.me = driver, entrance, driver.node.me
        self._forms = Forms()
        for channel in self._together:
            del self._opened[channel]
        self._together.clear()
        for channel, (schema, method, codec) in list(self._opened.items()):
            self._open(channel, schema, method, codec, self.late, self.deadline_s)
        self.standing.again()

    def absent(self, topic: int) -> frozenset[PeerId]:
        """The peers that have left or died, as membership tells. It tells nothing of one that left or died
        before this peer knew it for a member: without membership, or a seat in it, one that answers nothing.
        """
        return self._driver.node.gone | (self.notices(topic).silent - self._driver.seats.keys())

    @property
    def coming(self) -> frozenset[PeerId]:
        """The peers that are on their way into the crew: they have a seat, and give nothing to a mean yet."""
        seats = self._driver.seats.items()
        there = {p for p, h in seats if h.live and h.card.role.gives and not h.card.averaging}
        return frozenset(there - {self.me})

    def heard_of(self, channel: int) -> int:
        """The newest round of a channel that anything has come of; -1: none."""
        return self._driver.node.heard_of(channel) if channel in self._opened else -1

    def meet(
        self,
        name: str,
        blob: bytes,
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        there: frozenset[PeerId] | None = None,
    ) -> dict[PeerId, bytes]:
        """Tell the others a blob and hear theirs, at most 1 MiB each: a meeting that all hold under one name.

        It ends when all that are there have told theirs, or have left, or after ``deadline_s``.

        meanwhile: called now and then until that.
        there: the peers that are waited for, silent in rounds or not (``None``: all that are not).
        """
        if self._driver.lost_seat:
            return {}
        meeting = self._driver.meet(name_hash(f"meeting/{name}"), blob, deadline_s, there=there)
        try:
            return await_meeting(self._driver, meeting, 2 * deadline_s, meanwhile).blobs
        except SeatLost:
            return {}

    def newer(self, channel: int) -> bool:
        """Whether others are known to have begun a round of a channel that this peer has not."""
        return channel in self._opened and self._driver.node.newer(channel)

    def goes_on_after(self, channel: int, round_: int) -> None:
        """From now on this peer begins later rounds of a channel only."""
        self._after[channel] = round_

    def take_part(self, channel: int, round_: int) -> None:
        """Tell the crew that this peer averages from now on; go on once something newer is heard of it, or
        nobody is to begin one (``standing.more``).

        round_: the last one whose result this peer has (-1: none).
        """
        assert self._entrance is not None
        card = self._entrance.card = msgspec.structs.replace(self._entrance.card, averaging=True)
        opening = self._openings[channel]
        event: ChannelEvent | None = StateHere(round_)
        while event is not None:
            effects, event, told = opening.step(time.monotonic(), event), None, None
            for effect in effects:
                if isinstance(effect, TakesPart):
                    told = self._driver.resume(channel, effect.round, card)
                elif isinstance(effect, Arm) and told is not None:
                    self._await(told, channel, effect.at_s - time.monotonic())
                    if told.done():
                        told.result()  # or the driver's error
                        event = Newer()
                    else:
                        event = Expired(effect.timer) if self.standing.more(channel) else Nobody()
                else:
                    self._phases.told(effect)
        self._ready()

    def _living(self) -> set[PeerId]:
        """The other peers that membership takes to live and to average; without one, those that rounds do."""
        seats = self._driver.seats
        if not seats:
            return set(self._driver.node.live) - {self.me}
        return {p for p, h in seats.items() if h.live and h.card.trains} - {self.me}

    def await_newer(self, channel: int, at_most_s: float) -> bool:
        """Wait until others have begun a round of a channel that this peer has not.

        Returns ``False`` where nothing was heard of one in time, or nobody is to begin one
        (``standing.more``), or this peer has no place any more.
        Raises ragtag.network.driver.mailbox.DriverFailed where the driver has ended.
        """
        newer = self._driver.newer(channel)
        self._await(newer, channel, at_most_s)
        return not newer.cancel() and newer.result()

    def _await(self, newer: concurrent.futures.Future[bool], channel: int, at_most_s: float) -> None:
        """Wait for a round that others begin, for as long as somebody is there to begin one."""
        until_s = self._driver.now_s() + at_most_s
        while not newer.done() and self._driver.now_s() < until_s and self.standing.more(channel):
            look_s = min(_AHEAD_LOOK_S, max(0.0, until_s - self._driver.now_s()))
            concurrent.futures.wait((newer,), look_s)

    def await_future(self, future: concurrent.futures.Future[T]) -> T:
        """What a future comes to, or its error; whoever made it bounds the wait."""
        return future.result()

    @property
    def person(self) -> str:
        """Whose process this is; empty: the crew takes no persons."""
        return "" if self._entrance is None else self._entrance.card.person

    def _ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready(self._method)
            self._on_ready = None

    def post(self, topic: int, blob: bytes) -> int:
        """Put this peer's newest value of a topic on the notice board.

        Raises:
            ValueError: there is no such topic, or the value is too large.
            ragtag.network.driver.mailbox.DriverFailed: the driver has ended.
        """
        return _result(self._driver.post(topic, blob), self._driver)

    def post_soon(self, topic: int, blob: bytes) -> None:
        """The same without waiting for the driver; where that has ended, averages say so."""
        self._driver.post(topic, blob)

    def posts(self, topic: int) -> dict[PeerId, bytes]:
        """Every peer's newest value of a topic, one's own included."""
        return self._driver.posts(topic)

    def notices(self, topic: int) -> Notices:
        """The same with numbers: what each peer has acknowledged, and which answer nothing."""
        return self._driver.notices(topic)

    def now_s(self) -> float:
        """Seconds, by the monotonic clock."""
        return time.monotonic()

    def pause(self, for_s: float) -> None:
        """Sleep."""
        time.sleep(for_s)

    def _agree(self, opening: ChannelWay, channel: int) -> None:
        """Carry out what ``opening`` wants until the channel is ready.

        Raises:
            SchemaMismatch: the others average something else.
            SeatLost: another peer has this one's seat.
        """
        driver = self._driver
        event: ChannelEvent | None = Start()
        while event is not None:
            effects, event, meeting = opening.step(time.monotonic(), event), None, None
            for effect in effects:
                if isinstance(effect, Tell):
                    for_s, says = effect.deadline_s - time.monotonic(), self._saying(opening, effect)
                    meeting = driver.meet(effect.number, effect.blob, for_s, effect.late, effect.there)
                elif isinstance(effect, Left):
                    driver.leave(effect.peer)
                elif isinstance(effect, Differs):
                    raise SchemaMismatch(effect.why)
                elif isinstance(effect, IsOpen):
                    driver.probed(channel, effect.probe_s)
                elif isinstance(effect, ProbeRound):
                    event = self._probe(effect, opening.probes)
                elif isinstance(effect, Arm) and meeting is not None:
                    try:
                        met = await_meeting(driver, meeting, effect.at_s - time.monotonic(), says)
                        event = known_to(driver, met, channel)
                    except TimeoutError:
                        event = Expired(effect.timer)
                else:
                    self._phases.told(effect)

    def _saying(self, opening: ChannelWay, tell: Tell) -> Callable[[], None]:
        """To be called while others are waited for: says once for whom, and until when."""
        at_s = time.monotonic() + _SAID_AFTER_S

        def says() -> None:
            nonlocal at_s
            now_s = time.monotonic()
            awaited = self._driver.node.awaited(tell.number) if now_s >= at_s else ()
            if awaited:
                at_s = math.inf
                self._phases.told(opening.waits_for(sorted(awaited), tell.deadline_s - now_s))

        return says

    def _probe(self, probe: ProbeRound, channel: int) -> Timed:
        """Average zeros once on a channel, and say how long the longer stage took."""
        zeros = np.zeros((probe.chunks, fp32.elements), np.float32)
        self._driver.probed(channel, probe.for_s)  # the one before bounds none
        outcome = self.start(channel, zeros, 1.0, probe.for_s).wait()
        return Timed.of(outcome, self._driver.rto_s())
