"""Which peer owns which block of the central state, as one peer sees it.

Rendezvous hashing ("A Name-Based Mapping Scheme for Rendezvous", Thaler, Ravishankar, 1996): the owner of a
block is the live peer whose hash with it is the highest. So a peer that goes moves only its own blocks, and
one that comes takes a share from each. A client's ranks are below all others', so it owns none while another
lives.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragtag.core import seed as random
from ragtag.core.types import PeerId

GONE_AFTER = 2
"""An owner that owed an answer and was silent for so many rounds owns nothing."""


class Owners:
    """The owner of each block.

    peers: those that have not left, this one among them.
    changes: counts events that may have moved blocks.
    """

    def __init__(
        self,
        me: PeerId,
        seed: int,
        n_blocks: int,
        peers: Iterable[PeerId],
        clients: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._me, self._seed, self._n_blocks = me, seed, n_blocks
        self._clients = set(clients)
        self._ranks: dict[PeerId, list[int]] = {}
        self._silent: dict[PeerId, int] = {}
        self.peers = {me, *peers}
        self.changes = 0
        self._settle()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self.peers

    def __getitem__(self, block: int) -> PeerId:
        return self._owners[block]

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that may own blocks: this one, and those not silent for long."""
        return self._live

    def outranks(self, peer: PeerId, other: PeerId, block: int) -> bool:
        """Whether ``peer`` owns a block rather than ``other``, where both live."""
        return self._claim(peer, block) > self._claim(other, block)

    def joined(self, peer: PeerId, owns: bool = True) -> None:
        """A peer is there (again)."""
        self.peers.add(peer)
        (self._clients.discard if owns else self._clients.add)(peer)
        self._silent.pop(peer, None)
        self._settle()

    def left(self, peer: PeerId) -> None:
        """A peer is gone; this one stays."""
        if peer != self._me:
            self.peers.discard(peer)
            self._silent.pop(peer, None)
            self._settle()

    def heard(self, peer: PeerId) -> int:
        """Something came from a peer. Returns for how many rounds it had been silent."""
        was = self._silent.pop(peer, 0)
        if was >= GONE_AFTER:
            self._settle()
        return was

    def silent(self, peer: PeerId) -> int:
        """A peer owed an answer in a round and was silent. Returns for how many rounds by now."""
        if peer not in self.peers or peer == self._me:
            return 0
        self._silent[peer] = self._silent.get(peer, 0) + 1
        if self._silent[peer] == GONE_AFTER:
            self._settle()
        return self._silent[peer]

    def _claim(self, peer: PeerId, block: int) -> tuple[bool, int, PeerId]:
        """Of two claims to a block the greater one holds."""
        return peer not in self._clients, self._rank(peer)[block], peer

    def _rank(self, peer: PeerId) -> list[int]:
        ranks = self._ranks.get(peer)
        if ranks is None:
            blocks = range(self._n_blocks)
            ranks = random.stream_keys(self._seed, "centre owner", blocks, [peer] * len(blocks)).tolist()
            self._ranks[peer] = ranks
        return ranks

    def _settle(self) -> None:
        silent = {peer for peer, rounds in self._silent.items() if rounds >= GONE_AFTER}
        self._live = frozenset(self.peers - silent)
        self.changes += 1
        self._owners = [
            max(self._live, key=lambda peer: self._claim(peer, block)) for block in range(self._n_blocks)
        ]
