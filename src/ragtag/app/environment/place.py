"""A process's place in a crew, and the variables that name it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from ragtag.app.environment.addresses import Address, format_address
from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.faultspec import format_faults
from ragtag.core.types import PeerId

_NAMES = (
    *("RANK", "SIZE", "CREW", "SEED", "RUN", "STARTED", "PEERS", "FD", "READY_FD", "FAULTS"),
    *("KEY", "MEMBERS", "MEMBER_FD", "TOKEN", "NAME"),
)
VARIABLES = tuple(f"RAGTAG_{name}" for name in _NAMES)
"""What `ragtag run` sets in the environment of its peers."""


class PlaceError(Error, ValueError):
    """The environment says something impossible about this process's place in a crew."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where torchrun's key-value store is.

    hosted: whether this process is to host it (torchrun's agent does not). prefix: of this crew's keys.
    """

    host: str
    port: int
    hosted: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in a crew.

    rank, size: this peer's number, and how many there are. crew: the crew's name, the same on all peers.
    run_folder: where to write the trace; ``None``: nowhere. started_unix_s: when the run began, so that all
    traces count from one moment; ``None``: count from when this peer joins.
    peers: everyone's address by number; ``None``: not known yet (``exchange_addresses`` tells).
    socket_fd: a bound UDP socket that this process inherited. ready_fd: a pipe on which the launcher waits
    to hear how far this peer is (``Announcer``). rendezvous: torchrun's store.
    one_machine: whether all peers run on this machine.
    key: the crew's, 32 bytes; ``None``: no membership, peers do not change. members: where everyone's
    membership listens, by number. member_fd: a socket for it that this process inherited.
    token: an invitation to a crew that this process joins; ``rank`` is then its number on this machine, until
    it has a seat. name: in the membership.
    """

    rank: PeerId
    size: int
    crew: str
    seed: int = 0
    run_folder: Path | None = None
    started_unix_s: float | None = None
    peers: tuple[Address, ...] | None = None
    socket_fd: int | None = None
    ready_fd: int | None = None
    rendezvous: Rendezvous | None = None
    one_machine: bool = True
    faults: Faults = field(default_factory=Faults)
    key: bytes | None = field(default=None, repr=False)
    members: tuple[Address, ...] | None = None
    member_fd: int | None = None
    token: str | None = field(default=None, repr=False)
    name: str | None = None

    def of_crew(self, number: int) -> Place:
        """The same place in the ``number``-th crew that this run's processes form, one after another.

        Each crew has a name and a key of its own, which follow from the first one's: nothing that still comes
        from an earlier crew counts in a later one. So has each a folder, ``RUN/crew-2``, for its trace. A
        process that was invited goes by its invitation each time, and is another member.
        """
        if number == 1:
            return self
        if self.token is not None:
            return self if self.name is None else replace(self, name=f"{self.name}.{number}")
        key, way = self.key, self.rendezvous
        return replace(
            self,
            crew=f"{self.crew}.{number}",
            key=None if key is None else blake2b(b"crew %d" % number, key=key, digest_size=len(key)).digest(),
            rendezvous=None if way is None else replace(way, prefix=f"{way.prefix}/{number}"),
            run_folder=None if self.run_folder is None else self.run_folder / f"crew-{number}",
        )

    def variables(self) -> dict[str, str]:
        """The ``RAGTAG_*`` variables from which ``place_from_environment`` reads this place again."""
        found: dict[str, object | None] = {
            "RAGTAG_RANK": self.rank,
            "RAGTAG_SIZE": self.size,
            "RAGTAG_CREW": self.crew,
            "RAGTAG_SEED": self.seed,
            "RAGTAG_RUN": self.run_folder,
            "RAGTAG_STARTED": self.started_unix_s,
            "RAGTAG_PEERS": None if self.peers is None else ",".join(map(format_address, self.peers)),
            "RAGTAG_FD": self.socket_fd,
            "RAGTAG_READY_FD": self.ready_fd,
            "RAGTAG_FAULTS": format_faults(self.faults) or None,
            "RAGTAG_KEY": None if self.key is None else self.key.hex(),
            "RAGTAG_MEMBERS": None if self.members is None else ",".join(map(format_address, self.members)),
            "RAGTAG_MEMBER_FD": self.member_fd,
            "RAGTAG_TOKEN": self.token,
            "RAGTAG_NAME": self.name,
        }
        return {name: str(value) for name, value in found.items() if value is not None}
