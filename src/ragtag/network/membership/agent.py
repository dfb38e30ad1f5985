"""Membership over sockets of its own (``datagrams``): the machine's datagrams, timers and clock.

One thread at a time turns it: first the thread that joins, then the driver's.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Sequence

from ragtag.core.address import is_stream, unusable, without_stream
from ragtag.network.link.link import BROKEN, Failures
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.invitation import is_ask
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.passes import is_notice
from ragtag.protocols.membership.roster import Card, Roster, encode_card
from ragtag.protocols.membership.types import (
    Address,
    Changed,
    Clock,
    Describe,
    Entered,
    Failed,
    Join,
    Leave,
    MemberEffect,
    MemberEvent,
    Notice,
    PutOut,
    Received,
    Remarked,
    Transmit,
    Wake,
    Woke,
)
from ragtag.protocols.membership.whereabouts import asks_where
from ragtag.protocols.membership.wire import DATAGRAM_BYTES_MAX

READS_MAX = 64
"""Datagrams read in one turn at most; the rest wait for the next turn."""
_CLOCK_SET_S = 1.0
"""By so much the wall clock goes apart from the monotonic one before the machine is told."""
Told = Changed | Remarked | PutOut | Failed
"""Effects that a turn returns; the agent carries out the others itself."""


class Agent:
    """One peer's membership over a socket.

    machine: stepped by this agent only.
    sock: its datagrams; the agent closes it.
    origin_s: where the clock begins, on ``time.monotonic``. A driver that turns the agent counts from there.
    lost: whether a datagram to an address is lost at a time, where faults are injected.
    failure: why this peer cannot be in the crew; empty: it can.
    entered: whether this peer is a member by now.
    """

    def __init__(self, machine: Membership, roster: Roster, sock: Datagrams) -> None:
        self.machine, self.roster = machine, roster
        self.origin_s = time.monotonic()
        self.lost: Callable[[Address, float], bool] = lambda address, now_s: False
        self.failure, self.entered = "", False
        self.failures = Failures()
        self.receive_errors = 0
        self._sock = sock
        self._wake_s = math.inf
        self._ahead_s = math.inf  # of the wall clock, as the machine knows it
        self._told: list[Told] = []

    # -- From the thread that turns it

    def fileno(self) -> int:
        """The socket's file descriptor: readable when a datagram has come."""
        return self._sock.fileno()

    def now_s(self) -> float:
        """Seconds since this agent was made."""
        return time.monotonic() - self.origin_s

    @property
    def due_s(self) -> float:
        """When to turn it although nothing has come: at once where there is something to tell."""
        return -math.inf if self._told else self._wake_s

    @property
    def over(self) -> bool:
        """Whether this peer is no member any more."""
        return self.machine.over

    def join(self, now_s: float, entries: Sequence[Address], deadline_s: float) -> None:
        """Enter through any of these addresses within ``deadline_s`` seconds (no address: found a crew)."""
        self._step(now_s, Join(tuple(entries), now_s + deadline_s))

    def describe(self, now_s: float, card: Card) -> None:
        """Tell the crew this card of this peer."""
        self.roster.claim(card)
        self._step(now_s, Describe(encode_card(card)))

    def leave(self, now_s: float) -> None:
        """Announce that this peer leaves. The agent is ``over`` some round trips later."""
        self._step(now_s, Leave())

    def turn(self, now_s: float) -> list[Told]:
        """Take what has come, run what is due, and return what has changed."""
        for _ in range(READS_MAX):
            try:
                data, source = self._sock.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                break
            except OSError as error:
                self._unread(error)
                continue
            if self._sock.streams.strange(source) and self.machine.ours(data):
                self._sock.streams.proven(source)
            if is_ask(data):
                told = self.machine.invite(data, time.time())
                if told is not None:
                    self._send(Transmit(source, told))
                continue
            if asks_where(data):
                told = self.machine.whereabouts(data, without_stream(source))
                if told is not None:
                    self._send(Transmit(source, told))
                continue
            if is_notice(data):
                self._step(now_s, Notice(source, data))
                continue
            self._step(now_s, Received(source, data))
        if self._wake_s <= now_s:
            self._wake_s = math.inf
            self._step(now_s, Woke())
        if self.failures.news:
            self._tell_failures()
        news, self._told = self._told, []
        return news

    def run_until(self, done: Callable[[], bool], deadline_s: float, take: Callable[[Told], None]) -> None:
        """Turn it until ``done()``, for ``deadline_s`` seconds at most; ``take`` gets what turns return."""
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
        """The address of the first peer of the crew that sends something here within ``for_s`` seconds.

        A peer that is about to found a crew calls this before ``join``, as the crew may exist already. A few
        of its members knock in each period at an entry where they know of no member.
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
                return [source]
        return []

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    # -- The machine

    def _step(self, now_s: float, event: MemberEvent) -> None:
        unix_s = time.time()  # somebody may set it, and it goes on while a machine sleeps
        if abs(unix_s - now_s - self._ahead_s) > _CLOCK_SET_S:
            self._ahead_s = unix_s - now_s
            for effect in self.machine.step(now_s, Clock(unix_s)):
                self._do(now_s, effect)
        for effect in self.machine.step(now_s, event):
            self._do(now_s, effect)

    def _do(self, now_s: float, effect: MemberEffect) -> None:
        if isinstance(effect, Transmit):
            if not self.lost(effect.dest, now_s):
                self._send(effect)
        elif isinstance(effect, Wake):
            # This replaces an overdue wake, too: a datagram was read first, and its step did what was due
            self._wake_s = effect.at_s
        elif isinstance(effect, Entered):
            self.entered = True
        elif isinstance(effect, Failed):
            self.failure = effect.reason
            self._told.append(effect)
        elif isinstance(effect, Changed | Remarked | PutOut):
            self._told.append(effect)

    def _send(self, effect: Transmit) -> None:
        """Send a datagram. It is lost where there is no route or the buffer is full. No name is looked up."""
        if not is_stream(effect.dest) and unusable(effect.dest, self._sock.family):
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
        """A read has failed. An ICMP answer to an earlier send is counted; a broken socket is raised."""
        if error.errno in BROKEN:
            raise error
        self.receive_errors += 1

    def _tell_failures(self) -> None:
        names = {member.address: name for name, member in self.machine.members().items()}
        for address, why in self.failures.news:
            self._told.append(Remarked("membership not sent", names.get(address, ""), why))
        self.failures.news.clear()
