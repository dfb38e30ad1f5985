"""What a newcomer asks members before it is one: for the crew's key, and from which address it comes."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence

from ragtag.core.address import Address
from ragtag.protocols.membership.invitation import ANSWER_BYTES, NONCE_BYTES, Said, ask, read_answer
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.whereabouts import WHERE_BYTES, where_am_i, where_i_am


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
    began_s = now_s = time.monotonic()
    pause_s = INITIAL_RTO_S / 8
    again_s, told = began_s, False
    family = socket.AF_INET6 if ":" in addresses[0][0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while (left_s := began_s + deadline_s - now_s) > 0 and len(refused) < len(set(addresses)):
            if now_s >= again_s:
                for address in addresses:
                    with contextlib.suppress(OSError):  # no route now; perhaps at the next attempt
                        sock.sendto(question, address)
                again_s, pause_s = now_s + pause_s, min(2 * pause_s, 2 * INITIAL_RTO_S)
            if not told and not refused and now_s - began_s >= INITIAL_RTO_S:
                told = True
                on_wait(left_s)
            wait_s = min(left_s, again_s - now_s)
            if not told:
                wait_s = min(wait_s, max(0.0, began_s + INITIAL_RTO_S - now_s) or wait_s)
            poll.poll(1 + 1e3 * wait_s)
            now_s = time.monotonic()
            try:
                data, source = sock.recvfrom(ANSWER_BYTES + 1)
            except OSError:  # nothing has come, or a datagram found nobody
                continue
            found = read_answer(key, nonce, data)
            if found is None:
                continue
            said, crew_key = found  # whatever its address: only a member that was asked knows the nonce
            if said is Said.WELCOME:
                return crew_key, refused
            refused[source[0], source[1]] = said
    return None, refused


def ask_where(
    sock: socket.socket, addresses: Sequence[Address], crew_key: bytes, deadline_s: float
) -> dict[Address, Address]:
    """By member that answered, the address from which this socket's datagrams come to it.

    All are asked at once, and again after growing pauses. It returns when all have answered, or one has and
    twice as long has passed, or after ``deadline_s`` seconds (with nothing, where nobody answered).

    sock: a bound UDP socket that nobody else reads from; non-blocking afterwards.
    addresses: numeric, of the socket's family.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    question = where_am_i(crew_key, nonce)
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    began_s = now_s = time.monotonic()
    until_s = began_s + deadline_s
    pause_s, again_s = INITIAL_RTO_S / 8, began_s
    found: dict[Address, Address] = {}
    while now_s < until_s and len(found) < len(set(addresses)):
        if now_s >= again_s:
            for address in addresses:
                with contextlib.suppress(OSError):  # no route now; perhaps at the next attempt
                    sock.sendto(question, address)
            again_s, pause_s = now_s + pause_s, min(2 * pause_s, 2 * INITIAL_RTO_S)
        poll.poll(1 + 1e3 * (min(until_s, again_s) - now_s))
        now_s = time.monotonic()
        try:
            data, source = sock.recvfrom(WHERE_BYTES + 1)
        except OSError:  # nothing has come, or a datagram found nobody
            continue
        seen = where_i_am(crew_key, nonce, data)
        if seen is not None:
            found.setdefault((source[0], source[1]), seen)
            until_s = min(until_s, began_s + 2 * (now_s - began_s))
    return found
