"""Hosts and ports as text."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ragtag.core.address import Address as Address
from ragtag.core.address import family_of, unusable


def format_address(address: Address) -> str:
    """``host:port``; an IPv6 host stands in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Read ``host:port`` or ``[IPv6]:port``.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text[:80]!r} is no address; an IPv6 host stands in brackets: [::1]:4321")
    if (
        not colon
        or not host
        or len(host) > 255
        or not port.isascii()
        or not port.isdecimal()
        or len(port) > 5
    ):
        raise ValueError(f"{text[:80]!r} is no address; write host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{text[:80]!r}: a port lies between 1 and 65535")
    return host, int(port)


def looked_up(address: Address) -> Address:
    """An address with its host as a number. This may wait for a name server.

    Raises:
        ValueError: the name is not known here, or nothing can be sent to that address.
    """
    host, port = address
    if not family_of(host):
        try:
            host = str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            raise ValueError(f"address {host[:80]!r} cannot be found: {error}") from None
    if why := unusable((host, port)):
        raise ValueError(f"address {why}")
    return host, port


def require_one_family(addresses: Sequence[Address], mine: Address) -> None:
    """Raises ValueError, naming the peer, where one's address is of another family than this peer's own."""
    for peer, address in enumerate(addresses):
        if why := unusable(address, family_of(mine[0])):
            raise ValueError(f"peer {peer} told the address {why}; give all peers addresses of one family")
