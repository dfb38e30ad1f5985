"""Rate control by a model of the path: BBR, indifferent to what the path loses of itself.

A path is described by two figures that cannot be measured at one time: the rate at which it delivers, seen
only while it is full, and its round trip, seen only while its queue is empty. BBR (Cardwell and others,
draft-ietf-ccwg-bbr, the names of states and signals are its) fills and drains the path in turn and measures
each. It paces at the rate, and keeps about one product of the two under way.

The draft lowers its rate when more than 2 % of a round trip's datagrams are lost. A link that drops one
datagram in ten of itself would starve. Here the threshold lies above the path's own losses (``Ambient``),
which are those that remain when the path is not full, and above what chance makes of them: bursts scatter
more than single losses do (``Ambient.bursts``). What was overtaken is no loss, which shows when it comes
(``Overtaken``, ``BeforeLoss``). What is under way and lost takes its share of the line, so rates and windows
are given for what is sent: what is delivered over one minus that share.

Four things are different from TCP's BBR, as both ends are busy Python processes:
- Round trips are the path's alone. What a datagram and its answer waited for at the two ends is known
  (``Delivery.kept_s``). The window has room for it as for the path's product, twice: while answers wait,
  what they will let leave is to be on the line.
- Rates and rounds are measured over five trains at least, however short a round trip is.
- The paths of one peer mostly share its uplink, and a stage is over when the last message is. So each may
  send at the mean of what all of them deliver, whatever it has found itself, and all together at hardly more
  than was seen to go through at once (``path.Uplink``).
- A driver that was late sends at once what was due meanwhile. Where more is lost than the path's own, it
  makes up for half as much (``makeup_s``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ragtag.network.control.controller import QUANTUM_S, WINDOW_FIRST, Delivery

WINDOW_MIN = 4
"""Datagrams that keep a path busy while answers come for two at a time (draft, BBR.MinPipeCwnd)."""
_LOSS_EXCESS = 0.02  # draft, BBR.LossThresh: above the path's own
_LOSS_SHORT = 0.1  # above the path's own: no chance and no other traffic's
_LOSSES_MIN = 6.0  # draft, BBR.StartupFullLossCnt
_SIGMAS = 3.0  # losses above what chance explains
_POOL = 1024.0  # datagrams from which the path's own losses are known: one in twenty to within .7 %
_DOUBT = 64.0  # datagrams that are supposed before any are known:
_SUPPOSED = 0.1  # of which so many may have been lost by the path
_KEEP = 0.9  # of that, from cycle to cycle
_AMBIENT_MAX = 0.5
_BURSTS_MAX = 16.0  # beyond, a whole round's losses are one
_OVERTAKES_ROUNDS = 64  # for so long one datagram that was overtaken speaks for others
_SETTLED_ROUNDS = 2  # what was overtaken has come: the round after the next begins
_MEETING_S = 4.0 * QUANTUM_S  # trains of three milliseconds that meet in a queue wait for each other so long
_EMPTY_S = 2.0 * QUANTUM_S
_DEEP = 4.0
_BETA = 0.7  # draft, BBR.Beta; RFC 9438, section 4.6
_INCREASE = 3.0 * (1.0 - _BETA) / (1.0 + _BETA)  # datagrams a round trip: RFC 9438, section 4.3
_CUBIC = 0.4  # RFC 9438, section 5: datagrams a second cubed
_AHEAD = 1.2  # a window's datagrams leave in somewhat less than a round trip
_STANDING_S = 2.0 * _MEETING_S  # a crew's own trains do not wait for each other so long
_FULL = 0.8  # of the deepest queue: it is full
_HELD = _BETA / 2.0  # of the deepest queue: what one holds that had half of it, and has backed off
_BESET = 2
_GROWTH = 1.25  # draft: a rate that grows by less in three round trips has come to the path's
_PLATEAU_ROUNDS = 3
_DRAIN_ROUNDS = 3
_TURNS_MAX = 3  # more would make trains of more than three milliseconds
_DOUBLINGS_MAX = 16
_CRUISE_ROUNDS = 6  # version 1 probes every eighth round trip
_KEPT_ROUNDS = (
    12  # of which three in four say how long ends keep an answer: a peer that stood still once does not
)
_MIN_RTT_S = 10.0  # draft, BBR.MinRTTFilterLen
_PROBE_RTT_S = 0.2  # draft, BBR.ProbeRTTDuration
_STOOD_S = 2.0 * _PROBE_RTT_S  # so soon it is forgotten that others kept still for that


class Probe(StrEnum):
    """What is being found out."""

    STARTUP = "startup"
    DRAIN = "drain"
    DOWN = "down"
    CRUISE = "cruise"
    REFILL = "refill"
    UP = "up"
    PROBE_RTT = "probe rtt"


_PACING = {
    # version 1's 1.25 and .75: what one round trip adds to the queue, the next one takes
    Probe.STARTUP: 2.77, Probe.DRAIN: 0.5, Probe.DOWN: 0.75, Probe.CRUISE: 1.0, Probe.REFILL: 1.0,
    Probe.UP: 1.25, Probe.PROBE_RTT: 1.0,
}  # fmt: skip
_WINDOW = dict.fromkeys(Probe, 2.0) | {Probe.UP: 2.25, Probe.PROBE_RTT: 0.5}
_PROBING = frozenset({Probe.STARTUP, Probe.REFILL, Probe.UP})


@dataclass(slots=True)
class Losses:
    """Datagrams of which it is known that they came or were lost, and how many of them were lost."""

    passed: float = 0.0
    lost: float = 0.0

    @property
    def share(self) -> float:
        """Lost of those passed."""
        return self.lost / self.passed if self.passed else 0.0

    def add(self, passed: float, lost: float, within: float = math.inf) -> float:
        """Count some more. within: they are of about the last so many; what was before fades.

        Returns what of that is kept: 1 is all.
        """
        keep = min(1.0, within / (self.passed + passed)) if passed else 1.0
        self.passed = keep * self.passed + passed
        self.lost = keep * self.lost + lost
        return keep


class Settled(NamedTuple):
    """Losses of one round that are believed. light: of what left with little under way."""

    light: bool
    passed: float
    lost: float


@dataclass(slots=True)
class Overtaken:
    """Losses that are not believed yet, on a path on which datagrams overtake others.

    What was overtaken counts as lost until it comes. Where that happens losses are told two round trips
    later, less what has come of them; elsewhere at once.
    """

    _until: int = -1  # the round up to which the path is taken for one that does so
    _pending: dict[tuple[int, bool], Losses] = field(default_factory=dict)

    def settle(self, round_: int, light: bool, passed: float, lost: float) -> list[Settled]:
        """An answer: what is believed since now. lost: below 0 where so many came that had been overtaken."""
        if lost < 0.0:
            self._until = round_ + _OVERTAKES_ROUNDS
            for losses in self._pending.values():
                came = min(max(0.0, losses.lost), -lost)
                losses.lost, lost = losses.lost - came, lost + came
        self._pending.setdefault((round_, light), Losses()).add(passed, lost)
        newest = round_ if round_ > self._until else round_ - _SETTLED_ROUNDS
        settled = []
        for key in [key for key in self._pending if key[0] <= newest]:
            losses = self._pending.pop(key)
            settled.append(Settled(key[1], losses.passed, losses.lost))
        return settled


class Squares(NamedTuple):
    """What rounds lost, squared; times what they passed; and what they passed, squared."""

    lost: float
    both: float
    passed: float

    def times(self, keep: float) -> Squares:
        """All of it, faded."""
        return Squares(keep * self.lost, keep * self.both, keep * self.passed)


@dataclass(slots=True)
class Ambient:
    """The share of datagrams that a path loses however little is sent, and whether it does so in bursts.

    What left while less was under way than half of what fills the path met no full queue of this peer's. The
    beginning of each message does so; what averages comes in messages. Until something of that is known, one
    in ten may be the path's.
    """

    share: float = 0.0
    _pool: Losses = field(default_factory=Losses)
    _squares: Squares = field(default_factory=lambda: Squares(0.0, 0.0, 0.0))

    def learn(self, passed: float, lost: float) -> None:
        """Datagrams of one round that left while little was under way."""
        before = self._squares.times(self._pool.add(passed, lost, within=_POOL))
        self._squares = Squares(
            before.lost + lost * lost, before.both + lost * passed, before.passed + passed * passed
        )
        self._tell()

    def age(self) -> None:
        """A cycle is over: what is not seen again is forgotten."""
        self._pool.passed *= _KEEP
        self._pool.lost *= _KEEP
        self._squares = self._squares.times(_KEEP)
        self._tell()

    @property
    def bursts(self) -> float:
        """How much more the losses of a round scatter than if each datagram were lost by itself: the index of
        dispersion, 1 for single losses.
        """
        p = self._pool.lost / self._pool.passed if self._pool.passed else 0.0
        if not 0.0 < p < 1.0:
            return 1.0
        of = self._squares
        over = (of.lost - 2.0 * p * of.both + p * p * of.passed) / (p * (1.0 - p) * self._pool.passed)
        return min(_BURSTS_MAX, max(1.0, over))

    def _tell(self) -> None:
        self.share = min(_AMBIENT_MAX, max(0.0, self._pool.lost / (self._pool.passed + _DOUBT)))

    def exceeded(self, seen: Losses, by: float = _LOSS_EXCESS) -> bool:
        """Whether a queue must have been full: more was lost than the path loses, and than chance does."""
        if seen.lost < _LOSSES_MIN:
            return False
        known = self._pool.passed + _DOUBT
        usual = (self._pool.lost + _SUPPOSED * _DOUBT) / known
        wide = max(usual, _LOSS_EXCESS)
        chance = math.sqrt(wide * (1.0 - wide) * self.bursts * (1.0 / seen.passed + 1.0 / known))
        return seen.share > usual + by + _SIGMAS * chance


@dataclass(slots=True)
class BeforeLoss:
    """How things stood before losses changed the course, as they may have been overtaken datagrams.

    round: when that was. lost: how many were. came: how many came since that had counted as lost.
    """

    round: int
    lost: float
    phase: Probe
    longterm: float
    shortterm: float
    filled: bool
    short: bool
    makeup_s: float
    came: float = 0.0


@dataclass(slots=True)
class Cubic:
    """A window that grows until the queue is full, as TCP's does (RFC 9438).

    It grows to what it was when the queue was full last, first fast and then slowly, and beyond; and at least
    as fast as Reno's. Before the queue was full for the first time it doubles from round to round.

    window: datagrams under way.
    """

    window: float
    _full: float = 0.0  # W_max
    _since_s: float = math.inf  # when it last shrank
    _reno: float = 0.0

    def grow(self, now_s: float, rtt_s: float) -> None:
        """A round trip is over in which the queue was not full."""
        if self._since_s == math.inf:
            self.window *= 2.0
            return
        back_s = (self._full * (1.0 - _BETA) / _CUBIC) ** (1.0 / 3.0)
        cubic = self._full + _CUBIC * (now_s - self._since_s + rtt_s - back_s) ** 3
        self._reno += _INCREASE
        self.window = max(self.window, min(max(cubic, self._reno), 1.5 * self.window))

    def shrink(self, now_s: float) -> None:
        """The queue is full."""
        self._full, self._since_s = self.window, now_s
        self.window = self._reno = max(_BETA * self.window, WINDOW_MIN)


@dataclass(slots=True)
class Bbr:
    """BBR as drafted, with the path's own losses known, and probing by round trips as in its first version.

    Rounds are round trips by what was sent (``Delivery.rounds``), so a path that stands idle between two
    averages learns nothing meanwhile and forgets nothing.

    bandwidth: datagrams a second that the path delivers: the most of two cycles of probing.
    min_rtt_s: the shortest round trip of ten seconds, or since the path stood idle after those.
    ambient: what the path loses of itself.
    longterm: datagrams under way at which a probe lost too many; inf: none has.
    shortterm: datagrams a second, since too many were lost without a probe, and until the next one.
    compete: by what this path keeps its share beside others that keep the queue full; ``None``: there are
        none.
    _short: the queue has overflowed though nothing in it had to wait for long.
    """

    window: float = WINDOW_FIRST
    rate: float = math.inf
    busy: int = 1
    fair: float = 0.0
    part: float = 1.0
    crowded: bool = False
    makeup_s: float = math.inf
    phase: Probe = Probe.STARTUP
    bandwidth: float = 0.0
    min_rtt_s: float = math.inf
    ambient: Ambient = field(default_factory=Ambient)
    longterm: float = math.inf
    shortterm: float = math.inf
    compete: Cubic | None = None
    _round: int = 0
    _began: int = 0  # the round in which this phase began
    _overtaken: Overtaken = field(default_factory=Overtaken)
    _before_loss: BeforeLoss | None = None
    _seen: Losses = field(default_factory=Losses)  # in this round
    _light: Losses = field(default_factory=Losses)  # and of what left with little under way
    _latest: float = 0.0  # delivered a second in this round, at most
    _cycle: tuple[float, float] = (0.0, 0.0)  # most of the last cycle, and of this one
    _full: float = 0.0
    _full_rounds: int = 0
    _filled: bool = False
    _short: bool = False
    _grew: bool = False
    _min_rtt_at_s: float = 0.0
    _probe_rtt_until_s: float = math.inf
    _queued_s: float = 0.0  # what was answered last has waited in queues so long,
    _deepest_s: float = 0.0  # and so long at most;
    _lowest_s: float = math.inf  # in this cycle or message so long at least,
    _peak_s: float = 0.0  # in this round at most;
    _stood_s: tuple[float, float] = (math.inf, math.inf)  # at least, before and since the time below
    _stood_since_s: float = 0.0
    _paths: int = 1  # of this peer that were busy at once
    _made_up_s: tuple[float, float] = (0.0, 0.0)  # by one train at most, in the last round and in this one
    _most: int = 0  # datagrams under way in this round at most
    _beset: int = 0  # of the last ones, in how many others kept a queue
    _before_s: float = math.inf  # the shortest round trip, before it is looked for anew
    _kept_s: list[float] = field(default_factory=lambda: [0.0] * _KEPT_ROUNDS)

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        """A path that stood idle has an empty queue: nothing is left to drain, and its round trip shows."""
        before_s, longest_s = self._made_up_s
        self._made_up_s = before_s, max(longest_s, count / self.rate - self.train_s)
        if count != in_flight:
            return
        self._look_for_others()
        if self.phase in (Probe.DRAIN, Probe.DOWN):
            self._enter(Probe.CRUISE)
            self._pace(self._to_send(self._rate()))
        if now_s > self._min_rtt_at_s + _MIN_RTT_S:
            self.min_rtt_s, self._min_rtt_at_s = math.inf, now_s

    def acknowledged(self, sample: Delivery) -> None:
        """Update the model, go from phase to phase, and set the rate and the window."""
        # what chance explains is a number of datagrams, each with several packets
        passed, lost = sample.passed / sample.together, (sample.passed - sample.delivered) / sample.together
        self._paths = max(self._paths, self.busy)
        self._most = max(self._most, sample.tx_in_flight, sample.in_flight)
        self._measure(sample)
        if lost < 0.0:
            self._forgive(-lost)
        for settled in self._overtaken.settle(sample.rounds, self._unfilled(sample), passed, lost):
            self._seen.add(settled.passed, settled.lost)
            if settled.light:
                self._light.add(settled.passed, settled.lost)
        if sample.rounds != self._round:
            self._round = sample.rounds
            if self._before_loss is not None and self._round > self._before_loss.round + _SETTLED_ROUNDS:
                self._before_loss = None
            self.ambient.learn(self._light.passed, self._light.lost)
            self._turn(sample)
            self._seen, self._light, self._latest = Losses(), Losses(), 0.0
            self._kept_s[self._round % _KEPT_ROUNDS] = 0.0
        self._move(sample)
        self._set(sample)

    # -- The model

    @property
    def train_s(self) -> float:
        """How long a train of datagrams lasts at this path's rate.

        Busy paths take turns: while three send trains of three milliseconds, one leaves each millisecond. So
        a driver has a third of the work. Where the queue is known to be short, trains are; and until the
        path was full once, as rates are measured over several of them and a startup must not take long.
        """
        turns = self._filled and self.longterm == math.inf
        return QUANTUM_S * (min(self.busy, _TURNS_MAX) if turns else 1)

    @property
    def product(self) -> float:
        """The path's bandwidth times its round trip: datagrams that fill it without a queue."""
        return self._rate() * self.min_rtt_s if self.min_rtt_s < math.inf else float(WINDOW_FIRST)

    @property
    def _queueing(self) -> bool:
        """Whether what arrives has waited longer than trains of paced datagrams wait for each other."""
        return self._queued_s > (self._meeting_s - _MEETING_S + QUANTUM_S if self._short else self._meeting_s)

    @property
    def _meeting_s(self) -> float:
        """How long trains of paced datagrams wait for each other in a queue."""
        return (_GROWTH - 1.0) * self.min_rtt_s + _MEETING_S

    @property
    def _others_s(self) -> float:
        """How long a queue of others stands, and not so long that they seem to fill it (``compete``).

        What this path has under way waits there, and keeps the line no fuller. A crew's own queue has mostly
        been empty, too, in the time that is looked at. Its other senders to this receiver are as many as
        this peer's other paths, and each may have a train there.
        """
        standing_s, trains = min(self._stood_s), (self._paths - 1) * min(self._paths, _TURNS_MAX)
        return max(0.0, standing_s - trains * QUANTUM_S) if standing_s <= _STANDING_S else 0.0

    def _unfilled(self, sample: Delivery) -> bool:
        """Whether what was answered has met no full queue.

        It left with so little under way that it fills no path: half of what fills this one, or a first train.
        Its first datagram decides, as where some are lost an answer is of more. Or it did not wait on a path
        on which datagrams have waited far longer.
        """
        light = max(self._to_send(self.product) / 2, self._rate() * QUANTUM_S + 1, WINDOW_MIN)
        if sample.tx_first <= light:
            return not self._queueing
        if sample.rtt_s is None or sample.tx_span_s > self._deepest_s / 2.0:
            return False
        return self._queued_s <= _EMPTY_S <= self._deepest_s / _DEEP

    @property
    def found(self) -> bool:
        """Whether the path was once as full as it gets, at the end of the startup."""
        return self._filled

    @property
    def kept_s(self) -> float:
        """How long busy ends keep a datagram or its answer, in three rounds of four."""
        return sorted(self._kept_s)[3 * _KEPT_ROUNDS // 4]

    def _rate(self) -> float:
        return min(self.bandwidth, self.shortterm)

    def _measure(self, sample: Delivery) -> None:
        rate, now_s = sample.rate, sample.now_s
        if rate is not None:
            self._latest = max(self._latest, rate)
            if not sample.app_limited or rate >= self.bandwidth:
                self._cycle = self._cycle[0], max(self._cycle[1], rate)
                self.bandwidth = max(self._cycle)
        if sample.at_least > self.bandwidth:
            self._cycle = self._cycle[0], sample.at_least
            self.bandwidth = sample.at_least
        if sample.rtt_s is not None and sample.rtt_s <= self.min_rtt_s:
            self.min_rtt_s, self._min_rtt_at_s = sample.rtt_s, now_s
        at = self._round % _KEPT_ROUNDS
        self._kept_s[at] = max(self._kept_s[at], sample.kept_s)
        if sample.rtt_s is not None:
            self._queued_s = sample.rtt_s - self.min_rtt_s
            self._deepest_s = max(self._deepest_s, self._queued_s)
            self._lowest_s = min(self._lowest_s, self._queued_s)
            if now_s > self._stood_since_s + _STOOD_S:
                self._stood_s, self._stood_since_s = (self._stood_s[1], math.inf), now_s
            self._stood_s = self._stood_s[0], min(self._stood_s[1], self._queued_s)
            self._peak_s = max(self._peak_s, self._queued_s)

    # -- From phase to phase

    def _turn(self, sample: Delivery) -> None:
        """A round trip is over."""
        seen = self._seen
        self._grew = False
        if self.phase in (Probe.STARTUP, Probe.UP) and not sample.app_limited and self._latest > 0:
            if self._latest >= _GROWTH * self._full:
                self._grew, self._full, self._full_rounds = self._full > 0, self._latest, 0
            else:
                self._full_rounds += 1
        if self.compete is not None:
            self._contend(sample)
        elif self.ambient.exceeded(seen) and not self._grew:
            self._lose(sample)
        self._peak_s, self._most = 0.0, 0
        self._made_up_s = self._made_up_s[1], 0.0

    def _contend(self, sample: Delivery) -> None:
        """Grow and shrink as those do that keep the queue full, so that this path keeps its share."""
        seen, rival = self._seen, self.compete
        assert rival is not None
        if self._peak_s >= _FULL * self._deepest_s and seen.lost > self.ambient.share * seen.passed:
            rival.shrink(sample.now_s)
        elif 2.0 * self._most >= rival.window:  # else it is not the window that bounds what is under way
            rival.grow(sample.now_s, self.min_rtt_s + self._queued_s)

    def _look_for_others(self) -> None:
        """A message or a cycle is over. In each this path drains what is its own; others' queue stands.

        But one that competes drains its own in no cycle: what stands may be that.
        """
        if self._lowest_s < math.inf:
            stands = self._lowest_s > max(_STANDING_S, _HELD * self._deepest_s)
            if self.compete is None or not stands:
                self._beset_by(stands)
            self._lowest_s = math.inf

    def _beset_by(self, stands: bool) -> None:
        """Whether a queue stands that is not this path's. It is others' if it does so twice.

        While all paths of this peer claim more together than goes through, it is theirs, and says nothing:
        taken for others' it would have all of them fill it, and lose what overflows.
        """
        if stands and self.crowded:
            return
        self._beset = min(_BESET, self._beset + 1) if stands else max(0, self._beset - 1)
        if self._beset == 0:
            self.compete = None
        elif self._beset == _BESET and self.compete is None:
            self.compete = Cubic(max(self.window, WINDOW_MIN))

    def _lose(self, sample: Delivery) -> None:
        """More was lost in a round than the path loses of itself."""
        self._before_loss = BeforeLoss(
            self._round, self._seen.lost, self.phase, self.longterm, self.shortterm,
            self._filled, self._short, self.makeup_s,
        )  # fmt: skip
        if self._deepest_s < 2.0 * self._meeting_s:  # what overflows has never shown more than that
            self._short |= self.ambient.exceeded(self._seen, _LOSS_SHORT)
        least_s = QUANTUM_S if self._short else _MEETING_S
        self.makeup_s = max(min(self.makeup_s, max(self._made_up_s)) / 2.0, least_s)
        if self.phase in _PROBING:
            needed = self._to_send(self.product + self._rate() * (self.kept_s + QUANTUM_S))
            self.longterm = max(needed, _BETA * min(self.window, sample.in_flight), WINDOW_MIN)
            if self.phase == Probe.STARTUP:
                self._full_rounds = _PLATEAU_ROUNDS
            else:
                self._enter(Probe.DOWN)
        elif self._latest > 0:
            self.shortterm = max(self._latest, _BETA * self._rate())

    def _forgive(self, came: float) -> None:
        """So many came that had counted as lost: where most of those that changed the course did, go back."""
        before = self._before_loss
        if before is None:
            return
        before.came += came
        if before.came >= before.lost / 2.0:
            self.phase, self.longterm, self.shortterm = before.phase, before.longterm, before.shortterm
            self._filled, self._full_rounds, self._short = before.filled, 0, before.short
            self.makeup_s = before.makeup_s
            self._before_loss = None

    def _move(self, sample: Delivery) -> None:
        rounds, in_flight = self._round - self._began, sample.in_flight - sample.passed
        phase = self.phase
        if phase == Probe.PROBE_RTT:
            self._hold(sample, in_flight)
        elif self.min_rtt_s < math.inf and sample.now_s > self._min_rtt_at_s + _MIN_RTT_S:
            self._enter(Probe.PROBE_RTT)
            self._before_s = self.min_rtt_s
            self.min_rtt_s, self._probe_rtt_until_s = math.inf, math.inf
        elif phase == Probe.STARTUP:
            if self._full_rounds >= _PLATEAU_ROUNDS:
                self._filled = True
                self._enter(Probe.DRAIN)
        elif phase == Probe.DRAIN:
            if not self._queueing or rounds > _DRAIN_ROUNDS:
                self._enter(Probe.DOWN)
        elif phase == Probe.DOWN:
            if rounds >= 1 and (not self._queueing or rounds > _DRAIN_ROUNDS):
                self._enter(Probe.CRUISE)
        elif phase == Probe.CRUISE:
            if rounds >= _CRUISE_ROUNDS:
                self.shortterm = math.inf
                self._enter(Probe.REFILL)
            elif rounds >= 1 and self._short and self._queueing:
                self._enter(Probe.DOWN)
        elif phase == Probe.REFILL:
            if rounds >= 1:
                self._full, self._full_rounds = self._latest, 0
                self._enter(Probe.UP)
        elif self.window >= self.longterm:  # it is the bound: a little more, and in each round twice as much
            self._full_rounds = 0
            self.longterm += sample.passed * 2.0 ** min(rounds, _DOUBLINGS_MAX) / self.window
        elif rounds >= 1 and (self._full_rounds >= _PLATEAU_ROUNDS or self._queueing):
            self._enter(Probe.DOWN)

    def _enter(self, phase: Probe) -> None:
        if phase == Probe.DOWN:
            if self._cycle[1]:  # else there was little to send, and nothing was learned
                self._cycle = self._cycle[1], 0.0
            self._look_for_others()
            self.ambient.age()
            self.makeup_s = _GROWTH * self.makeup_s
            self._deepest_s *= _KEEP
        self.phase, self._began = phase, self._round

    def _hold(self, sample: Delivery, in_flight: int) -> None:
        """Little is under way for a while, so that the queue is empty once; then go on as before."""
        if self._probe_rtt_until_s == math.inf:
            if in_flight <= self.window:
                self._probe_rtt_until_s = sample.now_s + _PROBE_RTT_S
        elif sample.now_s >= self._probe_rtt_until_s:
            self._min_rtt_at_s = sample.now_s
            stands = self.min_rtt_s > self._before_s + _STANDING_S
            self._beset_by(stands)
            if stands:  # what others keep in the queue is no part of the path; if it is, that shows in time
                self.min_rtt_s = (self._before_s + self.min_rtt_s) / 2.0
            self._enter(Probe.CRUISE if self._filled else Probe.STARTUP)

    # -- What follows

    def _to_send(self, delivered: float) -> float:
        """How much to send so that ``delivered`` arrives."""
        return delivered / (1.0 - self.ambient.share)

    def _pace(self, rate: float) -> None:
        """Set the rate at which to send; before the path was full, only upwards.

        As the smallest window may leave in a round trip, so it may be paced. What was measured while nothing
        came through, a datagram in seconds, would hold a path for as long again.
        """
        least = WINDOW_MIN / self.min_rtt_s if 0.0 < self.min_rtt_s < math.inf else 0.0
        pacing = max(_PACING[self.phase] * self.part * max(rate, self.fair), least)
        if pacing > 0.0 and (self._filled or pacing > self.rate or self.rate == math.inf):
            self.rate = pacing

    def _set(self, sample: Delivery) -> None:
        rate = self._to_send(self._rate())
        if rate <= 0.0:
            rate = self.window / max(sample.srtt_s, 1e-3)
        self._pace(rate)
        target = self._to_send(_WINDOW[self.phase] * self.part * (self.product + self._rate() * self.kept_s))
        target = max(target, self.part * max(rate, self.fair) * (self.train_s + 2.0 * QUANTUM_S), WINDOW_MIN)
        if self._filled:
            self.window = min(self.window + sample.passed, target + rate * self._others_s)
        elif self.window < target:
            self.window += sample.passed
        if self.phase == Probe.PROBE_RTT:
            little = _WINDOW[Probe.PROBE_RTT] * self.product + self._rate() * self.kept_s
            self.window = min(self.window, self._to_send(little))
            self.window = max(self.window, WINDOW_MIN)
        elif self.compete is not None:
            pace = self.compete.window / (self.min_rtt_s + self._queued_s)
            self.rate = min(_AHEAD * pace, _PACING[Probe.STARTUP] * self.bandwidth)
            self.window = self.compete.window + pace * self.kept_s
        elif self._filled:
            self.window = max(WINDOW_MIN, min(self.window, self.longterm))
