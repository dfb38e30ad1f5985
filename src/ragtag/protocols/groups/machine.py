"""What machines of large crews share: the round's number, runs that came too early, and outcomes.

In a round of such a machine a peer exchanges with a few others. ``Outcome.members`` says which peers the bits
of ``heard`` mean, so the crew may have far more than 64 peers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Left,
    MessageKey,
    Offer,
    Outcome,
    PeerId,
    Run,
    Send,
    Timer,
)
from ragtag.protocols.channel.far_rounds import FarRounds
from ragtag.protocols.groups.keys import View
from ragtag.protocols.rounds.asking import QUESTIONS, here
from ragtag.protocols.rounds.base import spans_of, whole_message

EARLY_MAX = 256
"""How many runs are kept for a round or a group that this peer does not know yet. Of more, the oldest one of
the peer that has sent most of them is dropped."""


@dataclass(frozen=True, slots=True)
class GroupChannel:
    """What such a machine averages, and how long things may take at first.

    probe_s: the measured time of one exchange of the whole vector.
    rtt_s: a measured round trip, with its margin.
    reuse: the memory of an outcome's mean is used again once the round after the next begins.
    """

    number: int
    codec: Codec
    n_chunks: int
    probe_s: float
    rtt_s: float
    reuse: bool = False

    def key(self, round_: int, stage: int, block: int = 0) -> MessageKey:
        """A message's key."""
        return MessageKey(self.number, round_, stage, block)

    def timer(self, round_: int, name: str) -> Timer:
        """A timer's name."""
        return Timer(self.number, round_, name)


class PartialMachine(ABC):
    """One peer of a crew of any size. ``Average`` begins its next round, ``Done`` ends it."""

    def __init__(self, me: PeerId, view: View, seed: int, channel: GroupChannel) -> None:
        if me not in view:
            raise ValueError(f"peer {me} is not in its own view of {len(view)} peers")
        if channel.n_chunks < 1:
            raise ValueError("a channel of no values: there is nothing to average")
        self.me, self.view, self.seed, self.channel = me, view, seed, channel
        self.done = self.highest = -1
        self._far = FarRounds()
        self.active: int | None = None
        self.started_s = 0.0
        self._ask: Average | None = None
        self._newcomer = False
        self._early: list[Run] = []

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Arrived):
            effects: list[Effect] = []
            for run in event.runs:
                effects += self._arrived(now_s, run)
            return effects
        if isinstance(event, Expired):
            return self._expired(now_s, event.timer)
        if isinstance(event, Average):
            ask = replace(event, weight=0.0) if self._newcomer else event
            self._newcomer = False
            return self._average(now_s, ask)
        if isinstance(event, Offer):
            raise ValueError(f"channel {event.channel} averages in groups; rows are gathered by all at once")
        if isinstance(event, Joined):
            self.view = self.view.joined(event.peer)
        elif isinstance(event, Left) and event.peer != self.me:
            self.view = self.view.left(event.peer)
            return self._left(now_s, event.peer)
        return []

    def probed(self, probe_s: float, now_s: float = 0.0) -> None:
        """One exchange of the whole vector takes this long: deadlines begin from that."""
        self.channel = replace(self.channel, probe_s=probe_s)
        self._restart()

    def resume(self, round_: int) -> None:
        """The next round comes after ``round_``, and this peer gives nothing in it."""
        self._newcomer = True
        self.done = max(self.done, round_)

    def newer(self) -> bool:
        """Yes: whether others are past this peer's last round shows when it looks for them."""
        return True

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """Whether the sender takes part: a peer that has left, or is on its way in, does not."""
        return peer in self.view

    def skip(self) -> None:
        """This peer misses a round: it gives up the one under way, or does not begin the next.

        There is no ``Done`` for it. Keys go on as if it had failed.
        """
        number = self.active if self.active is not None else self._next()
        self.active, self._ask, self.done = None, None, number
        self._skipped(number)

    # -- What a machine adds

    def _restart(self) -> None:  # noqa: B027  (most have nothing to do)
        """Deadlines begin anew from the channel's probe."""

    @abstractmethod
    def _begin(self, now_s: float, ask: Average) -> list[Effect]: ...

    @abstractmethod
    def _take(self, now_s: float, run: Run) -> list[Effect]: ...

    @abstractmethod
    def _expired(self, now_s: float, timer: Timer) -> list[Effect]: ...

    def _left(self, now_s: float, peer: PeerId) -> list[Effect]:
        return []

    def _skipped(self, number: int) -> None:
        return None

    # -- Rounds

    def _next(self) -> int:
        return max(self.done + 1, self.highest)

    def _average(self, now_s: float, ask: Average) -> list[Effect]:
        if self.active is not None:
            raise RuntimeError(f"round {self.active} is not done yet; one at a time")
        if ask.channel != self.channel.number:
            raise KeyError(f"channel {ask.channel} is not this machine's, which is {self.channel.number}")
        want = (self.channel.n_chunks, self.channel.codec.elements)
        if ask.values.shape != want or ask.values.dtype != np.float32 or not ask.values.flags.c_contiguous:
            raise ValueError(
                f"values of shape {ask.values.shape}, {ask.values.dtype}; give contiguous float32 of {want}"
            )
        self.active = self.highest = self._next()
        self._ask, self.started_s = ask, now_s
        return self._begin(now_s, ask) + self._again(now_s)

    def _arrived(self, now_s: float, run: Run) -> list[Effect]:
        if run.peer == self.me or run.key.channel != self.channel.number:
            return []
        number = run.key.round
        if not self._far.believes(self.done, number, (run.peer,), self._others):
            return []
        self.highest = max(self.highest, number)
        if run.key.stage in QUESTIONS:
            never = number < (self._next() if self.active is None else self.active)
            return [here(now_s, run, self.channel.rtt_s, never)]
        return self._take(now_s, run)

    def _others(self) -> set[PeerId]:
        return {*self.view.peers} - {self.me}

    def _keep(self, run: Run) -> None:
        """Keep a copy of a run that came too early; the receiver uses its buffer again."""
        if len(self._early) >= EARLY_MAX:
            most, _ = Counter(early.peer for early in self._early).most_common(1)[0]
            self._early.pop(next(at for at, early in enumerate(self._early) if early.peer == most))
        mask = None if run.mask is None else run.mask.copy()
        kept = replace(
            run, payload=run.payload.copy(), weight=run.weight.copy(), heard=run.heard.copy(), mask=mask
        )
        self._early.append(kept)

    def _again(self, now_s: float) -> list[Effect]:
        """Take the runs that came too early, now that more is known. Those of older rounds are dropped."""
        if not self._early or self.active is None:
            return []
        early, self._early = self._early, []
        effects: list[Effect] = []
        for run in early:
            if run.key.round > self.done:
                effects += self._take(now_s, run)
        return effects

    def _finish(self, now_s: float, outcome: Outcome) -> list[Effect]:
        self.done, self.active, self._ask = outcome.round, None, None
        return [Done(outcome)]

    # -- Helpers

    def _arm(self, name: str, at_s: float) -> Arm:
        assert self.active is not None
        return Arm(self.channel.timer(self.active, name), at_s)

    def _vector(self, peer: PeerId, stage: int, values: Floats, weight: float, until_s: float) -> Send:
        """The whole vector as one message, each chunk with one weight; its contributor is the sender."""
        assert self.active is not None
        k = self.channel.n_chunks
        ones = np.ones(k, np.uint64)
        payload = self.channel.codec.encode(values)
        key = self.channel.key(self.active, stage)
        return Send(whole_message(peer, key, payload, np.full(k, weight, np.float32), ones), until_s)

    def outcome(
        self,
        now_s: float,
        mean: Floats,
        weight: Floats,
        heard: Iterable[int],
        members: tuple[PeerId, ...],
        missed: tuple[PeerId, ...] = (),
        expired: bool = False,
    ) -> Outcome:
        """An outcome of the active round. A chunk without another contributor counts as not averaged."""
        assert self.active is not None
        bits = np.fromiter(heard, np.uint64, len(weight))
        took_s = now_s - self.started_s
        return Outcome(
            channel=self.channel.number,
            round=self.active,
            mean=mean,
            weight=weight,
            heard=bits,
            averaged=bits > 1,
            missed=missed,
            waited_for=members[1:],
            started_s=self.started_s,
            scatter_s=took_s,
            gather_s=0.0,
            total_s=took_s,
            expired=expired,
            members=members,
        )

    def alone(self, now_s: float, expired: bool = True) -> list[Effect]:
        """The round failed: the peer keeps its values, its weight, and itself as the only contributor."""
        ask = self._ask
        assert ask is not None
        n = self.channel.n_chunks
        weight = np.full(n, ask.weight, np.float32)
        return self._finish(
            now_s, self.outcome(now_s, ask.values, weight, [1] * n, (self.me,), expired=expired)
        )


class Vector:
    """A whole vector that is coming from one peer, perhaps with holes."""

    __slots__ = ("ended", "got", "values", "weight")

    def __init__(self, n_chunks: int, elements: int) -> None:
        self.values = np.zeros((n_chunks, elements), np.float32)
        self.weight = np.zeros(n_chunks, np.float32)
        self.got = np.zeros(n_chunks, np.bool_)
        self.ended = False

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self.ended or bool(self.got.all())

    def take(self, run: Run, codec: Codec) -> None:
        """Take a run's chunks; what came before stays."""
        self.ended |= run.ended
        k, first = len(run.payload), run.first
        if k == 0 or first + k > len(self.got):
            return
        new = ~self.got[first : first + k] & (run.mask if run.mask is not None else True)
        if not new.any():
            return
        for a, b in spans_of(new):
            rows = slice(first + a, first + b)
            codec.decode(run.payload[a:b], self.values[rows])
            self.weight[rows] = run.weight[a:b]
            self.got[rows] = True
