"""Draws blocks from the crew's pool: the pool's machine on a real clock and a real notice board."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from ragtag.core.channels import topic_of
from ragtag.training.samples.blocks import Deck
from ragtag.training.samples.ledger import EpochReport, Mask
from ragtag.training.samples.pool import Over, Pool, Tell, Use
from ragtag.training.transport import Peers

TOPICS, KEPT = 16, 8
"""Topics of the notice board for splits: the first ones keep theirs, later ones share the others."""
_LOOK_FIRST_S, _LOOK_MAX_S = 2e-4, 5e-3
"""How often a waiting peer looks at the board, which others' answers reach without it."""

_log = logging.getLogger("ragtag")


class Drawer:
    """Peer ``me``'s blocks of ``deck``; on_report: is told what each epoch came to; late: see ``Pool``."""

    def __init__(
        self,
        me: int,
        peers: Peers,
        deck: Deck,
        ordinal: int,
        on_report: Callable[[EpochReport], None],
        late: bool = False,
    ) -> None:
        self.epoch = 0
        self._me, self._peers, self._deck, self._on_report = me, peers, deck, on_report
        shared = ordinal if ordinal < TOPICS else KEPT + ordinal % (TOPICS - KEPT)
        self._topic = topic_of(f"split {shared}")
        # tenths of a second since 1970, as processes are told apart in datagrams
        self._pool = Pool(me, deck, time.time_ns() // 10**8, late=late)
        self._warned: set[int] = set()
        self._stopped = False
        self._mine: tuple[int, Mask] | None = None  # the epoch that is drawn alone, and what of it

    @property
    def _alone_for_good(self) -> bool:
        """Whether nobody else draws, now or later (a peer that others may join tells from the start)."""
        return self._peers.n == 1 and not self._peers.may_grow

    def draws_at_once(self, blocks: int) -> None:
        """From now on so many blocks (1 or more) make a batch."""
        self._pool.draws_at_once(blocks)

    def used(self, epoch: int) -> Mask:
        """bool ``[blocks]``: what of an epoch is known to be used."""
        if not self._alone_for_good:
            return self._pool.used(epoch)
        used = self._pool.ledger.used(epoch) > 0
        return used | self._mine[1] if self._mine is not None and self._mine[0] == epoch else used

    def restore(self, epoch: int, used: Mask) -> None:
        """So much of an epoch was used before this run, or before this peer came."""
        self._pool.ledger.restored = {epoch: used}

    def stop(self) -> None:
        """Draw nothing more: the epoch under way ends here."""
        self._stopped = True

    def draw(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield (epoch, block) of each block that this peer is to use in an epoch, or in one before it."""
        if not self._deck.sizes:
            return
        if self._alone_for_good:
            yield from self._alone(epoch)
            return
        self._pool.begin(epoch)
        look_s = _LOOK_FIRST_S
        while not self._stopped:
            action = self._pool.next(self._peers.now_s(), self._peers.notices(self._topic), self._peers.live)
            self._pass_on()
            if isinstance(action, Tell):
                self._tell(action)
            elif isinstance(action, Use):
                look_s, self.epoch = _LOOK_FIRST_S, self._pool.epoch
                yield action.epoch, action.block
            elif isinstance(action, Over):
                self.epoch = self._pool.epoch
                return
            else:
                look_s = self._pause(look_s)

    def give_back(self) -> bool:
        """Give back what is claimed and not used. Whether there is anybody to tell of it."""
        if self._alone_for_good or not self._deck.sizes or not self._pool.entered:
            return False
        self._tell(self._pool.give_back())
        return True

    def close(self, deadline_s: float) -> None:
        """Give back what is claimed and not used; report all by ``deadline_s``."""
        if not self.give_back():
            return
        until_s, look_s = self._peers.now_s() + deadline_s, _LOOK_FIRST_S
        while True:
            now_s = self._peers.now_s()
            notices, live = self._peers.notices(self._topic), self._peers.live
            action = self._pool.settle(now_s, notices, live, force=now_s >= until_s)
            self._pass_on()
            if isinstance(action, Tell):
                self._tell(action)
            elif isinstance(action, Over) or now_s >= until_s:
                return
            else:
                look_s = self._pause(look_s)

    def _pause(self, look_s: float) -> float:
        self._peers.pause(look_s)
        return min(_LOOK_MAX_S, 2 * look_s)

    def _alone(self, epoch: int) -> Iterator[tuple[int, int]]:
        before = self._pool.ledger.used(epoch) > 0
        drawn = np.zeros(len(self._deck.sizes), np.bool_)
        self.epoch, self._mine = epoch, (epoch, drawn)
        for block in np.flatnonzero(~before).tolist():
            drawn[block] = True
            yield epoch, block
        samples, mine = sum(self._deck.sizes), int(np.asarray(self._deck.sizes)[drawn].sum())
        self._on_report(EpochReport(epoch, samples, mine, 0, 0, {self._me: mine}))

    def _tell(self, action: Tell) -> None:
        asked_s = self._peers.now_s()
        self._pool.posted(asked_s, self._peers.post(self._topic, action.blob))

    def _pass_on(self) -> None:
        for report in self._pool.reports:
            self._on_report(report)
        self._pool.reports.clear()
        for peer in self._pool.strangers - self._warned:
            self._warned.add(peer)
            _log.warning(
                "peer %d splits other data than peer %d does, or makes its splits in another order, so both "
                "draw everything: give all peers the same data, batch size and seed",
                *(peer, self._me),
            )
