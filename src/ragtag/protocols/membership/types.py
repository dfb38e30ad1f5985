"""The membership machine's events and effects, and what it says of a member.

Addresses are where the driver sends datagrams: a host and a port, which the machine does not interpret.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

Address = tuple[str, int]

NAME_BYTES_MAX = 64
HOST_BYTES_MAX = 255
KEY_BYTES = 32


class Status(IntEnum):
    """What is believed of a member. Of one incarnation, the higher belief overrides the lower."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the crew.

    epoch: names the process, and grows with each restart (its time of start, and random bits).
    incarnation: raised by the member alone, to refute an accusation or to tell new ``metadata``.
    metadata: opaque here.
    """

    name: str
    address: Address
    epoch: int
    incarnation: int = 0
    status: Status = Status.ALIVE
    metadata: bytes = b""

    @property
    def version(self) -> tuple[int, Address, int, int]:
        """The order of beliefs about one name. Every member keeps the greatest that it has heard."""
        return self.epoch, self.address, self.incarnation, self.status


@dataclass(frozen=True, slots=True)
class Identity:
    """This peer's identity.

    key: the crew's, 32 bytes.
    seed: of this peer's random choices, with its name and epoch.

    Raises:
        ValueError: a field is out of its range; the message says which.
    """

    name: str
    address: Address
    epoch: int
    key: bytes
    metadata: bytes = b""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.name.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"member: the name {self.name[:80]!r} must have 1 to {NAME_BYTES_MAX} bytes")
        host, port = self.address
        if not 1 <= len(host.encode()) <= HOST_BYTES_MAX or not 1 <= port <= 65535:
            raise ValueError(f"member: {self.address!r:.300} is no address that others could send to")
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"member: the crew's key has {len(self.key)} bytes; it must have {KEY_BYTES}")
        if not 1 <= self.epoch < 1 << 62:
            raise ValueError(f"member: the epoch is {self.epoch}; it must lie between 1 and 2**62 - 1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer spends at most, on itself and on any other.

    members_max: rows of the living.
    graves_max: rows of the dead and gone, the oldest forgotten first.
    gossip_bytes: news on one datagram.
    fanout: members probed in one protocol period.
    asks: members asked to ping in this peer's place, each time a ping goes unanswered.
    probes_per_s_max: bounds the protocol period from below where round trips are tiny.
    datagrams_per_s_max: accepted from one member, and from all strangers together.
    updates_per_s_max: news accepted of one member that no other accuses.
    newcomers_per_s_max: unknown names accepted from one member. A view that was asked for is taken whole.
    relays_max: pings under way for other members.
    probes_max: probes under way.
    """

    members_max: int = 4096
    graves_max: int = 1024
    metadata_bytes: int = 256
    gossip_bytes: int = 640
    fanout: int = 3
    asks: int = 3
    probes_per_s_max: float = 20.0
    datagrams_per_s_max: float = 200.0
    updates_per_s_max: float = 4.0
    newcomers_per_s_max: float = 32.0
    relays_max: int = 256
    probes_max: int = 64


# -- Events


@dataclass(frozen=True, slots=True)
class Join:
    """Join through any of ``entries`` (none: found a crew). Give up at ``deadline_s`` (absolute)."""

    entries: tuple[Address, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """A datagram came from ``source``."""

    source: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class Woke:
    """The time of a ``Wake`` has come."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Announce that this peer goes. ``Stopped`` follows within a few round trips."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Tell the crew new metadata."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Clock:
    """The wall clock, in seconds of Unix time. Passes end by it; nothing else depends on it."""

    unix_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """A datagram for which ``passes.is_notice`` holds came from ``source``."""

    source: Address
    data: bytes


MemberEvent = Join | Received | Woke | Leave | Describe | Clock | Notice


# -- Effects


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one datagram of at most 1,152 bytes, which may be lost."""

    dest: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Deliver ``Woke`` at ``at_s`` (absolute). The newest one counts; a needless ``Woke`` does no harm."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Entered:
    """This peer is in the crew, and knows of ``others`` living members."""

    others: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The belief about a member has changed. was: the status before; ``None``: it was unknown."""

    member: Member
    was: Status | None


@dataclass(frozen=True, slots=True)
class Remarked:
    """A line for the trace: what happened, to which member."""

    what: str
    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PutOut:
    """A member may not be in the crew any more. Nothing of it is believed; ``Changed`` came before."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """This peer cannot be in the crew. The reason says why and what to do. Nothing follows.

    barred: its pass lets it in no more, so it is of no use to try again.
    """

    reason: str
    barred: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """This peer has announced that it goes. Nothing follows."""


MemberEffect = Transmit | Wake | Entered | Changed | Remarked | PutOut | Failed | Stopped
