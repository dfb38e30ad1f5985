"""Hosts and ports as text."""

from __future__ import annotations

Address = tuple[str, int]
"""Host and UDP port."""


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
