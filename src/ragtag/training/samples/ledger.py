"""The ledger of an epoch's samples: which process has claimed or used which block, and what is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.training.samples.claims import Section, Span, overlap

Process = tuple[int, int]
"""A peer, and which of its processes."""
TOLD_MAX = 128
"""So many processes a ledger takes up on one peer's word: more than there is room for in a post."""
Counts = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What an epoch came to, as one peer knows it. All but ``epoch`` count samples.

    samples: how many the epoch has.
    used_by_me: how many this process used.
    missed: how many nobody is known to have used: claimed by a peer that died before it reported them.
    twice: how many several peers used, not knowing of each other.
    by_peer: how many each peer used, as far as is known.
    """

    epoch: int
    samples: int
    used_by_me: int
    missed: int
    twice: int
    by_peer: Mapping[int, int] = field(default_factory=dict)


class Ledger:
    """All processes' sections, the newest of each, for epochs of ``n_blocks`` blocks each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self.n_blocks = len(sizes)
        self.sections: dict[Process, Section] = {}
        self.restored: dict[int, Mask] = {}
        """What was used of an epoch before this run, or before this peer came; bool ``[n_blocks]``."""
        self._told_by: dict[Process, int] = {}
        """Which peer told of each process first, or the process's own, once it has spoken for itself."""

    def learn(self, sections: Sequence[Section]) -> bool:
        """Take what is newer than what is known of a post: its sender's own section, and what it tells of
        others. Returns whether anything was.

        A peer can tell what it likes. So none tells of another's post that is as late as its own, each has
        room of its own for what it alone tells of, and of a peer that speaks for itself no later process is
        believed.
        """
        own, *others = sections
        peer = own.peer
        later = [who for who, by in self._told_by.items() if who[0] == peer != by and who[1] > own.process]
        for who in later:
            self._drop(who)
        self._told_by[peer, own.process] = peer
        changed = self._take(own)
        while self._told(peer) > TOLD_MAX:
            self._drop(min(who for who, by in self._told_by.items() if who[0] == by == peer))
        for section in others:
            who = section.peer, section.process
            if section.number >= own.number or (who not in self.sections and self._told(peer) >= TOLD_MAX):
                continue
            self._told_by.setdefault(who, peer)
            changed |= self._take(section)
        return changed

    def _take(self, section: Section) -> bool:
        known = self.sections.get((section.peer, section.process))
        if known is not None and known.number >= section.number:
            return False
        self.sections[section.peer, section.process] = section
        return True

    def _told(self, by: int) -> int:
        """How many processes a peer was the first to tell of."""
        return sum(teller == by for teller in self._told_by.values())

    def _drop(self, who: Process) -> None:
        del self.sections[who]
        self._told_by.pop(who, None)

    def newest_process(self, peer: int) -> int:
        """A peer's newest process that is known; -1: none is."""
        return max((process for who, process in self.sections if who == peer), default=-1)

    def forget(self, epoch: int) -> None:
        """Drop the sections of processes that are no more and have nothing in ``epoch`` or later."""
        first = epoch * self.n_blocks
        for (peer, process), section in list(self.sections.items()):
            if process < self.newest_process(peer) and all(
                stop <= first for _, stop in (*section.firm, *section.pending)
            ):
                self._drop((peer, process))
        for old in [known for known in self.restored if known < epoch]:
            del self.restored[old]

    def spoken(self) -> dict[int, Section]:
        """What each peer has said of itself: of its newest process that is known, where that has spoken."""
        newest = {peer: section for (peer, _), section in sorted(self.sections.items())}
        return {peer: section for peer, section in newest.items() if self.is_own_word(section)}

    def is_own_word(self, section: Section) -> bool:
        """Whether its peer has said it itself."""
        return self._told_by.get((section.peer, section.process)) == section.peer

    def claimed(self, epoch: int) -> Mask:
        """bool ``[n_blocks]``: what anybody has claimed in an epoch."""
        mask = self._restored_of(epoch).copy()
        for section in self.sections.values():
            for start, stop in self._within(epoch, (*section.firm, *section.pending)):
                mask[start:stop] = True
        return mask

    def claimed_by(self, epoch: int, processes: Collection[Process]) -> Mask:
        """bool ``[n_blocks]``: what these have claimed in an epoch and not used."""
        mask = np.zeros(self.n_blocks, np.bool_)
        for who in processes:
            if (section := self.sections.get(who)) is not None:
                for start, stop in self._within(epoch, (*section.firm, *section.pending)):
                    mask[start:stop] = True
        return mask

    def used(self, epoch: int) -> Counts:
        """uint8 ``[n_blocks]``: how often each block was used."""
        counts = np.zeros(self.n_blocks, np.uint8)
        for section in self.sections.values():
            for start, stop in self._within(epoch, section.used_spans()):
                counts[start:stop] += 1
        return np.maximum(counts, self._restored_of(epoch))

    def report(self, epoch: int, me: Process) -> EpochReport:
        """What is known of an epoch now."""
        used = self.used(epoch)
        by_peer: dict[int, int] = {}
        mine = 0
        for (peer, process), section in sorted(self.sections.items()):
            spans = self._within(epoch, section.used_spans())
            samples = sum(int(self._sizes[start:stop].sum()) for start, stop in spans)
            if samples:
                by_peer[peer] = by_peer.get(peer, 0) + samples
            if (peer, process) == me:
                mine = samples
        return EpochReport(
            epoch=epoch,
            samples=int(self._sizes.sum()),
            used_by_me=mine,
            missed=int(self._sizes[used == 0].sum()),
            twice=int(self._sizes[used > 1].sum()),
            by_peer=by_peer,
        )

    def lost(self, spans: Sequence[Span], number: int, me: Process) -> list[Span]:
        """What of ``spans``, claimed by ``me`` in post ``number``, is others': firm, or claimed sooner.

        Lower numbers win, then lower peers. The later claim in the sense of Lamport's clock has the
        higher number; of two that did not know each other, both see the other's claim before either is used.
        """
        taken: list[Span] = []
        for (peer, process), section in self.sections.items():
            if (peer, process) == me:
                continue
            taken += overlap(spans, section.firm)
            if (section.pending_number, peer, process) < (number, *me):
                taken += overlap(spans, section.pending)
        return taken

    def _restored_of(self, epoch: int) -> Mask:
        found = self.restored.get(epoch)
        return np.zeros(self.n_blocks, np.bool_) if found is None else found

    def _within(self, epoch: int, spans: Iterable[Span]) -> list[Span]:
        """The parts in one epoch, numbered from its start."""
        first, end = epoch * self.n_blocks, (epoch + 1) * self.n_blocks
        return [
            (max(start, first) - first, min(stop, end) - first)
            for start, stop in spans
            if start < end and stop > first
        ]


KEPT = 2
"""Epochs that are kept in posts for peers that are away."""


class Closing:
    """The epochs of process ``who`` that are reported, and that wait for it.

    started_with: the epoch it entered the crew with.
    closed: epochs below this are reported.
    ready: of epochs below this it knows no block that anybody could still use.
    """

    def __init__(self, who: Process, ledger: Ledger, open_max: int) -> None:
        self.open_max = open_max
        self.started_with = self.closed = self.ready = 0
        self.reports: list[EpochReport] = []
        self._who, self._ledger = who, ledger
        self._begun: set[int] = set()

    def start(self, epoch: int) -> None:
        """This process has entered a crew that is in this epoch: it reports from there on."""
        self.started_with = self.closed = self.ready = epoch

    def begin(self, epoch: int) -> None:
        """This process draws in this epoch, if there is anything to draw."""
        self._begun.add(epoch)

    def advance(self, over: int, here: Collection[Section], passed: int, force: bool) -> None:
        """Report what is over of the epochs below ``over``, in order.

        An epoch is over once all that are there know of nothing left in it; or more than ``open_max`` wait.
        here: the others' sections.
        passed: epochs below this they have reported, knowing all that was posted: they may be reported here.
        force: report all, as they are known.
        """
        self.ready = max(self.ready, self.closed)
        while self.ready < over and self._resolved(self.ready, here):
            self.ready += 1
        agreed = min([self.ready, *(max(s.ready, s.closed) for s in here)])
        until = min(over, over if force else max(agreed, passed, over - self.open_max))
        while self.closed < until:
            self._report(self.closed, passed)
            self.closed += 1
            self.ready = max(self.ready, self.closed)
            self._ledger.forget(self.closed)

    def _report(self, epoch: int, passed: int) -> None:
        """What was told long before ``passed`` is forgotten; of what nobody began, nothing is missed."""
        begun = epoch in self._begun or self._ledger.claimed(epoch).any()
        self._begun.discard(epoch)
        if epoch >= passed - KEPT and begun:
            self.reports.append(self._ledger.report(epoch, self._who))

    def _resolved(self, epoch: int, here: Collection[Section]) -> bool:
        """Whether each block is used, or claimed by no process that could still use it."""
        living = [self._who, *((s.peer, s.process) for s in here)]
        may_be = self._ledger.claimed_by(epoch, living) | ~self._ledger.claimed(epoch)
        return not (may_be & (self._ledger.used(epoch) == 0)).any()
