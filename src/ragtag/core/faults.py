"""Faults have names, probabilities and seeded streams; the simulator and the driver inject the same ones.

Whether chunk ``c`` of a message is lost depends on (seed, sender, receiver, message, attempt, c) and on
nothing else, so a simulated and a real run of one seed lose the same chunks in any order of events.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ragtag.core import seed as random
from ragtag.core.types import Bools, MessageKey, PeerId


@dataclass(frozen=True, slots=True)
class Loss:
    """Independent loss of each datagram with probability ``p``."""

    p: float

    def __post_init__(self) -> None:
        _probability("loss", self.p)

    def lost(self, key: int, n: int) -> Bools:
        """Which of ``n`` consecutive datagrams are lost."""
        return random.uniforms(key, n) < self.p

    def lost_one(self, key: int) -> bool:
        """``lost(key, 1)[0]``, for a tenth of its price."""
        return random.uniform(key) < self.p

    def lost_ones(self, keys: NDArray[np.uint64]) -> Bools:
        """``lost_one`` of many streams."""
        return random.first_uniforms(keys) < self.p


@dataclass(frozen=True, slots=True)
class BurstLoss:
    """Gilbert-Elliott loss (Gilbert 1960, Elliott 1963): a chain of a good and a bad state.

    enter, leave: probability per datagram of going bad, and of recovering.
    good, bad: loss in each state. Each message starts in the chain's stationary state.
    """

    enter: float
    leave: float
    good: float = 0.0
    bad: float = 1.0

    def __post_init__(self) -> None:
        for name, p in zip(
            ("enter", "leave", "good", "bad"), (self.enter, self.leave, self.good, self.bad), strict=True
        ):
            _probability(f"burst {name}", p)
        if self.enter + self.leave == 0:
            raise ValueError("burst loss: enter and leave are both 0, so the state never changes; use Loss")

    @property
    def p(self) -> float:
        """The long-run share of datagrams that are lost."""
        bad = self.enter / (self.enter + self.leave)
        return bad * self.bad + (1 - bad) * self.good

    def lost(self, key: int, n: int) -> Bools:
        """Which of ``n`` consecutive datagrams are lost."""
        moves = random.uniforms(key, n + 1)
        states = np.empty(n, np.bool_)
        bad = bool(moves[n] < self.enter / (self.enter + self.leave))
        ends = [np.flatnonzero(moves[:n] < p).tolist() for p in (self.enter, self.leave)]
        at = 0
        while at < n:  # one step per stay in a state, not per datagram
            i = bisect_left(ends[bad], at)
            until = ends[bad][i] + 1 if i < len(ends[bad]) else n
            states[at:until] = bad
            at, bad = until, not bad
        draws = random.uniforms(random.mix(key ^ 0x6C6F7373), n)
        return np.asarray(draws < np.where(states, self.bad, self.good), np.bool_)

    def lost_one(self, key: int) -> bool:
        """``lost(key, 1)[0]``, for a tenth of its price."""
        bad = random.uniform(key, 1) < self.enter / (self.enter + self.leave)
        return random.uniform(random.mix(key ^ 0x6C6F7373)) < (self.bad if bad else self.good)

    def lost_ones(self, keys: NDArray[np.uint64]) -> Bools:
        """``lost_one`` of many streams."""
        return np.fromiter((self.lost_one(key) for key in keys.tolist()), np.bool_, len(keys))


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, ``[from_s, until_s)``."""

    from_s: float = 0.0
    until_s: float = math.inf

    def covers(self, now_s: float) -> bool:
        """Whether the window is open at ``now_s``."""
        return self.from_s <= now_s < self.until_s


@dataclass(frozen=True, slots=True)
class OneWay:
    """Everything from ``source`` to ``dest`` is lost while the window is open."""

    source: PeerId
    dest: PeerId
    window: Window = Window()


@dataclass(frozen=True, slots=True)
class Partition:
    """Peers in ``side`` and the others do not hear each other while the window is open."""

    side: frozenset[PeerId]
    window: Window


@dataclass(frozen=True, slots=True)
class Crash:
    """A peer ends for good at ``at_s``."""

    peer: PeerId
    at_s: float


@dataclass(frozen=True, slots=True)
class Freeze:
    """A peer stands still from ``at_s`` for ``for_s``; what arrives meanwhile waits for it."""

    peer: PeerId
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Slow:
    """A peer computes ``factor`` times slower while the window is open."""

    peer: PeerId
    factor: float
    window: Window = Window()


@dataclass(frozen=True, slots=True)
class OwnLine:
    """A peer's own uplink, in place of the common one, and a one-way delay beside the common one, in both
    directions.

    down_bytes_per_s: what it can receive; what comes faster waits, and is not lost. Simulated lines alone
        have this limit: a live peer shapes what it sends.
    """

    peer: PeerId
    rate_bytes_per_s: float
    latency_s: float = 0.0
    down_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.down_bytes_per_s > 0:
            raise ValueError(
                f"line of peer {self.peer}: {self.down_bytes_per_s} bytes/s to receive; it must be above 0"
            )
        if not self.rate_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                f"line of peer {self.peer}: {self.rate_bytes_per_s} bytes/s, {self.latency_s} s; the rate "
                f"must be above 0, the delay at least 0"
            )


@dataclass(frozen=True, slots=True)
class Faults:
    """All that can go wrong in a run; the default is a perfect network.

    duplicate: probability per run of being delivered twice.
    reorder: of being delivered, in part or as a whole, ``reorder_s`` late.
    latency_s, jitter_s: one-way delay and the mean of an exponential addition to it.
    rate_bytes_per_s: each peer's uplink; queued beyond it, lost beyond ``queue_bytes``.
    lines: peers with a line of their own.
    """

    loss: Loss | BurstLoss | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float = math.inf
    queue_bytes: float = math.inf
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.0
    one_way: tuple[OneWay, ...] = ()
    partitions: tuple[Partition, ...] = ()
    crashes: tuple[Crash, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    slow: tuple[Slow, ...] = ()
    lines: tuple[OwnLine, ...] = ()

    def __post_init__(self) -> None:
        _probability("duplicate", self.duplicate)
        _probability("reorder", self.reorder)
        for name in ("latency_s", "jitter_s", "reorder_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"faults: {name} is {getattr(self, name)}; it must be 0 or more")
        if not self.rate_bytes_per_s > 0 or not self.queue_bytes > 0:
            raise ValueError("faults: rate_bytes_per_s and queue_bytes must be above 0")

    def healed(self) -> Faults:
        """The same line with nothing going wrong on it: crashed peers stay gone."""
        return replace(
            self,
            loss=None,
            queue_bytes=math.inf,
            duplicate=0.0,
            reorder=0.0,
            one_way=(),
            partitions=(),
            freezes=(),
            slow=(),
        )

    def cut(self, source: PeerId, dest: PeerId, now_s: float) -> bool:
        """Whether nothing at all gets from ``source`` to ``dest`` now."""
        for way in self.one_way:
            if way.source == source and way.dest == dest and way.window.covers(now_s):
                return True
        return any(
            ((source in part.side) != (dest in part.side)) and part.window.covers(now_s)
            for part in self.partitions
        )

    def slowdown(self, peer: PeerId, now_s: float) -> float:
        """By how much ``peer`` computes slower now."""
        return math.prod(s.factor for s in self.slow if s.peer == peer and s.window.covers(now_s))


_NONE_OF_ONE = np.zeros(1, np.bool_)
_NONE_OF_ONE.flags.writeable = False


@dataclass(slots=True)
class LossStream:
    """Draws the losses on the way out of one peer, in simulation and in the driver's injector.

    A message's stream is named by (seed, sender, receiver, message, attempt), and indexed by chunk.
    How often each of the last ``attempts_max`` messages has been sent is kept (repairs draw anew).
    """

    faults: Faults
    seed: int
    attempts_max: int = 65_536
    _attempts: dict[int, int] = field(default_factory=dict)
    _older: dict[int, int] = field(default_factory=dict)

    def draw(self, source: PeerId, dest: PeerId, key: MessageKey, total: int) -> Bools | None:
        """Which of a message's ``total`` chunks get through this time it is sent; ``None``: all."""
        loss = self.faults.loss
        if loss is None:
            return None
        stream = self._attempt(random.stream_key(self.seed, "loss", *_packed(source, dest, key)))
        if total == 1:
            return _NONE_OF_ONE if loss.lost_one(stream) else None
        return ~loss.lost(stream, total)

    def draw_ones(self, source: PeerId, messages: Sequence[tuple[PeerId, MessageKey]]) -> list[bool] | None:
        """Which of many messages of one chunk are lost, as ``draw`` has it; ``None``: none of them."""
        loss = self.faults.loss
        if loss is None:
            return None
        me = source << 48
        packed = [
            me ^ (dest << 32) ^ (channel << 24) ^ (stage << 16) ^ block
            for dest, (channel, _, stage, block) in messages
        ]
        rounds = [key.round for _, key in messages]
        names = random.stream_keys(self.seed, "loss", packed, rounds)
        known = names.tolist()
        first = dict.fromkeys(known, 1)
        free = self.attempts_max - len(self._attempts)
        new = self._attempts.keys().isdisjoint(first) and self._older.keys().isdisjoint(first)
        if new and len(first) == len(known) <= free:
            self._attempts.update(first)
            lost: list[bool] = loss.lost_ones(names).tolist()
            return lost
        return [loss.lost_one(self._attempt(name)) for name in known]

    def _attempt(self, name: int) -> int:
        """The stream of the next attempt of the message that is called ``name``."""
        attempts = self._attempts
        attempt = attempts.get(name)
        if attempt is None:
            attempt = self._older.get(name, 0) if self._older else 0
            if len(attempts) >= self.attempts_max:  # forget the older half: a dict deletes one by one slowly
                self._older, self._attempts = attempts, {}
                attempts = self._attempts
        attempts[name] = attempt + 1
        return random.mix(name ^ attempt) if attempt else name

    def marker_lost(self, source: PeerId, dest: PeerId, key: MessageKey, repeat: int) -> bool:
        """Whether the ``repeat``-th copy of a message's end marker is lost."""
        loss = self.faults.loss
        if loss is None:
            return False
        draw = random.stream_key(self.seed, "marker", *_packed(source, dest, key))
        return random.uniform(draw, repeat) < loss.p


def _packed(source: PeerId, dest: PeerId, key: MessageKey) -> tuple[int, int]:
    """A message's name in two numbers rather than six: each one mixed into a stream's key takes its time."""
    channel, round_, stage, block = key
    return (source << 48) ^ (dest << 32) ^ (channel << 24) ^ (stage << 16) ^ block, round_


def _probability(name: str, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"faults: {name} is {p}; a probability lies between 0 and 1")
