"""A crew of membership machines in virtual time, under the faults of ``core.faults`` and some of its own.

Peers here join, crash, restart under their old name, leave and freeze, and their clocks jump. Each datagram
is carried as the bytes that the machine made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ragtag.core import seed as random
from ragtag.core.faults import Faults
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.passes import Passes
from ragtag.protocols.membership.types import (
    Address,
    Changed,
    Clock,
    Entered,
    Failed,
    Identity,
    Join,
    Leave,
    Limits,
    MemberEffect,
    MemberEvent,
    Received,
    Remarked,
    Stopped,
    Transmit,
    Wake,
    Woke,
)
from ragtag.protocols.membership.wire import DATAGRAM_BYTES_MAX
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.loop import Loop, Port

KEY = bytes(range(32))


@dataclass(frozen=True, slots=True)
class Jump:
    """The clock of ``peer`` goes forward by ``by_s`` at ``at_s``."""

    peer: int
    at_s: float
    by_s: float


@dataclass(slots=True)
class Life:
    """One process of a peer, from start to end.

    peer: its index, as in ``Faults``.
    leaving: it was asked to leave.
    entered_s: when it was let in.
    failed: why it gave up.
    local_s: its own clock.
    """

    peer: int
    machine: Membership
    started_s: float
    ended_s: float = float("inf")
    leaving: bool = False
    entered_s: float | None = None
    failed: str | None = None
    local_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Seen:
    """An effect of one machine with its time, kept for measurements and transcripts."""

    at_s: float
    peer: int
    epoch: int
    effect: MemberEffect


class MemberWorld:
    """Peers and their lines on one loop.

    A host is a peer's place on the loop. It freezes as the faults say, and its processes with it.

    replay: the command that runs this world again, for error messages.
    on_step: called at every step of a machine.
    tamper: gives the datagrams that are carried in place of one that was sent.
    """

    def __init__(
        self,
        faults: Faults,
        seed: int,
        *,
        limits: Limits | None = None,
        jumps: tuple[Jump, ...] = (),
        replay: str = "",
        metadata_bytes: int = 8,
    ) -> None:
        self.faults, self.seed, self.limits, self.jumps, self.replay = faults, seed, limits, jumps, replay
        self.metadata_bytes = metadata_bytes
        self.loop = Loop()
        self.lives: list[Life] = []
        self.at_address: dict[Address, Life] = {}
        self.seen: list[Seen] = []
        self.datagrams = self.bytes = 0
        self.on_step: Callable[[Life, MemberEvent, list[MemberEffect]], None] = lambda *_: None
        self.tamper: Callable[[Life, Address, bytes], list[bytes]] = lambda life, dest, data: [data]
        self._hosts: dict[int, Port] = {}
        for freeze in faults.freezes:
            self.loop.freeze(self._host(freeze.peer), freeze.at_s, freeze.for_s)
        self._drawn: dict[tuple[int, int], int] = {}
        for crash in faults.crashes:
            self.at(crash.at_s, lambda peer=crash.peer: self.crash(peer))  # type: ignore[misc]

    # -- What a test does

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.loop.now_s

    def at(self, at_s: float, call: Callable[[], object]) -> None:
        """Call something at a time."""
        self.loop.at(at_s, call)

    def start(
        self,
        peer: int,
        entries: tuple[int, ...],
        *,
        name: str | None = None,
        deadline_s: float = 1e9,
        metadata: bytes | None = None,
        passes: Passes | None = None,
        unix_s: float = 0.0,
    ) -> Life:
        """Start a process of ``peer`` now, which joins through ``entries`` (none: it founds the crew).

        unix_s: its wall clock now, which a crew of persons goes by.
        """
        epoch = int(self.now_s * 1e6) * 4096 + peer + 1
        identity = Identity(
            name or name_of(peer),
            address_of(peer),
            epoch,
            KEY,
            bytes(self.metadata_bytes) if metadata is None else metadata,
            seed=self.seed,
        )
        life = Life(peer, Membership(identity, self.limits, passes), self.now_s)
        self.lives.append(life)
        self.at_address[identity.address] = life
        join = Join(tuple(address_of(other) for other in entries), deadline_s)
        if passes is not None:
            self.tell(life, Clock(unix_s))
        self.tell(life, join)
        return life

    def crash(self, peer: int) -> None:
        """The process of ``peer`` ends without a word."""
        life = self.at_address.get(address_of(peer))
        if life is not None and life.ended_s > self.now_s:
            life.ended_s = self.now_s

    def leave(self, peer: int) -> None:
        """The process of ``peer`` is asked to leave."""
        life = self.at_address.get(address_of(peer))
        if life is not None and life.ended_s > self.now_s:
            life.leaving = True
            self.tell(life, Leave())

    def tell(self, life: Life, event: MemberEvent) -> None:
        """Give a process an event now."""
        self.loop.post(self.now_s, self._host(life.peer), (life, event))

    def is_running(self, peer: int) -> bool:
        """Whether a process of ``peer`` runs now."""
        life = self.at_address.get(address_of(peer))
        return life is not None and life.ended_s > self.now_s

    def running(self) -> list[Life]:
        """The processes that run now, by peer."""
        return sorted(
            (life for life in self.at_address.values() if life.ended_s > self.now_s),
            key=lambda life: life.peer,
        )

    def run(self, until_s: float) -> None:
        """Let time pass."""
        self.loop.run(until_s)

    def heal(self) -> None:
        """End all faults: frozen hosts go on, and no new fault begins."""
        self.faults = self.faults.healed()
        self.loop.heal()

    def agreed(self) -> bool:
        """Whether all running members take exactly the running members for alive."""
        running = [life for life in self.running() if not life.leaving]
        names = tuple(sorted(life.machine.me.name for life in running))
        return all(life.machine.live() == names for life in running)

    def broken(self, what: str, cause: Exception | None = None) -> None:
        """An invariant does not hold.

        Raises:
            InvariantBroken: always, with the command that shows it again.
        """
        raise InvariantBroken(f"{what}, at {self.now_s:.6f} s", self.seed, self.replay) from cause

    # -- Inside

    def local_s(self, peer: int, now_s: float) -> float:
        """The time on the clock of ``peer``."""
        return now_s + sum(jump.by_s for jump in self.jumps if jump.peer == peer and jump.at_s <= now_s)

    def _host(self, peer: int) -> Port:
        if peer not in self._hosts:
            self._hosts[peer] = Port(self._take)
        return self._hosts[peer]

    def _take(self, given: tuple[Life | Address, MemberEvent]) -> None:
        """Give an event to a process, or to the one that listens at an address by now."""
        to, event = given
        life = to if isinstance(to, Life) else self.at_address.get(to)
        if life is None or life.ended_s <= self.now_s:
            return
        local_s = self.local_s(life.peer, self.now_s)
        if isinstance(event, Join):
            event = Join(event.entries, local_s + (event.deadline_s - self.now_s))
        try:
            effects = life.machine.step(local_s, event)
        except Exception as error:
            self.broken(f"{life.machine.me.name} raised {error!r}", error)
            return
        self.on_step(life, event, effects)
        for effect in effects:
            self._do(life, effect)

    def _do(self, life: Life, effect: MemberEffect) -> None:
        if isinstance(effect, Transmit):
            if len(effect.data) > DATAGRAM_BYTES_MAX:
                self.broken(f"{life.machine.me.name} sends a datagram of {len(effect.data)} bytes")
            for data in self.tamper(life, effect.dest, effect.data):
                self.carry(life.peer, life.machine.me.address, effect.dest, data)
            return
        if isinstance(effect, Wake):
            ahead_s = effect.at_s - self.local_s(life.peer, self.now_s)
            at_s = self._when(life.peer, ahead_s, effect.at_s)
            self.loop.post(at_s, self._host(life.peer), (life, Woke()))
            return
        self.seen.append(Seen(self.now_s, life.peer, life.machine.me.epoch, effect))
        if isinstance(effect, Entered):
            life.entered_s = self.now_s
        elif isinstance(effect, Failed):
            life.failed, life.ended_s = effect.reason, self.now_s
        elif isinstance(effect, Stopped):
            life.ended_s = self.now_s

    def _when(self, peer: int, ahead_s: float, local_s: float) -> float:
        """When the clock of ``peer`` will show ``local_s``: sooner where it jumps before."""
        at_s = self.now_s + max(0.0, ahead_s)
        for jump in sorted(self.jumps, key=lambda jump: jump.at_s):
            if jump.peer == peer and self.now_s < jump.at_s < at_s:
                at_s = max(jump.at_s, at_s - jump.by_s)
        return at_s

    def carry(self, peer: int, source: Address, dest: Address, data: bytes) -> None:
        """Put a datagram on the line from ``peer``, where it may be lost, delayed or duplicated."""
        faults, other = self.faults, peer_at(dest)
        self.datagrams += 1
        self.bytes += len(data)
        count = self._drawn[peer, other] = self._drawn.get((peer, other), 0) + 1
        key = random.stream_key(self.seed, "member line", peer, other, count)
        if faults.cut(peer, other, self.now_s) or (
            faults.loss is not None and faults.loss.lost_one(random.mix(key ^ 1))
        ):
            return
        copies = 1 + (random.uniform(key, 2) < faults.duplicate)
        for copy in range(copies):
            delay_s = faults.latency_s
            if faults.jitter_s:
                delay_s -= faults.jitter_s * math.log(1.0 - random.uniform(key, 6 + copy))
            if random.uniform(key, 4 + copy) < faults.reorder:
                delay_s += faults.reorder_s
            self.loop.post(self.now_s + delay_s, self._host(other), (dest, Received(source, data)))


def name_of(peer: int) -> str:
    """The name of peer ``peer``."""
    return f"peer-{peer:02d}"


def address_of(peer: int) -> Address:
    """Where peer ``peer`` listens."""
    return f"10.0.{peer >> 8}.{peer & 255}", 4000 + peer


def peer_at(address: Address) -> int:
    """The peer that listens at an address."""
    return address[1] - 4000


def changes(world: MemberWorld) -> list[tuple[Seen, Changed]]:
    """All changes of belief, each with its machine and time."""
    return [(seen, seen.effect) for seen in world.seen if isinstance(seen.effect, Changed)]


def remarks(world: MemberWorld, what: str) -> list[tuple[Seen, Remarked]]:
    """All remarks of one kind, each with its machine and time."""
    return [
        (seen, seen.effect)
        for seen in world.seen
        if isinstance(seen.effect, Remarked) and seen.effect.what == what
    ]
