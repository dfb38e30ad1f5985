"""A block's new owner looks for the newest copy of it: it asks all peers, and fetches the best copy.

Asking ends when all have told, or at a deadline learned from earlier answers. Fetching ends at a deadline for
whole blocks; then the next best copy is fetched. Chunks that lack in the end are this peer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ragtag.codecs.base import Codec, finite_rows
from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, Bools, Effect, Floats, MessageKey, Noted, PeerId, Run, Send, Timer
from ragtag.protocols.central.owners import Owners
from ragtag.protocols.central.wire import ASK, COPY, FETCH, blob_of, decode_holdings, encode_ask, small
from ragtag.protocols.rounds.base import spans_of
from ragtag.protocols.rounds.layout import Layout
from ragtag.protocols.rounds.repair import request

REPAIRS = 3
"""How often the holes of a copy are asked for."""


class Rebuilt(NamedTuple):
    """What a search has come to.

    values: to go on from, where ``got``.
    above: the next version is above this one.
    source: the peer whose copy it is; -1: no peer has one.
    told: how many peers said what they have, of ``asked``.
    """

    block: int
    values: Floats
    got: Bools
    above: int
    source: PeerId
    told: int
    asked: int


@dataclass(slots=True)
class _Search:
    block: int
    number: int
    asked_s: float
    asked: int
    waiting: set[PeerId]
    told: dict[PeerId, int] = field(default_factory=dict)
    answers: int = 0
    above: int = 0
    fetching: PeerId = -1
    got: Bools | None = None
    values: Floats | None = None
    tries: int = 0


class Rebuilder:
    """The searches of one peer, at most one per block.

    own: gives the version and the values of this peer's own newest copy of a block.
    answer: how long the answer to a small question takes.
    patience_s: how long a whole block takes.
    """

    def __init__(
        self,
        me: PeerId,
        channel: int,
        codec: Codec,
        layout: Layout,
        owners: Owners,
        own: Callable[[int], tuple[int, Floats | None]],
        answer: Deadline,
        patience_s: Callable[[], float],
    ) -> None:
        self._me, self._channel, self._codec, self._layout = me, channel, codec, layout
        self._owners, self._own, self._answer, self._patience_s = owners, own, answer, patience_s
        self._searches: dict[int, _Search] = {}
        self._wanted: dict[int, int] = {}
        self._number = -1
        self._last: tuple[int, float] = (-1, 0.0)  # the newest question that is over, and its time
        self.found: list[Rebuilt] = []
        """Searches that are over. The reader clears them."""

    def seek(self, block: int, above: int = 0) -> None:
        """Look for a block, to go on above version ``above``. Searches of one step ask in one message."""
        if block in self._searches:
            self._searches[block].above = max(self._searches[block].above, above)
        else:
            self._wanted[block] = max(self._wanted.get(block, 0), above)

    def stop(self, block: int) -> None:
        """End a search."""
        self._searches.pop(block, None)
        self._wanted.pop(block, None)

    def ask(self, now_s: float) -> list[Effect]:
        """Ask all others for the blocks that are newly wanted."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        self._number += 1
        others, blocks = sorted(self._owners.live - {self._me}), sorted(wanted)
        for block in blocks:
            search = _Search(block, self._number, now_s, len(others), set(others), above=wanted[block])
            self._searches[block] = search
        if not others:
            return self._choose_all(now_s, blocks)
        until_s = now_s + self._answer.budget_s()
        blob = encode_ask(blocks)
        effects: list[Effect] = [
            Send(small(peer, self._key(self._number, ASK, 0), blob), until_s) for peer in others
        ]
        return [*effects, Arm(Timer(self._channel, self._number, "ask"), until_s)]

    def told(self, now_s: float, run: Run) -> list[Effect]:
        """A peer says what it has."""
        blob = blob_of(run)
        told = None if blob is None else decode_holdings(blob, self._layout.n_blocks)
        if told is None:
            return []
        effects: list[Effect] = []
        taught = False
        for block, version in told.versions.items():
            search = self._searches.get(block)
            if search is None or search.number != run.key.round or run.peer not in search.waiting:
                continue
            if block in told.mine and self._owners.outranks(run.peer, self._me, block):
                self.stop(block)  # its owner lives, and this peer had not heard of it
                continue
            search.waiting.discard(run.peer)
            search.told[run.peer] = version
            search.answers += 1
            if not search.waiting:
                if not taught:
                    self._answer.completed(now_s - search.asked_s)
                taught = True
                effects += self._choose(now_s, search)
        if run.key.round == self._last[0]:
            self._answer.late(now_s - self._last[1])
        return effects

    def expired(self, now_s: float, timer: Timer) -> list[Effect]:
        """One of the searches' timers has run out."""
        if timer.name == "ask":
            late = [
                search
                for search in self._searches.values()
                if search.number == timer.round and search.waiting
            ]
            if late:
                self._answer.missed()
                self._last = late[0].number, late[0].asked_s
            for search in late:
                search.waiting.clear()
            return self._choose_all(now_s, [search.block for search in late])
        _, block, tries = timer.name.split("/")
        found = self._searches.get(int(block))
        if found is None or found.number != timer.round or found.tries != int(tries):
            return []
        return self._next(now_s, found)

    def left(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer is gone: nothing more comes from it."""
        effects: list[Effect] = []
        for search in list(self._searches.values()):
            search.told.pop(peer, None)
            if peer in search.waiting:
                search.waiting.discard(peer)
                if not search.waiting:
                    effects += self._choose(now_s, search)
            elif search.fetching == peer:
                effects += self._next(now_s, search)
        return effects

    def copied(self, now_s: float, run: Run, block: int) -> list[Effect]:
        """Take chunks of a copy that was asked for."""
        search = self._searches.get(block)
        if search is None or search.fetching != run.peer or search.number != run.key.round:
            return []
        assert search.got is not None and search.values is not None
        first, k = run.first, len(run.payload)
        new = ~search.got[first : first + k]
        if run.mask is not None:
            new &= run.mask
        for a, b in spans_of(new) if k and new.any() else []:
            rows = slice(first + a, first + b)
            self._codec.decode(run.payload[a:b], search.values[rows])
            finite = finite_rows(search.values[rows])
            search.got[rows] = True if finite is None else finite
        if search.got.all():
            return self._end(search, search.fetching)
        if not run.ended:
            return []
        if search.tries % (REPAIRS + 1) == REPAIRS:
            return self._next(now_s, search)
        search.tries += 1
        lacking = request(run.peer, self._key(search.number, COPY, block), ~search.got)
        return [Send(lacking, now_s + self._patience_s()), self._fetch_timer(now_s, search)]

    # -- Steps

    def _choose_all(self, now_s: float, blocks: list[int]) -> list[Effect]:
        return [effect for block in blocks for effect in self._choose(now_s, self._searches[block])]

    def _choose(self, now_s: float, search: _Search) -> list[Effect]:
        """All have told, or time is up: fetch the newest copy, or take this peer's where none is newer."""
        search.above = max([search.above, self._own(search.block)[0], *search.told.values()])
        return self._next(now_s, search)

    def _next(self, now_s: float, search: _Search) -> list[Effect]:
        """Fetch the best copy that has not been tried."""
        own, values = self._own(search.block)
        if search.fetching >= 0:
            search.told.pop(search.fetching, None)
        best = max(search.told, key=lambda peer: (search.told[peer], -peer), default=-1)
        size = self._layout.sizes[search.block]
        if best < 0 or search.told[best] <= own:
            if values is not None:
                search.values, search.got = values, np.ones(size, np.bool_)
            return self._end(search, self._me if values is not None else -1)
        search.fetching, search.got = best, np.zeros(size, np.bool_)
        search.values = np.zeros((size, self._codec.elements), np.float32)
        search.tries = -(-(search.tries + 1) // (REPAIRS + 1)) * (REPAIRS + 1)  # unique to this fetch
        ask = small(best, self._key(search.number, FETCH, search.block), b"")
        return [Send(ask, now_s + self._patience_s()), self._fetch_timer(now_s, search)]

    def _end(self, search: _Search, source: PeerId) -> list[Effect]:
        del self._searches[search.block]
        size = self._layout.sizes[search.block]
        if search.values is None or search.got is None:
            search.values = np.zeros((size, self._codec.elements), np.float32)
            search.got = np.zeros(size, np.bool_)
        self.found.append(
            Rebuilt(
                search.block, search.values, search.got, search.above, source, search.answers, search.asked
            )
        )
        return []

    def _fetch_timer(self, now_s: float, search: _Search) -> Arm:
        name = f"fetch/{search.block}/{search.tries}"
        return Arm(Timer(self._channel, search.number, name), now_s + self._patience_s())

    def _key(self, number: int, stage: int, block: int) -> MessageKey:
        return MessageKey(self._channel, number, stage, block)


def rebuilt_notes(me: PeerId, rebuilt: Sequence[Rebuilt]) -> list[Effect]:
    """The trace's notes on blocks that were founded or rebuilt."""
    effects: list[Effect] = []
    others = [one for one in rebuilt if one.source >= 0]
    if len(others) < len(rebuilt):
        detail = f"{len(rebuilt) - len(others)} blocks that nobody had"
        effects.append(Noted("central state founded", me, detail))
    if others:
        sources = ", ".join(map(str, sorted({one.source for one in others})))
        told, asked = min(one.told for one in others), max(one.asked for one in others)
        detail = (
            f"{len(others)} blocks from the newest copies (of peers {sources}); {told} of {asked} told what "
            f"they have; what an owner had taken in and nobody had taken yet is lost"
        )
        effects.append(Noted("central state rebuilt", me, detail))
    return effects
