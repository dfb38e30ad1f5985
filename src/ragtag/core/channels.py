"""Channels and topics go by name; in keys and datagrams a number stands for each name.

The number follows from the name alone, so peers agree on it in whatever order each opens its channels, and
need not ask each other. Numbers below ``NAMED`` are a protocol's own (posts, probes, meetings).
"""

from __future__ import annotations

from ragtag.core.wire import NAMED, name_hash

NAME_MAX = 64
"""Characters of a name that a user gives."""
_NUMBERS = (1 << 32) - NAMED


def channel_of(name: str) -> int:
    """The number of the channel with this name: from ``NAMED`` to 2^32 - 1."""
    return NAMED + name_hash(f"channel/{name}") % _NUMBERS


def topic_of(name: str) -> int:
    """The number of the notice board's topic with this name: from ``NAMED`` to 2^32 - 1."""
    return NAMED + name_hash(f"topic/{name}") % _NUMBERS


def require_name(name: str) -> str:
    """A name that a user gives to what is averaged.

    Raises ValueError: it is empty, longer than ``NAME_MAX``, not printable, or has a slash, after which stand
    the names of what belongs to it.
    """
    if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable() or "/" in name:
        raise ValueError(
            f"name is {name!r}; give 1 to {NAME_MAX} printable characters without a slash, the same on all "
            "peers"
        )
    return name
