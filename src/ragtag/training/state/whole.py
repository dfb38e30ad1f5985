"""Whether peers hold the same model, and how they come to do so: where they begin, and where they end.

Averages leave replicas as alike as what arrived; a peer that paused has an older model, and one that was
built from another seed another one. Here peers compare digests of all that is averaged,
parameters and buffers, and where these differ all take one peer's values, bit for bit: a mean to which that
peer alone gives weight, over everybody with repair, in float32 whatever the codec is.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

import msgspec
import numpy as np
import torch

from ragtag.codecs.dense import fp32
from ragtag.core.types import OpenedTogether, Outcome, PeerId
from ragtag.protocols.channel.averager import Averager, guarded
from ragtag.protocols.node import CATCH_UP
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.robust import RobustMean
from ragtag.training.exchange.dense import Replica
from ragtag.training.tensors.layout import Part
from ragtag.training.transport import Transport

DIGEST_BYTES = 16


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """BLAKE2b-128 over dtype, shape and values of tensors in their order, in hex."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        plain = tensor.detach().to("cpu").contiguous()
        found.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def joined_digest(digests: Sequence[str]) -> str:
    """One digest for several models; empty: of none."""
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.blake2b("".join(digests).encode(), digest_size=DIGEST_BYTES).hexdigest()


class Whole:
    """All that one optimizer or hook averages, as values that peers may compare and take from each other.

    name: of its channel.
    parts: parameters and floating-point buffers.
    guard: how a mean of several is guarded against peers that lie (``None``: it is not).
    """

    def __init__(
        self, name: str, parts: Sequence[Part], transport: Transport, guard: RobustMean | None = None
    ) -> None:
        self._name, self._parts, self._transport, self._guard = name, tuple(parts), transport, guard
        self._replica: Replica | None = None
        self._guarded: Replica | None = None

    def at_first(self) -> Whole:
        """The same values, for those to make alike that begin a training.

        Its means go over a channel of their own. Peers that come later never open that one. At the end all
        that are there open theirs together, and none has it open before the others wait for each other.
        """
        return Whole(f"{self._name}/begin", self._parts, self._transport)

    def digest(self) -> str:
        """Of the values as they are now."""
        return digest_of(part.find() for part in self._parts)

    def average(self, weight: float, together: OpenedTogether) -> Outcome:
        """One mean over everybody that takes part now, by weights; what does not come stays as it is.

        All peers of ``together`` call this, or none. The channel is opened at the first call; these wait for
        each other then, and for no others.

        Raises:
            ValueError: the crew has more seats than average all at once.
            NotFinite: a value here is NaN or infinite.
        """
        if self._replica is None:
            self._replica = self._opened(f"{self._name}/state", direct, together)
        return self._replica.average(weight)

    def mix(self, weight: float, together: OpenedTogether) -> Outcome:
        """``average``, where several peers give weight and the guard decides what comes of it."""
        if self._guard is None:
            return self.average(weight, together)
        if self._guarded is None:
            self._guarded = self._opened(f"{self._name}/mix", guarded(direct, self._guard), together)
        return self._guarded.average(weight)

    def _opened(self, name: str, averager: Averager, together: OpenedTogether) -> Replica:
        return Replica(
            self._parts, self._transport, averager, fp32, name=name, share=False, together=together
        )

    @torch.no_grad()
    def copy(self) -> list[torch.Tensor]:
        """Copies of the values, to measure by ``moved`` how far they have gone."""
        return [part.find().detach().clone() for part in self._parts]

    @torch.no_grad()
    def moved(self, before: Sequence[torch.Tensor]) -> float:
        """The distance to values of before, as a share of the norm of the values now."""
        apart = norm = 0.0
        for part, old in zip(self._parts, before, strict=True):
            now = part.find().detach().double()
            apart += float((now - old).square().sum())
            norm += float(now.square().sum())
        return math.sqrt(apart / norm) if norm else math.sqrt(apart)


class Stand(msgspec.Struct, frozen=True):
    """Where a peer stands with one model.

    digest: of its values.
    current: the newest round up to which it has kept up with the others (``kept_up``; -1: none).
    since: its local steps since its last average.
    round: the last round.
    """

    digest: str
    current: int = -1
    since: int = 0
    round: int = -1

    @property
    def trained(self) -> bool:
        """Whether its values are any others than those that all began with."""
        return self.round >= 0 or self.since > 0


def met_others(outcome: Outcome, me: PeerId) -> bool:
    """Whether values of others are in what a round came to."""
    if outcome.stale is not None:  # of a central state, which all peers share
        return bool(outcome.averaged.any())
    place = outcome.members.index(me) if me in outcome.members else me
    heard = int(np.bitwise_or.reduce(outcome.heard, initial=np.uint64(0)))
    return bool(heard & ~(1 << place))


def kept_up(before: int, outcome: Outcome, me: PeerId) -> int:
    """The newest round up to which a peer has kept up with the others, by its last outcome.

    before: until then. A peer that went on alone, having skipped rounds, has what it had when it fell behind,
    however many rounds it adds; one that missed none is all of the crew that there was.
    """
    went_on = outcome.round <= before + 1 + CATCH_UP
    return outcome.round if went_on or met_others(outcome, me) else before


Stands = Mapping[PeerId, Stand]


def _voices(stands: Stands) -> Stands:
    """The peers that have trained, as where there are fewer batches than peers; all, where none has.

    Others have what all began with. As many as these may be, training is not undone by them.
    """
    return {peer: stand for peer, stand in stands.items() if stand.trained} or stands


def reached(stands: Stands) -> int:
    """The round that the crew has come to: the middle one of the peers that have kept up to their end.

    One peer's rounds alone, which it adds while all others have ended, do not make theirs old. Of two peers
    the one that went on counts. Peers that have not trained do not.
    """
    stands = _voices(stands)
    kept = [stand.current for stand in stands.values() if stand.current >= stand.round]
    return median_high(kept or [stand.current for stand in stands.values()])


def last_round(stands: Stands) -> int:
    """The last round that the crew has made, of which schedulers and checkpoints of all are to be.

    That is the newest, whoever made it alone, at its end or as others paused; none goes back. One that is
    beyond what peers of one crew may be apart is nobody's but its own: else one that lies would move all.
    """
    rounds = [stand.round for stand in stands.values()]
    return max(round_ for round_ in rounds if round_ <= median_high(rounds) + CATCH_UP)


def is_current(stand: Stand, stands: Stands) -> bool:
    """Whether a peer's values count: it has trained, if anybody has, and kept up with the others.

    The bound is that of rounds: a peer that skipped more takes, and does not give.
    """
    return stand in _voices(stands).values() and stand.current >= reached(stands) - CATCH_UP


def source_of(stands: Stands) -> PeerId:
    """The peer whose values all take. Peers that know the same come to the same.

    Of those that have come as far as the crew it is one whose values most have, then one that added least
    alone, then the lowest.
    """
    stands = _voices(stands)
    there = {peer: stand for peer, stand in stands.items() if stand.current >= reached(stands)}
    counts = Counter(stand.digest for stand in stands.values() if is_current(stand, stands))
    return min(there, key=lambda peer: (-counts[there[peer].digest], there[peer].current, peer))


def alike(stands: Stands) -> bool:
    """Whether all hold the same values."""
    return len({stand.digest for stand in stands.values()}) == 1


@dataclass(frozen=True, slots=True)
class Finished:
    """How a training has ended, as one peer knows it.

    digest: of the final model (of several: of their digests); hex, empty: no model was averaged.
    alike: whether all of ``peers`` hold the same.
    peers: that finished together, this one among them.
    behind: how many rounds each of these had missed in which others averaged, where it is more than none.
    moved: by which share of its norm this peer's model changed when it took the agreed one.
    rounds: the last round that the crew has made, of each model by name.
    trained: whether any of these peers had trained, so that the model is more than what all began with.
    """

    digest: str = ""
    alike: bool = True
    peers: tuple[PeerId, ...] = ()
    behind: Mapping[PeerId, int] = field(default_factory=dict)
    moved: float = 0.0
    rounds: Mapping[str, int] = field(default_factory=dict)
    trained: bool = False

    @property
    def took_nothing(self) -> bool:
        """Whether this peer has the model that it began with, for want of steps and of others."""
        return bool(self.digest) and len(self.peers) == 1 and not self.trained

    def __str__(self) -> str:
        others = len(self.peers) - 1
        if not self.digest:
            return "no model was averaged"
        if others < 1:
            return f"this peer ends alone, with model {self.digest[:12]}"
        what = f"the same model {self.digest[:12]}" if self.alike else "different models"
        text = f"{1 + others} peers end with {what}"
        late = [f"peer {peer} was {rounds_of(rounds)} behind" for peer, rounds in sorted(self.behind.items())]
        return "; ".join([text, *late])


def rounds_of(n: int) -> str:
    """So many rounds, in words."""
    return f"{n} round{'' if n == 1 else 's'}"
