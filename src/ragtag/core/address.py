"""Addresses that others tell: which of them a datagram may be sent to.

Only a numeric address of one host is taken. A name would be looked up by the sender, in a thread that must
not wait; a broadcast or multicast address would reach hosts that nobody asked; an address of the other family
cannot be sent to from one socket.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address

Address = tuple[str, int]
"""A host and a port."""
_LISTENS, _CAME = "tcp/", "tcp<"
"""Before the host of an address that is reached over a TCP connection: one that listens there, and one that
has connected from there. All other addresses are UDP's."""
_BROADCAST = IPv4Address("255.255.255.255")
_HOSTS_MAX = 4096


@lru_cache(_HOSTS_MAX)
def _looked_at(host: str) -> tuple[int, str]:
    """The family of a host, and why nothing can be sent to it."""
    try:
        parsed = IPv6Address(host) if ":" in host else IPv4Address(host)
    except (AddressValueError, ValueError):
        return 0, "is no numeric address"
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    plain = parsed if mapped is None else mapped
    if isinstance(parsed, IPv6Address) and parsed.scope_id is not None:
        return 6, "names a network device, which means nothing on another machine"
    if plain.is_unspecified or plain.is_multicast or plain == _BROADCAST:
        return parsed.version, "is no address of one host"
    return parsed.version, ""


def family_of(host: str) -> int:
    """4 or 6: of which internet protocol a numeric host is; 0: it is no number."""
    return _looked_at(host)[0]


def is_loopback(host: str) -> bool:
    """Whether what is sent to a numeric host stays on this machine."""
    try:
        return (IPv6Address(host) if ":" in host else IPv4Address(host)).is_loopback
    except ValueError:
        return False


def unusable(address: Address, family: int = 0) -> str:
    """Why nothing can be sent to an address from a socket of a family (0: of either); empty: it can be."""
    host, port = address
    of, why = _looked_at(host)
    if not why and family not in (0, of):
        why = f"is an IPv{of} address, and this peer has an IPv{family} one"
    if not why and not 1 <= port <= 65535:
        why = "has no port that could be sent to"
    return f"{host[:80]!r}, port {port}, {why}" if why else ""


def by_stream(address: Address) -> Address:
    """The same host and port over TCP: whoever listens there."""
    return _LISTENS + address[0], address[1]


def from_stream(address: Address) -> Address:
    """The connection that was made from a host and port."""
    return _CAME + address[0], address[1]


def is_stream(address: Address) -> bool:
    """Whether an address is one over TCP."""
    return address[0].startswith((_LISTENS, _CAME))


def dials(address: Address) -> bool:
    """Whether an address is one to which a connection can be made."""
    return address[0].startswith(_LISTENS)


def without_stream(address: Address) -> Address:
    """The host and port of an address, whether it is one over TCP or not."""
    return address[0].removeprefix(_LISTENS).removeprefix(_CAME), address[1]
