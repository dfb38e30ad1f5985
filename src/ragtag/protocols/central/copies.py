"""What one peer has of a central state (its copy, and the blocks it owns or owned), and how it sends them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.base import Codec
from ragtag.core.types import Bools, Floats, MessageKey, PeerId, Run
from ragtag.protocols.central import wire
from ragtag.protocols.central.block import Answer, Block
from ragtag.protocols.rounds.layout import Layout


class Copies:
    """One peer's copy of the state, and its blocks.

    versions: int64 ``[n_chunks]``, the version of each chunk of the copy; 0: none.
    blocks: the blocks at this peer, whether it owns them or not.
    values: what the peer itself trains from.
    """

    def __init__(self, me: PeerId, channel: int, codec: Codec, layout: Layout) -> None:
        self._channel, self._codec, self._layout = channel, codec, layout
        self.versions: NDArray[np.int64] = np.zeros(layout.n_chunks, np.int64)
        self.blocks = [Block(me) for _ in range(layout.n_blocks)]
        self.values: Floats | None = None
        self._copy: Floats | None = None

    def took(self, mean: Floats, got: Bools, versions: NDArray[np.int64]) -> None:
        """A turn has ended with ``mean``, which does not change any more. got: chunks that the state gave."""
        copy = mean
        if self._copy is not None and not got.all():
            copy = mean.copy()
            copy[~got] = self._copy[~got]
        self.versions[got] = versions[got]
        self._copy, self.values = copy, mean

    def newest(self, block: int) -> tuple[int, Floats | None]:
        """The newest values of a block that this peer has, after their version; (0, None): it has none."""
        span, held = self._layout.spans[block], self.blocks[block]
        version = int(self.versions[span].min())
        if held.values is not None and held.version >= version:
            return held.version, held.values
        return (version, self._copy[span]) if version and self._copy is not None else (0, None)

    def state(self, block: int, answer: Answer, mask: Bools | None = None) -> Run:
        """An owner's answer: the block as it is."""
        held, size = self.blocks[block], self._layout.sizes[block]
        return Run(
            peer=answer.peer,
            key=wire.state_key(self._channel, held.version, block),
            first=0,
            total=size,
            payload=held.payload(self._codec),
            weight=np.full(size, wire.echo(answer.number, answer.stale, answer.clock), np.float32),
            heard=np.full(size, held.contributors(answer), np.uint64),
            mask=mask,
            ended=True,
        )

    def instead(self, block: int, peer: PeerId, number: int) -> Run | None:
        """The answer of a peer that is not the owner: its copy, without the asker's update."""
        version, values = self.newest(block)
        if values is None:
            return None
        size = self._layout.sizes[block]
        return Run(
            peer=peer,
            key=wire.state_key(self._channel, version, block),
            first=0,
            total=size,
            payload=self._codec.encode(values),
            weight=np.full(size, wire.echo(number, 0), np.float32),
            heard=np.zeros(size, np.uint64),
            ended=True,
        )

    def copy(self, block: int, peer: PeerId, number: int, mask: Bools | None = None) -> Run | None:
        """The copy that a peer which rebuilds a block has asked for; ``None``: this peer has none."""
        version, values = self.newest(block)
        if values is None:
            return None
        size = self._layout.sizes[block]
        return Run(
            peer=peer,
            key=MessageKey(self._channel, number, wire.COPY, block),
            first=0,
            total=size,
            payload=self._codec.encode(values),
            weight=np.zeros(size, np.float32),
            heard=np.full(size, version, np.uint64),
            mask=mask,
            ended=True,
        )
