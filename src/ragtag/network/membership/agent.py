"""Membership over a UDP socket of its own: the machine's datagrams, timers and clock.

Whoever runs it turns it: first the thread that joins, then the driver's.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Sequence

from ragtag.core.address import unusable
from ragtag.network.link.link import BROKEN, Failures
from ragtag.network.link.udp import family_of_socket
from ragtag.protocols.membership.invitation import is_ask
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.roster import Card, Roster, encode_card
from ragtag.protocols.membership.types import (
    Address,
    Changed,
    Describe,
    Entered,
    Failed,
    Join,
    Leave,
    MemberEffect,
    MemberEvent,
    Received,
    Remarked,
    Transmit,
    Wake,
    Woke,
)
from ragtag.protocols.membership.wire import DATAGRAM_BYTES_MAX

READS_MAX = 64
"""Datagrams that are read in one turn; what is left waits for the next one."""
Told = Changed | Remarked | Failed
"""What a turn tells: the rest of a machine's effects is done here."""


class Agent:
    """One peer's membership. machine: not stepped by anybody else; sock: a bound UDP socket.

    origin_s: where the clock begins, on ``time.monotonic``; a driver that turns the agent counts from there.
    lost: whether a datagram to an address is lost, where faults are injected.
    """

    def __init__(self, machine: Membership, roster: Roster, sock: socket.socket) -> None:
        self.machine, self.roster = machine, roster
        self.origin_s = time.monotonic()
        self.lost: Callable[[Address, float], bool] = lambda address, now_s: False
        self.failure, self.entered = "", False
        self.failures = Failures()
        self.receive_errors = 0
        self._sock, self._family = sock, family_of_socket(sock)
        sock.setblocking(False)
        self._wake_s = math.inf
        self._told: list[Told] = []

    # -- From the thread that turns it

    def fileno(self) -> int:
        """Becomes readable when a datagram has come."""
        return self._sock.fileno()

    def now_s(self) -> float:
        """Seconds since this agent was made."""
        return time.monotonic() - self.origin_s

    @property
    def due_s(self) -> float:
        """When it wants to be turned, though nothing has come: at once where there is something to tell."""
        return -math.inf if self._told else self._wake_s

    @property
    def over(self) -> bool:
        """Whether this peer is no member any more."""
        return self.machine.over

    def join(self, now_s: float, entries: Sequence[Address], deadline_s: float) -> None:
        """Enter through any of these addresses (none: found a crew); ``deadline_s`` from now."""
        self._step(now_s, Join(tuple(entries), now_s + deadline_s))

    def describe(self, now_s: float, card: Card) -> None:
        """Tell the crew this of oneself."""
        self.roster.claim(card)
        self._step(now_s, Describe(encode_card(card)))

    def leave(self, now_s: float) -> None:
        """Announce that this peer goes; it is ``over`` some round trips later."""
        self._step(now_s, Leave())

    def turn(self, now_s: float) -> list[Told]:
        """Take what has come, run what is due, and tell what has changed."""
        for _ in range(READS_MAX):
            try:
                data, source = self._sock.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                break
            except OSError as error:
                self._unread(error)
                continue
            if is_ask(data):
                told = self.machine.invite(data, time.time())
                if told is not None:
                    self._send(Transmit((source[0], source[1]), told))
                continue
            self._step(now_s, Received((source[0], source[1]), data))
        if self._wake_s <= now_s:
            self._wake_s = math.inf
            self._step(now_s, Woke())
        if self.failures.news:
            self._tell_failures()
        news, self._told = self._told, []
        return news

    def run_until(self, done: Callable[[], bool], deadline_s: float, take: Callable[[Told], None]) -> None:
        """Turn it here until ``done()``, or for ``deadline_s``; ``take`` is given all that is told."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        until_s = self.now_s() + deadline_s
        while True:
            for told in self.turn(self.now_s()):
                take(told)
            now_s = self.now_s()
            if done() or self.over or now_s >= until_s:
                return
            poll.poll(1e3 * min(1.0, max(0.0, min(self._wake_s, until_s) - now_s)))

    def listen(self, for_s: float) -> list[Address]:
        """Who of the crew sends something here within ``for_s``; returns with the first one.

        To be called before ``join``, by whoever might begin a crew that exists already: members knock, a few
        in each period, where they know an entry and no member.
        """
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        until_s = self.now_s() + for_s
        while (left_s := until_s - self.now_s()) > 0:
            if not poll.poll(1e3 * left_s):
                break
            try:
                data, source = self._sock.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                continue
            except OSError as error:
                self._unread(error)
                continue
            if self.machine.ours(data):
                return [(source[0], source[1])]
        return []

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    # -- The machine

    def _step(self, now_s: float, event: MemberEvent) -> None:
        for effect in self.machine.step(now_s, event):
            self._do(now_s, effect)

    def _do(self, now_s: float, effect: MemberEffect) -> None:
        if isinstance(effect, Transmit):
            if not self.lost(effect.dest, now_s):
                self._send(effect)
        elif isinstance(effect, Wake):
            # Also where the one before is overdue: a datagram was read first, and its step did what was due
            self._wake_s = effect.at_s
        elif isinstance(effect, Entered):
            self.entered = True
        elif isinstance(effect, Failed):
            self.failure = effect.reason
            self._told.append(effect)
        elif isinstance(effect, Changed | Remarked):
            self._told.append(effect)

    def _send(self, effect: Transmit) -> None:
        """Send; what the way does not take, or a full buffer, is lost. No name is looked up."""
        if unusable(effect.dest, self._family):
            return
        try:
            self._sock.sendto(effect.data, effect.dest)
        except BlockingIOError:
            return
        except OSError as error:
            self.failures.failed(effect.dest, error)
        else:
            if self.failures.lasting:
                self.failures.went(effect.dest)

    def _unread(self, error: OSError) -> None:
        """A read has failed: for an earlier send, which an ICMP message has answered. Raises what has not."""
        if error.errno in BROKEN:
            raise error
        self.receive_errors += 1

    def _tell_failures(self) -> None:
        names = {member.address: name for name, member in self.machine.members().items()}
        for address, why in self.failures.news:
            self._told.append(Remarked("membership not sent", names.get(address, ""), why))
        self.failures.news.clear()
