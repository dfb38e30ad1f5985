"""What those that are no members ask and tell members.

A newcomer asks for the crew's key, and from which address it comes. The holder of the crew's signing key
tells whose passes are void.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from ragtag.core.address import Address, is_stream, without_stream
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.invitation import NONCE_BYTES, Said, ask, read_answer
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.passes import Revocation, Took, notice, read_notice_answer
from ragtag.protocols.membership.whereabouts import where_am_i, where_i_am


def ask_for_key(
    addresses: Sequence[Address],
    key: bytes,
    number: bytes,
    ends_unix_s: int,
    deadline_s: float,
    on_wait: Callable[[float], None] = lambda left_s: None,
) -> tuple[bytes | None, dict[Address, Said]]:
    """The crew's key, or ``None``; and by address, what each member that refused has said.

    All addresses are asked at once, and again after growing pauses. It returns with the first welcome, when
    all have refused, or after ``deadline_s`` seconds.

    addresses: numeric, of one family.
    key, number, ends_unix_s: the invitation's.
    on_wait: called once with the seconds that are left, when nobody has answered within the first guess of a
        round trip (RFC 6298).
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    question = ask(key, number, ends_unix_s, nonce)
    refused: dict[Address, Said] = {}
    told = False
    family = socket.AF_INET6 if ":" in addresses[0][0] else socket.AF_INET
    with contextlib.closing(Datagrams(socket.socket(family, socket.SOCK_DGRAM))) as sock:
        asking = _Asking(sock, addresses, question, deadline_s, looks_s=INITIAL_RTO_S)
        for data, source in asking:
            if not told and not refused and asking.elapsed_s >= INITIAL_RTO_S:
                told = True
                on_wait(deadline_s - asking.elapsed_s)
            found = read_answer(key, nonce, data)
            if found is None:
                continue
            said, crew_key = found  # whatever its address: only a member that was asked knows the nonce
            if said is Said.WELCOME:
                return crew_key, refused
            refused[without_stream(source)] = said
            if len(refused) == len(set(addresses)):
                break
    return None, refused


def ask_where(
    sock: Datagrams, addresses: Sequence[Address], crew_key: bytes, deadline_s: float
) -> dict[Address, Address]:
    """By member that answered, the address from which this socket's datagrams come to it.

    All are asked at once, and again after growing pauses. It returns when all have answered, or one has and
    twice as long has passed, or after ``deadline_s`` seconds (with nothing, where nobody answered). An answer
    over TCP says only that the member is there: where it sees a connection, nothing can be sent to.

    sock: a socket that nobody else reads from.
    addresses: numeric, of the socket's family.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    found: dict[Address, Address] = {}
    asking = _Asking(sock, addresses, where_am_i(crew_key, nonce), deadline_s)
    for data, source in asking:
        seen = where_i_am(crew_key, nonce, data)
        if seen is not None:
            if not is_stream(source):
                found.setdefault(source, seen)
            asking.until_s = min(asking.until_s, 2 * asking.elapsed_s)
            if len(found) == len(set(addresses)):
                break
    return found


def tell_revocation(
    addresses: Sequence[Address], crew_key: bytes, told: Revocation, deadline_s: float
) -> dict[Address, Took]:
    """By member that answered, what it says to a revocation.

    All are told at once, and again after growing pauses. It returns when all have answered, or after
    ``deadline_s`` seconds.

    addresses: numeric, of one family.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    found: dict[Address, Took] = {}
    family = socket.AF_INET6 if ":" in addresses[0][0] else socket.AF_INET
    with contextlib.closing(Datagrams(socket.socket(family, socket.SOCK_DGRAM))) as sock:
        for data, source in _Asking(sock, addresses, notice(crew_key, told, nonce), deadline_s):
            took = read_notice_answer(crew_key, nonce, data)
            if took is not None:
                found[without_stream(source)] = took
                if len(found) == len(set(addresses)):
                    break
    return found


class _Asking:
    """Asks all addresses at once, and again after growing pauses; gives what comes, or nothing (``b""``).

    looks_s: when to give something although nothing has come.
    elapsed_s: seconds since it began, by what it gave last.
    until_s: when it ends.
    """

    def __init__(
        self,
        sock: Datagrams,
        addresses: Sequence[Address],
        question: bytes,
        until_s: float,
        looks_s: float = math.inf,
    ) -> None:
        self._sock, self._addresses, self._question, self._looks_s = sock, addresses, question, looks_s
        self.until_s, self.elapsed_s = until_s, 0.0

    def __iter__(self) -> Iterator[tuple[bytes, Address]]:
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        began_s, again_s, pause_s = time.monotonic(), 0.0, INITIAL_RTO_S / 8
        while self.elapsed_s < self.until_s:
            if self.elapsed_s >= again_s:
                for address in self._addresses:
                    with contextlib.suppress(OSError):  # no route now; perhaps at the next attempt
                        self._sock.sendto(self._question, address)
                again_s, pause_s = self.elapsed_s + pause_s, min(2 * pause_s, 2 * INITIAL_RTO_S)
            next_s = min(self.until_s, again_s)
            if self.elapsed_s < self._looks_s:
                next_s = min(next_s, self._looks_s)
            poll.poll(1 + 1e3 * (next_s - self.elapsed_s))
            data, source = b"", ("", 0)
            with contextlib.suppress(OSError):  # nothing has come, or a datagram found nobody
                data, source = self._sock.recvfrom(len(self._question) + 1)  # an answer is as long
            self.elapsed_s = time.monotonic() - began_s
            yield data, source
