"""One turn of a peer at a central state: what it sent, what has come, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.base import Codec, finite_rows
from ragtag.core.types import Average, Bools, Floats, Outcome, PeerId, PeerSet, Run, Timer
from ragtag.protocols.central.wire import state_version
from ragtag.protocols.rounds.base import spans_of
from ragtag.protocols.rounds.repair import Alarm, Pause


@dataclass(slots=True)
class Turn:
    """A turn under way.

    mean: float32 ``[n_chunks, elements]``, the state's values where ``got``.
    versions, heard: the version and the contributors of each chunk.
    left: chunks that have not come yet.
    open: the owner of each block that has not answered.
    sent: the updates, for repairs.
    pulled: the blocks that are only taken.
    owners: peers that were asked.
    came: peers that were heard.
    stale: how many versions old each answered update was.
    asked: the blocks of whose answers chunks were asked for.
    alarm: it runs out when the first of these is asked for again.
    """

    number: int
    ask: Average
    started_s: float
    until_s: float
    mean: Floats
    versions: NDArray[np.int64]
    heard: PeerSet
    got: Bools
    left: Bools
    alarm: Alarm
    open: dict[int, PeerId] = field(default_factory=dict)
    sent: dict[int, Run] = field(default_factory=dict)
    pulled: set[int] = field(default_factory=set)
    owners: set[PeerId] = field(default_factory=set)
    came: set[PeerId] = field(default_factory=set)
    stale: list[int] = field(default_factory=list)
    asked: dict[int, Pause] = field(default_factory=dict)

    def store(self, run: Run, at: int, known: NDArray[np.int64], codec: Codec) -> None:
        """Take an answer's chunks. The first is chunk ``at`` of the vector.

        known: the versions that this peer has. A chunk of an older version is not taken.
        """
        k, version = len(run.payload), state_version(run.key)
        new = self.left[at : at + k].copy()
        if run.mask is not None:
            new &= run.mask
        for a, b in spans_of(new) if new.any() else []:
            rows = slice(at + a, at + b)
            self.left[rows] = False
            codec.decode(run.payload[a:b], self.mean[rows])
            good, finite = known[rows] <= version, finite_rows(self.mean[rows])
            if finite is not None:
                good &= finite
            self.got[rows], self.versions[rows], self.heard[rows] = good, version, run.heard[a:b]

    def land(self, span: slice, values: Floats, version: int, heard: int) -> None:
        """Take a block that this peer owns itself."""
        self.mean[span], self.versions[span], self.heard[span] = values, version, heard
        self.got[span], self.left[span] = True, False

    def close(self, block: int, stale: int) -> None:
        """A block has been answered."""
        self.open.pop(block, None)
        self.sent.pop(block, None)
        self.asked.pop(block, None)
        if block not in self.pulled:
            self.stale.append(stale)

    def outcome(self, me: PeerId, channel: int, now_s: float, expired: bool) -> Outcome:
        """The turn's outcome. Where nothing came, own values stay."""
        kept, took_s = ~self.got, now_s - self.started_s
        self.mean[kept], self.heard[kept] = self.ask.values[kept], 1 << me
        sizes = np.unpackbits(self.heard.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        return Outcome(
            channel=channel,
            round=self.number,
            mean=self.mean,
            weight=sizes.astype(np.float32),
            heard=self.heard,
            averaged=self.got,
            missed=tuple(sorted(set(self.open.values()) - {me})),
            waited_for=tuple(sorted(self.owners)),
            started_s=self.started_s,
            scatter_s=took_s,
            gather_s=0.0,
            total_s=took_s,
            expired=expired,
            stale=tuple(self.stale),
        )


def new_turn(number: int, ask: Average, now_s: float, until_s: float) -> Turn:
    """A turn in which nothing has come."""
    k, shape = len(ask.values), ask.values.shape
    return Turn(
        number=number,
        ask=ask,
        started_s=now_s,
        until_s=until_s,
        mean=np.empty(shape, np.float32),
        versions=np.zeros(k, np.int64),
        heard=np.zeros(k, np.uint64),
        got=np.zeros(k, np.bool_),
        left=np.ones(k, np.bool_),
        alarm=Alarm(Timer(ask.channel, number, "repair")),
    )
