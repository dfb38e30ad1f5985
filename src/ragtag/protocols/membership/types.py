"""What the membership machine is told, what it answers, and what it says of a member.

Addresses are whatever the driver sends datagrams to: a host and a port, never looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

Address = tuple[str, int]

NAME_BYTES_MAX = 64
HOST_BYTES_MAX = 255
KEY_BYTES = 32


class Status(IntEnum):
    """What is believed of a member; of one incarnation, the higher belief overrides the lower."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the crew.

    epoch: names the process, and grows with each restart (its start in time, and random bits).
    incarnation: raised by the member alone, to refute an accusation or to tell new ``metadata`` (opaque).
    """

    name: str
    address: Address
    epoch: int
    incarnation: int = 0
    status: Status = Status.ALIVE
    metadata: bytes = b""

    @property
    def version(self) -> tuple[int, Address, int, int]:
        """Beliefs about one name are totally ordered; every member keeps the greatest that it has heard."""
        return self.epoch, self.address, self.incarnation, self.status


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this peer is.

    key: the crew's, 32 bytes. seed: of this peer's random choices (with its name and epoch).

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

    members_max: table of the living; graves_max: of the dead and gone, oldest forgotten first.
    gossip_bytes: piggybacked on one datagram. fanout: members probed in one protocol period.
    probes_per_s_max: bounds the protocol period from below where round trips are tiny.
    datagrams_per_s_max: accepted from one member, and from all strangers together.
    updates_per_s_max: news accepted about one member that nobody accuses.
    newcomers_per_s_max: unknown names accepted from one member (in a view that was asked for: all).
    asks: members asked to probe in one's place, each time a probe goes unanswered.
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
    """Begin, through any of ``entries`` (none: found a crew); give up at ``deadline_s`` (absolute)."""

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
    """Announce that this peer goes; ``Stopped`` follows within a few round trips."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Tell the crew new metadata."""

    metadata: bytes


MemberEvent = Join | Received | Woke | Leave | Describe


# -- Effects


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one datagram (at most 1,152 bytes); it may be lost."""

    dest: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Deliver ``Woke`` at ``at_s`` (absolute). The newest is in force; one too many does no harm."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Entered:
    """This peer is in the crew, and knows of ``others`` living members."""

    others: int


@dataclass(frozen=True, slots=True)
class Changed:
    """A member is there, or is believed something else (``was``: before; ``None``: it was unknown)."""

    member: Member
    was: Status | None


@dataclass(frozen=True, slots=True)
class Remarked:
    """Something worth a line in the trace: what, about which member."""

    what: str
    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This peer cannot be (or stay) in the crew; the reason says why and what to do. Nothing follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """This peer has announced that it goes. Nothing follows."""


MemberEffect = Transmit | Wake | Entered | Changed | Remarked | Failed | Stopped
