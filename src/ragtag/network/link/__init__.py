"""Runs to datagrams, and datagrams to runs.

link: the interface of what moves trains of datagrams (several in one system call).
udp: a link over a UDP socket, with segmentation and coalescing.
memory: a link between drivers of one process. ``LINKS`` has both by name.
sealed: a link on another one, which encrypts.
streamed: a link on another one, with TCP connections (``streams``) beside it.
relayed: a link on another one, whose datagrams may go over TCP, or through other members.
frame: writes and reads headers.
kernels: the same loops compiled.
flow: what is kept for each peer.
outbox: sends what is queued, marks the ends of messages, and answers.
inbox: takes what comes.
inject: loses, delays and freezes as ``core.faults`` says. It draws by message, as the simulator does, so it
    works in the outbox and not around a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ragtag.core.address import Address
from ragtag.network.link.link import Carrier as Carrier
from ragtag.network.link.link import Link as Link
from ragtag.network.link.memory import MemoryLink
from ragtag.network.link.udp import UdpLink


class Opener(Protocol):
    """A class of links, as ``LINKS`` holds it."""

    def __call__(self, address: Address | None = None, *, fd: int | None = None) -> Carrier:
        """A link at an address (``None``: any), or on a bound socket that a launcher hands over.

        fd: the socket's file descriptor.

        Raises OSError: the address cannot be had.
        """


LINKS: Mapping[str, Opener] = {"udp": UdpLink, "memory": MemoryLink}


def open_link(address: Address | None = None, *, fd: int | None = None, name: str = "udp") -> Carrier:
    """A link by name; ``address``, ``fd`` and errors are as in ``Opener``."""
    return LINKS[name](address, fd=fd)
