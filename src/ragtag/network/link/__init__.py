"""Runs to datagrams, and datagrams to runs.

``link`` says what moves trains of datagrams; ``udp`` is a socket that does (segmentation, coalescing),
``memory`` a queue between drivers of one process; ``LINKS`` has them by name. ``frame`` writes and reads
headers, ``kernels`` is the same compiled; ``flow`` is what is kept for each peer; ``outbox`` sends what is
queued, marks the end of messages and answers; ``inbox`` takes what comes. ``inject`` loses, delays and
freezes as ``core.faults`` says, with the simulator's draws: by message, so in the outbox, not around a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ragtag.core.address import Address
from ragtag.network.link.link import Link as Link
from ragtag.network.link.memory import MemoryLink
from ragtag.network.link.udp import UdpLink


class Opener(Protocol):
    """Makes a link."""

    def __call__(self, address: Address | None = None, *, fd: int | None = None) -> Link:
        """A link at an address (``None``: any), or on the bound socket that a launcher hands over.

        Raises OSError: the address cannot be had.
        """


LINKS: Mapping[str, Opener] = {"udp": UdpLink, "memory": MemoryLink}


def open_link(address: Address | None = None, *, fd: int | None = None, name: str = "udp") -> Link:
    """A link by name, at an address or on a socket that a launcher hands over."""
    return LINKS[name](address, fd=fd)
