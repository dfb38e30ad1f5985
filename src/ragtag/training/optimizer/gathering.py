"""What a crew gathers towards its next step, where steps have a target batch (``schedules.target``).

All optimizers of a peer that step towards it have one ``Gathering``, since the crew makes their steps
together: peers that decided for each of their optimizers by itself would wait for each other crosswise, one
in an average of the first, one in an average of the second. Of the optimizers that a script steps one after
the other, the last one *leads*: at its step, with the gradients of all at hand, it is decided whether the
crew's step is due, by its samples, and then all of them average. One that is stepped less often than another
gathers what comes until then.

Two things of one peer are here, since they go by the same counts.

*What it tells*, on the notice board: which step it gathers for, how many samples it has, how many a batch has
and how long one takes. It tells each of the first few batches and then each time that its samples have grown
by a quarter; when it stands by, and when it begins to average. The last makes those begin that do not know
yet that the target is met. A step's number is that of its round.

*What it believes of the others.* Clocks need not agree: of each post the sender's time is told, and the least
difference to the time here of the last posts is the offset (they came fastest); so a post that lay here
while this peer computed is as old as it is. Words that cannot be read, or that cannot be, do not count. Nor
do those of a peer that claimed more than all of the step's weight, that has told a step which there was not,
or whose claims were in no mean twice running: until its words and the rounds fit again.

What became of the samples is in the ``account`` of each optimizer.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Protocol

from ragtag.core.arrival import others_in
from ragtag.core.channels import topic_of
from ragtag.core.types import WEIGHT_MAX, Noted, Outcome, PeerId
from ragtag.schedules.target import Doing, Tally, is_over
from ragtag.training.optimizer.speeds import SHARE_MAX
from ragtag.training.transport import Peers

GROWTH = 0.25
"""Samples are told each time that they have grown by this share."""
TRUST = 4.0
"""A peer that has stood by for so many times as long as a batch takes it measures anew: what made its batches
long may be over, and a peer that computes none would never know. The others may wait for that batch, so it
trusts a measurement that was right for twice as long."""
_WINDOW = 9
_OFFSETS = 32
_STEP_MAX = 1 << 53
_UNDELIVERED_MAX = 2
_AHEAD_MAX = 4
_IDLE_MAX = 3
_POST = struct.Struct("<BBQdddd")
_VERSION = 1
_ROUNDING = 1e-5
POSTS = topic_of("target batch")
"""Of the posts on the notice board."""
_log = logging.getLogger("ragtag")


class Pile(Protocol):
    """What is gathered for one optimizer. batch, pending: samples of its last batch, and all so far."""

    batch: float
    pending: float


@dataclass(slots=True)
class _Heard:
    """What is known of another peer.

    number, tally, at_s: of its newest post; when that was told, by the clock there.
    offsets_s: the time here less the time there, when posts were first seen.
    undelivered: so many steps in a row were its claims in no mean.
    ahead: after so many averages in a row it had told a step that was still to come.
    doubted: why it is not believed (empty: it is).
    """

    number: int
    tally: Tally
    at_s: float
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OFFSETS))
    undelivered: int = 0
    ahead: int = 0
    doubted: str = ""


class Gathering:
    """One peer's part in gathering towards its crew's target.

    target: samples of a step.
    note: told of what others say that is not believed, and of a target that does not fit.
    """

    def __init__(self, target: float, peers: Peers, note: Callable[[Noted], None] | None = None) -> None:
        self.target = target
        self.step = 0
        """The crew's step that is gathered for."""
        self._peers, self._note = peers, note
        self._joined = 0
        self._leads: Pile | None = None
        self._pass: list[Pile] = []  # those stepped since the first of them was, in their order,
        self._before: list[Pile] = []  # and before that
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._told = 0.0
        self._begun: int | None = None  # the step of the average under way
        self._turning = False  # all optimizers average
        self._late = False  # the crew has made that step without this peer
        self._doing: Doing | None = None  # as it was told last
        self._last_s = self._averaged_s = self._computed_s = peers.now_s()
        self._elapsed_s = self._compute_s = 0.0
        self._trust, self._trusted_s = TRUST, 0.0
        self._posted_s, self._post_s = -math.inf, 0.0
        self._heard: dict[PeerId, _Heard] = {}
        self._said: set[str] = set()
        self._idle = 0
        self._alone = False
        self._gives = True

    # -- This peer

    def joined(self) -> None:
        """One more optimizer steps towards the target."""
        self._joined += 1

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self._peers.me

    @property
    def live(self) -> Collection[PeerId]:
        """The peers that answer."""
        return self._peers.live

    @property
    def busy(self) -> float:
        """The share of the time that was computed."""
        return self._compute_s / self._elapsed_s if self._elapsed_s else 0.0

    def opened(self) -> None:
        """A channel is open: what that took is no part of a batch."""
        self._last_s = self._averaged_s = self._computed_s = self._peers.now_s()

    def stepped(self, pile: Pile, overflowed: bool = False) -> bool:
        """An optimizer has gathered a batch, or dropped one that ``overflowed``. Returns whether it leads."""
        known = self._leads
        if pile in self._pass:
            if known not in self._pass or self._pass == self._before:
                self._leads = self._pass[-1]
            self._before, self._pass = self._pass, []
        self._pass.append(pile)
        if known is None and len(self._pass) == self._joined:
            self._leads = known = pile
        if self._leads is not pile:
            return False
        if known is pile:  # else it is not known what its batches take
            self._measure()
        else:
            self._clocked(self._peers.now_s())
        if not overflowed:
            self._tell(pile)
        return True

    def _measure(self) -> None:
        now_s = self._peers.now_s()
        took_s = now_s - self._last_s
        self._compute_s += took_s
        self._computed_s = now_s
        self._clocked(now_s)
        if took_s > 0:
            if not self._took_s and 2.0 * took_s < self._trusted_s:
                self._trust = TRUST
            self._took_s.append(took_s)

    def _tell(self, pile: Pile) -> None:
        """A batch has been gathered: the others are told, where it is time to; persons of what is odd."""
        batch, pending = pile.batch, pile.pending
        if batch >= self.target:
            self._say(
                "small",
                f"a batch here counts {batch:g} samples, and target_batch is {self.target:g}: each batch is "
                "a step of the crew; raise target_batch",
            )
        if self._alone and self._took_s:
            step_s = self.target / batch * median_low(self._took_s) if batch else math.inf
            self._say(
                "alone",
                f"nobody else gathers for the target of {self.target:g} samples: this peer goes on alone, "
                f"and takes {step_s:.3g} s for a step",
            )
        elif not self._alone:
            self._said.discard("alone")
        news = pending >= (1.0 + GROWTH) * self._told or self._doing is Doing.STANDS_BY
        if news and self._peers.now_s() - self._posted_s >= self._post_s / SHARE_MAX:
            self._post(Doing.COMPUTES)

    def stands_by(self) -> None:
        """This peer computes nothing until the crew averages."""
        idle_s = self._peers.now_s() - self._computed_s
        if self._took_s and idle_s >= self._trust * median_low(self._took_s):
            self._trusted_s, self._trust = median_low(self._took_s), 2.0 * self._trust
            self._took_s.clear()
        if self._doing is not Doing.STANDS_BY:
            self._post(Doing.STANDS_BY)

    def decided(self) -> None:
        """This peer computes again, or averages."""
        self._clocked(self._peers.now_s())

    @contextmanager
    def turn(self, arrives: bool) -> Iterator[None]:
        """All optimizers of this peer average, one after the other.

        arrives: with one of them this peer gets into step with the crew, so that what is gathered is of
        another model.
        """
        self._turning, self._late = True, arrives
        if not arrives:
            self._begin()
        try:
            yield
        finally:
            self._turning = self._late = False
            self._clocked(self._peers.now_s())
            self._averaged_s = self._last_s

    def begins(self, pile: Pile) -> bool:
        """An average of an optimizer begins; whether the crew has made this step without this peer, so that
        what is gathered here is of an older model.
        """
        if not self._turning and pile is self._leads:
            self._begin()
        return self._late

    def _begin(self) -> None:
        others = [tally for peer, tally in self.read().items() if peer != self._peers.me]
        self._late = is_over(others, self.step)
        self._gives = not self._late
        self._post(Doing.AVERAGES)
        self._begun, self.step = self.step, self.step + 1
        self._averaged_s = self._peers.now_s()

    def averaged(self, pile: Pile, outcome: Outcome, counted: float, step_samples: float, gave: bool) -> None:
        """An average of an optimizer is over.

        counted: samples gathered here that are in it. step_samples: of all peers. gave: whether what was
        gathered here was offered to it.
        """
        leads = pile is self._leads
        self._late = self._late and self._turning
        if leads or self._turning:
            self._clocked(self._peers.now_s())
            self._averaged_s = self._last_s
        if not gave:
            self._gives, self._late = False, self._turning
        elif not leads:
            return
        step = self.step if self._begun is None else self._begun
        self._begun = None
        self._idle = 0 if counted > 0 or not self._gives else self._idle + 1
        if self._idle >= _IDLE_MAX and self._took_s and len(others_in(outcome, self._peers.me)):
            self._say(
                "slow",
                f"{self._idle} steps of the crew in a row have no sample of this peer, whose batches of "
                f"{pile.batch:g} take {median_low(self._took_s):.3g} s: give smaller batches here, or a "
                f"target above {self.target:g}",
            )
        self._judge(outcome, step_samples)
        self.step = max(step, outcome.round) + 1
        self._told, self._doing = 0.0, None
        if pile.pending:
            self._post(Doing.COMPUTES)

    def failed(self) -> None:
        """An average that had begun ended with an error: this peer gathers for its step anew."""
        if self._begun is not None:
            self.step, self._begun = self._begun, None
        self._told, self._late = 0.0, self._late and self._turning

    def dropped(self, pile: Pile) -> None:
        """What was gathered for an optimizer is in no mean, nor in the one under way."""
        if pile is self._leads:
            self._told, self._begun = 0.0, None

    def ends(self) -> None:
        """Training has ended here: the others are to count on nothing more."""
        if self._leads is not None:
            self._post(Doing.STANDS_BY)

    def _clocked(self, now_s: float) -> None:
        self._elapsed_s, self._last_s = self._elapsed_s + now_s - self._last_s, now_s

    # -- What is told, and what is believed

    def read(self) -> dict[PeerId, Tally]:
        """What each peer that answers has gathered, as far as it is believed, and this one."""
        now_s, me = self._peers.now_s(), self._peers.me
        notices = self._peers.notices(POSTS)
        tallies = {me: self._mine(Doing.COMPUTES)}
        for peer, posted in notices.posts.items():
            if peer == me or peer in notices.silent:
                continue
            heard = self._hear(peer, posted.number, posted.blob, now_s)
            if heard is not None and not heard.doubted:
                age_s = max(0.0, now_s - heard.at_s - min(heard.offsets_s))
                if heard.tally.step < self.step:  # what it does since began with the average that is over
                    age_s = min(age_s, now_s - self._averaged_s)
                tallies[peer] = replace(heard.tally, age_s=age_s)
        self._alone = len(tallies) == 1 and bool(self._heard)
        return tallies

    def _mine(self, doing: Doing) -> Tally:
        batch_s = median_low(self._took_s) if self._took_s else 1e-3
        pile = self._leads
        if pile is None:
            return Tally(self.step, 0.0, 0.0, batch_s, doing)
        return Tally(self.step, 0.0 if self._late else pile.pending, pile.batch, batch_s, doing)

    def _post(self, doing: Doing) -> None:
        """Tell the others; but not what is gathered for the next step while an average is under way, or they
        would take theirs for over.
        """
        if self._begun is not None:
            return
        mine, began_s = self._mine(doing), self._peers.now_s()
        self._told, self._doing = mine.samples, doing
        self._peers.post_soon(POSTS, encode(mine, began_s))
        self._posted_s = self._peers.now_s()
        took_s = self._posted_s - began_s
        self._post_s = took_s if self._post_s == 0.0 else self._post_s + (took_s - self._post_s) / 8

    def _hear(self, peer: PeerId, number: int, blob: bytes, now_s: float) -> _Heard | None:
        """Take a peer's newest post; ``None``: nothing that can be has come from it."""
        known = self._heard.get(peer)
        if known is not None and known.number == number:
            return known
        told = decode(blob)
        if told is None:
            self._doubt(peer, "what it tells of its samples cannot be read, or cannot be")
            return None
        tally, at_s = told
        if known is None or number < known.number or at_s < known.at_s:  # it is a new process there
            known = self._heard[peer] = _Heard(number, tally, at_s)
        before = known.tally.samples if tally.step > known.tally.step else known.tally.before
        known.number, known.tally, known.at_s = number, replace(tally, before=before), at_s
        known.offsets_s.append(now_s - at_s)
        return known

    def _judge(self, outcome: Outcome, step_samples: float) -> None:
        """A round is over: what others told before it must fit what came of it."""
        if not outcome.averaged.any():
            return
        came = others_in(outcome, self._peers.me)
        claims = [peer for peer, heard in self._heard.items() if heard.tally.step == outcome.round]
        most = 2 * len(came.intersection(claims)) > len(claims)  # else this peer was early or late itself
        others = [heard.tally for heard in self._heard.values()]
        behind = len(others) > 1 and is_over(others, outcome.round + 1)
        for peer, heard in self._heard.items():
            tally = heard.tally
            if tally.step > outcome.round + 1:
                heard.ahead += not behind
                if heard.ahead >= _AHEAD_MAX:
                    self._disbelieve(peer, heard, f"step {tally.step}, where the crew is at {outcome.round}")
            elif tally.step == outcome.round and peer in came:
                if tally.samples > step_samples * (1.0 + _ROUNDING):
                    what = f"{tally.samples:g} samples, of {step_samples:g} in a step of all"
                    self._disbelieve(peer, heard, what)
                else:
                    heard.doubted, heard.undelivered, heard.ahead = "", 0, 0
            elif most and tally.step == outcome.round and tally.samples > 0:
                heard.undelivered += 1
                if heard.undelivered >= _UNDELIVERED_MAX:
                    what = f"{tally.samples:g} samples, which came to no average, as before"
                    self._disbelieve(peer, heard, what)

    def _disbelieve(self, peer: PeerId, heard: _Heard, what: str) -> None:
        if not heard.doubted:
            self._doubt(peer, f"it told of {what}")
        heard.doubted = what

    def _doubt(self, peer: PeerId, why: str) -> None:
        self._say(f"doubt {peer} {why[:16]}", f"not believed until it fits again: {why}", peer)

    def _say(self, once: str, what: str, peer: PeerId | None = None) -> None:
        """A warning and a note, the first time."""
        if once in self._said:
            return
        self._said.add(once)
        about = "target batch" if peer is None else f"target batch: peer {peer}"
        _log.warning("%s: %s", about, what)
        if self._note is not None:
            self._note(Noted("target batch", self._peers.me if peer is None else peer, what))


def encode(tally: Tally, at_s: float) -> bytes:
    """A post on the notice board. at_s: when it is told, by the teller's clock."""
    return _POST.pack(_VERSION, tally.doing, tally.step, tally.samples, tally.batch, tally.batch_s, at_s)


def decode(blob: bytes) -> tuple[Tally, float] | None:
    """The same back; ``None``: it is of another version, or nothing that can be."""
    if len(blob) != _POST.size:
        return None
    version, doing, step, samples, batch, batch_s, at_s = _POST.unpack(blob)
    if version != _VERSION or doing > max(Doing) or step > _STEP_MAX or not math.isfinite(at_s):
        return None
    if not (0.0 <= samples <= WEIGHT_MAX and 0.0 <= batch <= WEIGHT_MAX):
        return None
    if not (batch_s > 0 and math.isfinite(batch_s)):
        return None
    return Tally(step, samples, batch, batch_s, Doing(doing)), at_s
