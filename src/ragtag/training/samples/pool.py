"""One pool of samples for the crew: peers claim blocks of an epoch ahead of use, and the fast do more.

A machine without I/O. A peer walks along its own part of the epoch's order, a few blocks at a time (its
lease: about a second of its work); where it meets what others have claimed it goes to the middle of the
largest gap.
The shares of guided self-scheduling (Polychronopoulos, Kuck, IEEE Trans. Computers 36(12), 1987, section 3:
what is left, divided by the number of peers) let all of them end together.

No block is used by two, as long as any of them hears the other. A claim is pending at first. Once each live
peer has acknowledged the post that made it, everybody's claims of that time are known (see
``ragtag.protocols.crew.board``); of two pending claims the one with the lower number stands. What stands is
declared firm in a further post before it is used, and nobody takes what is firm, whatever its number; so one
that was silent meanwhile, and was not waited for, yields when it is back.

Claims are made a lease ahead, so that a peer seldom waits for acknowledgements, and then no longer than some
timeouts of the board (see ``ragtag.training.samples.answers``). In an exclusive arc that nobody else has
entered it does not wait at all. What two use because of that is reported as used twice, as soon as they hear
each other.

What a dead peer had claimed and not reported as used is nobody's: it is missed. That is at most its lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragtag.protocols.crew.board import BLOB_MAX, Notices
from ragtag.training.samples.answers import Answers
from ragtag.training.samples.blocks import LEASE_S, Deck, Pace
from ragtag.training.samples.claiming import alone, enterable, next_claim
from ragtag.training.samples.claims import SPANS_MAX, Section, decode, encode, joined
from ragtag.training.samples.lease import Lease
from ragtag.training.samples.ledger import KEPT, Closing, EpochReport, Ledger, Mask

__all__ = ["Deck", "EpochReport", "Over", "Pool", "Tell", "Use", "Wait"]

OPEN_MAX, OPEN_MAX_EXCLUSIVE = 8, 32
"""Epochs that wait for their report; with one more, the oldest is reported as it is known."""
STALE = 8.0
"""After so many typical pauses between draws (and a lease) a peer asks whether its claims still stand."""


@dataclass(frozen=True, slots=True)
class Use:
    """Draw this block now."""

    epoch: int
    block: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Post this, give its number to ``posted``, and ask again."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again soon: others have not answered yet."""


@dataclass(frozen=True, slots=True)
class Over:
    """All blocks are claimed, and one's own are used."""


class Pool:
    """Peer ``me``'s part.

    process: higher than that of this peer's processes before.
    late: the crew has begun before this peer.
    lease_s: how much work is claimed ahead.
    epoch: the one that is under way.
    reports: of the epochs that all are done with, for the caller to take.
    strangers: the peers whose posts are about other data.
    """

    def __init__(
        self, me: int, deck: Deck, process: int, lease_s: float = LEASE_S, late: bool = False
    ) -> None:
        self._late = late
        self._me, self._deck, self._who, self._lease_s = me, deck, (me, process), lease_s
        self._n = len(deck.sizes)
        self.ledger = Ledger(deck.sizes)
        self.epoch = 0
        self._closing = Closing(self._who, self.ledger, OPEN_MAX_EXCLUSIVE if deck.exclusive else OPEN_MAX)
        self.reports = self._closing.reports
        self.strangers: set[int] = set()
        self._lease, self._pace = Lease(self._who), Pace()
        self._floor = self._said_ready = 0
        self._began = self._beginning = self._hello = self._entered = self._ended = False
        self._stale = self._unsaid = self._dirty = self._reached = False
        self._answers = Answers(me, frozenset({me}))
        self._numbers: dict[int, int] = {}
        self._awaited = self._hello_number = 0
        self._asked_s = self._seen_s = self._hello_s = 0.0
        self._drew_s: float | None = None
        self._cursor = -1

    # -- What the caller does

    @property
    def entered(self) -> bool:
        """Whether this peer knows where the crew is, and claims."""
        return self._entered

    def used(self, epoch: int) -> Mask:
        """bool ``[n_blocks]``: what of an epoch is known to be used."""
        self._see_own()
        return self.ledger.used(epoch) > 0

    def draws_at_once(self, blocks: int) -> None:
        """From now on so many blocks are drawn one right after the other, for one batch."""
        self._pace.batch = blocks

    def begin(self, epoch: int) -> None:
        """Begin an epoch: ``epoch``, or the crew's where that is ahead. Of one that is broken off, blocks
        that were claimed and not used are given back.
        """
        self.epoch = max(epoch, self.epoch + 1) if self._began else epoch
        first = self.epoch * self._n
        if any(start < first for start, _ in (*self._lease.unused(), *self._lease.pending)):
            self._lease.drop_below(first)
            self._floor = self.epoch
        self._began, self._beginning, self._ended, self._drew_s = True, True, False, None

    def posted(self, now_s: float, number: int) -> None:
        """The post that was told has this number."""
        if self._lease.pending and self._lease.number == 0:
            self._lease.number = number
        if not self._hello:
            self._hello, self._hello_number, self._hello_s = True, number, now_s
        self._awaited, self._asked_s, self._reached, self._unsaid = number, now_s, False, False
        self._said_ready, self._dirty = self._closing.ready, True
        self._answers.moved_on()
        self._learn_own(number)

    def next(self, now_s: float, notices: Notices, live: Iterable[int]) -> Use | Tell | Wait | Over:
        """What to do now.

        notices: as they are at this moment, after any post that was told before.
        live: whose acknowledgements are waited for. Peers that are silent on the board are taken for dead:
            one that missed two rounds may only be slow.
        """
        away_s = now_s - self._seen_s
        self._read(now_s, notices, live)
        if self._lease.fresh:
            self._lease.look_again(self.ledger)
        if not self._hello:
            return self._tell()
        if not self._entered and not self._enter(now_s):
            return Wait()
        if away_s > max(self._lease_s, STALE * self._pace.between_s):
            self._stale, self._drew_s = True, None  # others may have taken this peer for dead
            return self._tell()
        if self._stale and not self._answers.enough_know(self._awaited):
            return Wait()
        self._stale = False
        self._abandon()
        self._close()
        if self._beginning:
            self.epoch, self._beginning = max(self.epoch, self._floor), False
            self._closing.begin(self.epoch)
        unused = self._lease.unused()
        if unused and unused[0][0] < (self.epoch + 1) * self._n:
            return self._use(now_s)
        return self._further()

    def settle(
        self, now_s: float, notices: Notices, live: Iterable[int], force: bool = False
    ) -> Tell | Wait | Over:
        """Between epochs: help to report those that are over. ``Over``: all are reported, and the others know
        what this peer told last, or a measured time for that is over.

        force: report them now, as they are known.
        """
        self._read(now_s, notices, live)
        if not self._entered:
            return Over()
        self._close(force)
        if self._closing.ready > self._said_ready or self._unsaid:
            return self._tell()
        told = force or self._answers.enough_know(self._awaited)
        return Over() if told and self._closing.closed >= self.epoch + self._ended else Wait()

    def give_back(self) -> Tell:
        """Nothing more will be drawn: what is claimed and not used is given back."""
        self._lease.drop_below((self.epoch + 2) * self._n)
        return self._tell()

    # -- One step

    def _use(self, now_s: float) -> Use:
        self._answers.moved_on()
        if self._drew_s is not None:
            self._pace.drew(now_s - self._drew_s)
        self._drew_s, self._unsaid = now_s, True
        return Use(*divmod(self._lease.use(), self._n))

    def _further(self) -> Tell | Wait | Over:
        """Nothing firm is left: make firm what is pending, and claim more."""
        lease = self._lease
        if lease.pending and lease.drop_lost(self.ledger):
            self._cursor = -1
        if lease.pending and lease.pending[0][0] < (self.epoch + 1) * self._n:
            mine = alone(self._deck, self.ledger, self._who, lease.pending)
            if not mine and not self._answers.enough_know(lease.number):
                return Wait()
            lease.declare()
            self._plan()
            return self._tell()
        if not lease.pending:
            self._plan()
            if lease.pending:
                return self._tell()
        if self._unsaid:
            return self._tell()
        self._ended = self._dirty = True
        self._close()
        return Over()

    # -- What is said

    def _tell(self) -> Tell:
        self._trim()
        relayed = [s for who, s in self.ledger.sections.items() if who != self._who and self._to_relay(s)]
        relayed.sort(key=lambda section: -section.number)
        return Tell(encode(self._deck.identity, [self._section(0), *relayed], BLOB_MAX))

    def _section(self, number: int) -> Section:
        lease = self._lease
        firm = tuple(joined([*lease.firm, *lease.fresh]))
        epochs = self._closing.started_with, self._closing.closed, self._closing.ready, self.epoch
        return Section(*self._who, number, *epochs, lease.used, firm, tuple(lease.pending), lease.number)

    def _learn_own(self, number: int) -> None:
        self.ledger.sections[self._who] = self._section(number)

    def _see_own(self) -> None:
        """Have the ledger show what one has claimed and used by now, said or not."""
        known = self.ledger.sections.get(self._who)
        self._learn_own(known.number if known is not None else 0)

    def _to_relay(self, section: Section) -> bool:
        """Whether a process is or may be gone, and has claims of epochs that are (or were lately) open."""
        first = (self._closing.closed - KEPT) * self._n
        away = self._gone(section) or section.peer in self._answers.behind(self._awaited)
        return away and any(stop > first for _, stop in (*section.firm, *section.pending))

    def _trim(self) -> None:
        """Leave out what was used of epochs that all have reported; keep a few for peers that are away."""
        known = [s for s in self.ledger.sections.values() if s.process == self.ledger.newest_process(s.peer)]
        here = [s.closed for s in known if not self._gone(s)]
        away = [s.closed for s in known if self._gone(s)]
        floor = min([self._closing.closed, *here, max(min(away, default=0), self._closing.closed - KEPT)])
        self._lease.forget_below(max(floor, self.epoch - self._closing.open_max - KEPT) * self._n)

    # -- What others say

    def _gone(self, section: Section) -> bool:
        """Whether it cannot speak for itself: its peer is not there, or is another process by now."""
        newer = self.ledger.newest_process(section.peer) > section.process
        return newer or section.peer not in self._answers.present

    def _here(self) -> list[Section]:
        """The sections of the others that are there."""
        return [s for who, s in self.ledger.sections.items() if who != self._who and not self._gone(s)]

    def _read(self, now_s: float, notices: Notices, live: Iterable[int]) -> None:
        present = self._answers.present
        self._answers.look(notices, live, max(0.0, now_s - self._seen_s))
        self._seen_s = now_s
        self._dirty |= present != self._answers.present
        for peer, posted in notices.posts.items():
            if peer == self._me or self._numbers.get(peer) == posted.number:
                continue
            self._numbers[peer] = posted.number
            sections = decode(posted.blob, self._deck.identity, peer, posted.number)
            if sections is None:
                self.strangers.add(peer)
                continue
            told = [s for s in sections if s.peer != self._me or s.process < self._who[1]]
            self._dirty |= self.ledger.learn(told)
        reached = self._answers.all_know(self._awaited)
        if reached and not self._reached and self._awaited:
            self._pace.reached(now_s - self._asked_s)
        self._reached = reached

    def _enter(self, now_s: float) -> bool:
        """Begin where the crew is, once everybody's posts are here.

        Where some do not answer, it also takes the next posts of the others: they say what those had claimed,
        and may not have known it so far.
        """
        behind = self._answers.behind(self._awaited)
        unsaid = bool(behind) and any(s.number < self._hello_number for s in self._here() if s.firm)
        enough = self._answers.enough_know(self._awaited)
        if not enough or (unsaid and now_s - self._hello_s < 2 * self._lease_s):
            return False
        self._entered = True
        # a peer that has claimed nothing and reported nothing knows of no epoch: it is on its way in, too
        knowing = {p: s for p, s in self.ledger.spoken().items() if s.firm or s.pending or s.reported}
        newest = self._answers.vouched({peer: s.epoch for peer, s in knowing.items()}, self._late)
        # one that came in a later epoch, and has reported none yet, cannot tell which before it are over
        reported = {peer: s.reported for peer, s in knowing.items() if s.reported or not s.entered}
        closed = self._answers.vouched(reported, self._late)
        oldest = max(closed, newest - self._closing.open_max)
        open_ = (epoch for epoch in range(oldest, newest + 1) if self._enterable(epoch).any())
        self.epoch = max(self.epoch, next(open_, newest))
        self._floor = self.epoch
        self._closing.start(self.epoch)
        return True

    def _abandon(self) -> None:
        """What others have reported already is not used any more."""
        closed = self._reported()
        if closed > self._floor:
            self._lease.drop_below(closed * self._n)
            self._floor = closed

    def _close(self, force: bool = False) -> None:
        """Report the epochs that are over, if anything has changed since the last look."""
        if self._dirty or force:
            self._dirty = False
            self._see_own()
            passed = self._reported() if self._reached else 0
            self._closing.advance(self.epoch + self._ended, self._here(), passed, force)

    def _reported(self) -> int:
        """Epochs below this are over: others that are there have reported them, and are believed.

        A peer that reports one which is not over takes what is left of it from those that believe it.
        """
        here = (section for section in self._here() if self.ledger.is_own_word(section))
        return self._answers.vouched({section.peer: section.reported for section in here})

    # -- Claims

    def _enterable(self, epoch: int) -> Mask:
        return enterable(self._deck, self.ledger, epoch, self._answers.present - {self._me})

    def _plan(self) -> None:
        """Claim the next blocks: of the oldest epoch that has any left, or already of the next one."""
        self._see_own()
        for epoch in range(max(self._floor, self._closing.closed), self.epoch + 2):
            free = self._enterable(epoch)
            if free.any():
                self._claim(epoch, free)
                return

    def _claim(self, epoch: int, free: Mask) -> None:
        first, present = epoch * self._n, len(self._answers.present)
        where = self._deck, self._pace, self._me, free, self._cursor - first
        start, stop = next_claim(*where, present, self._lease_s)
        claim = [(first + start, first + stop)]
        if self._lease.spans_with(claim) < SPANS_MAX:  # else a patchwork that fits into no post: others do it
            self._lease.pending, self._cursor = claim, first + stop
