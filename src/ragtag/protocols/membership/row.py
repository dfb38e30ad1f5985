"""A row of the membership table, and which records may become rows."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Raw

from ragtag.protocols.membership.pace import Allowance, ReplayWindow, RoundTrip
from ragtag.protocols.membership.suspicion import Suspicion
from ragtag.protocols.membership.types import NAME_BYTES_MAX, Address, Limits, Member, Status
from ragtag.protocols.membership.wire import Record, packed


@dataclass(slots=True)
class Entry:
    """A name's row: what this peer believes of it, and what it measured.

    raw: the record as it is told to others.
    since_s: when the belief began.
    allowance: datagrams that are taken from it.
    updates: news of it that are taken.
    newcomers: unknown names that are taken from it.
    source: where its last datagram came from; ``None``: none came. A router in front of it may show each
        member another address than the one that it tells all (NAT).
    """

    member: Member
    raw: Raw
    since_s: float
    allowance: Allowance
    updates: Allowance
    newcomers: Allowance
    rtt: RoundTrip
    window: ReplayWindow
    suspicion: Suspicion | None = None
    source: Address | None = None


def fresh_entry(record: Record, limits: Limits, now_s: float) -> Entry:
    """The row of a member that was not known."""
    return Entry(
        member_of(record),
        packed(record),
        now_s,
        Allowance(limits.datagrams_per_s_max),
        Allowance(limits.updates_per_s_max),
        Allowance(limits.newcomers_per_s_max),
        RoundTrip(),
        ReplayWindow(),
    )


def is_sound(record: Record, metadata_bytes: int) -> bool:
    """Whether a record of a living member has all that others need, within bounds."""
    return (
        record.port > 0
        and record.host != ""
        and record.epoch > 0
        and len(record.metadata) <= metadata_bytes
        and len(record.name.encode()) <= NAME_BYTES_MAX
    )


def member_of(record: Record) -> Member:
    """The member that a record describes."""
    return Member(
        record.name,
        (record.host, record.port),
        record.epoch,
        record.incarnation,
        Status(record.status),
        record.metadata,
    )
