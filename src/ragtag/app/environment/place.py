"""A process's place in a crew, the variables that name it, and reading them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from ragtag.app.environment.addresses import Address, format_address, parse_address
from ragtag.core.address import is_loopback
from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, format_faults, parse_faults
from ragtag.core.types import SEATS_MAX, PeerId, Role
from ragtag.protocols.membership.types import KEY_BYTES

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

    hosted: whether this process is to host it (torchrun's agent does not).
    prefix: of this crew's keys.
    """

    host: str
    port: int
    hosted: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in a crew.

    rank, size: this peer's number, and how many there are.
    crew: the crew's name, the same on all peers.
    run_folder: where to write the trace; ``None``: nowhere.
    started_unix_s: when the run began, so that all traces count from one moment; ``None``: count from when
        this peer joins.
    peers: everyone's address by number; ``None``: not known yet (``exchange_addresses`` tells).
    socket_fd: a bound UDP socket that this process inherited.
    ready_fd: a pipe on which the launcher waits to hear how far this peer is (``Announcer``).
    rendezvous: torchrun's store.
    one_machine: whether all peers run on this machine.
    key: the crew's, 32 bytes; ``None``: no membership, peers do not change.
    members: where everyone's membership listens, by number.
    member_fd: a socket for it that this process inherited.
    token: an invitation to a crew that this process joins; ``rank`` is then its number on this machine, until
        it has a seat.
    name: in the membership.
    seal: whether to encrypt what peers send each other; ``None``: where this peer's address is not loopback.
    role: what this peer does in the crew.
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
    seal: bool | None = None
    role: Role = Role.TRAINER

    def of_crew(self, number: int) -> Place:
        """The same place in the ``number``-th crew that this run's processes form, one after another.

        Each crew has a name and a key of its own, which follow from the first one's: nothing that still comes
        from an earlier crew counts in a later one. Each has a folder for its trace (``RUN/crew-2``). A
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
            "RAGTAG_SEAL": None if self.seal is None else ("on" if self.seal else "off"),
            "RAGTAG_ROLE": None if self.role is Role.TRAINER else self.role.name.lower(),
        }
        return {name: str(value) for name, value in found.items() if value is not None}


def place_from_environment(env: Mapping[str, str] | None = None) -> Place | None:
    """This process's place in a crew, or ``None`` where nothing started it as a peer.

    ``env`` is ``os.environ`` unless given. ``ragtag join`` takes precedence over ``ragtag run``, and that
    over torchrun.

    Raises:
        PlaceError: variables are missing, not numbers, or contradict each other.
    """
    env = os.environ if env is None else env
    if "RAGTAG_TOKEN" in env:
        return _from_token(env)
    if "RAGTAG_RANK" in env or "RAGTAG_SIZE" in env:
        return _from_ragtag(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    return None


def _from_token(env: Mapping[str, str]) -> Place:
    """A place in a crew that is joined by an invitation; what it is joins find out."""
    rank = _integer(env, "RAGTAG_RANK") or 0
    place = Place(
        rank=rank,
        size=1,
        crew=env.get("RAGTAG_CREW", ""),
        socket_fd=_integer(env, "RAGTAG_FD"),
        ready_fd=_integer(env, "RAGTAG_READY_FD"),
        member_fd=_integer(env, "RAGTAG_MEMBER_FD"),
        token=env["RAGTAG_TOKEN"],
        name=env.get("RAGTAG_NAME"),
    )
    return _with_settings(place, env)


def _from_ragtag(env: Mapping[str, str]) -> Place:
    needed = ("RAGTAG_RANK", "RAGTAG_SIZE", "RAGTAG_CREW", "RAGTAG_PEERS")
    _need(env, needed, "`ragtag run` sets them all: start the script with it, or unset those that are there")
    rank, size = _rank_and_size(env, "RAGTAG_RANK", "RAGTAG_SIZE")
    try:
        peers = tuple(parse_address(item) for item in env["RAGTAG_PEERS"].split(","))
    except ValueError as error:
        raise PlaceError(f"RAGTAG_PEERS: {error}") from None
    if len(peers) != size:
        raise PlaceError(f"RAGTAG_PEERS has {len(peers)} addresses for the {size} peers of RAGTAG_SIZE")
    place = Place(
        rank=rank,
        size=size,
        crew=env["RAGTAG_CREW"],
        peers=peers,
        socket_fd=_integer(env, "RAGTAG_FD"),
        ready_fd=_integer(env, "RAGTAG_READY_FD"),
        one_machine=all(is_loopback(host) for host, _ in peers),
        key=_key(env),
        members=_members(env, size),
        member_fd=_integer(env, "RAGTAG_MEMBER_FD"),
        name=env.get("RAGTAG_NAME"),
    )
    if (place.key is None) != (place.members is None):
        raise PlaceError("RAGTAG_KEY and RAGTAG_MEMBERS belong together; `ragtag run` sets both or neither")
    return _with_settings(place, env)


def _from_torchrun(env: Mapping[str, str]) -> Place:
    _need(env, ("RANK", "WORLD_SIZE"), "torchrun sets both: start the script with it, or unset the other")
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    port = _integer(env, "MASTER_PORT")
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    crew = f"torchrun-{port if run == 'none' else run}.{attempt}"  # "none": torchrun was given no run id
    rendezvous = None
    if size > 1:
        _need(
            env, ("MASTER_ADDR", "MASTER_PORT"), "peers find each other there: start the script with torchrun"
        )
        if not 1 <= (port or 0) <= 65535:
            raise PlaceError(f"MASTER_PORT is {port}; a port lies between 1 and 65535")
        hosted = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true" and rank == 0
        rendezvous = Rendezvous(env["MASTER_ADDR"], port or 0, hosted, f"ragtag/{crew}")
    local = _integer(env, "LOCAL_WORLD_SIZE")
    one_machine = size == 1 or local == size
    return _with_settings(Place(rank, size, crew, rendezvous=rendezvous, one_machine=one_machine), env)


def _with_settings(place: Place, env: Mapping[str, str]) -> Place:
    """What all ways of starting a peer take from ``RAGTAG_*``: seed, folder, beginning, faults and so on."""
    try:
        faults = parse_faults(env.get("RAGTAG_FAULTS", ""))
        check_peers(faults, place.size)
    except ValueError as error:
        raise PlaceError(f"RAGTAG_FAULTS: {error}") from None
    started = env.get("RAGTAG_STARTED")
    try:
        started_unix_s = None if started is None else float(started)
    except ValueError:
        raise PlaceError(f"RAGTAG_STARTED is {started!r}; it must be a Unix time in seconds") from None
    seal = env.get("RAGTAG_SEAL")
    if seal not in (None, "on", "off"):
        raise PlaceError(f"RAGTAG_SEAL is {seal[:40]!r}; it must be on or off, alike for all peers")
    role = env.get("RAGTAG_ROLE")
    if role not in (None, "trainer", "client"):
        raise PlaceError(
            f"RAGTAG_ROLE is {role[:40]!r}; it must be trainer or client. An auxiliary has no script, and "
            "joins by ragtag join --auxiliary"
        )
    folder = env.get("RAGTAG_RUN")
    return replace(
        place,
        role=Role.CLIENT if role == "client" else Role.TRAINER,
        seal=None if seal is None else seal == "on",
        seed=_integer(env, "RAGTAG_SEED") or 0,
        run_folder=Path(folder) if folder else None,
        started_unix_s=started_unix_s,
        faults=faults,
    )


def _need(env: Mapping[str, str], names: tuple[str, ...], remedy: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        there = ", ".join(name for name in names if env.get(name))
        raise PlaceError(f"{there} set, but not {', '.join(missing)}; {remedy}")


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise PlaceError(f"{name} is {text[:40]!r}; it must be an integer of 0 or more")
    return int(text)


def _key(env: Mapping[str, str]) -> bytes | None:
    text = env.get("RAGTAG_KEY")
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise PlaceError(f"RAGTAG_KEY must be {2 * KEY_BYTES} hexadecimal digits")
    return key


def _members(env: Mapping[str, str], size: int) -> tuple[Address, ...] | None:
    text = env.get("RAGTAG_MEMBERS")
    if text is None:
        return None
    try:
        members = tuple(parse_address(item) for item in text.split(","))
    except ValueError as error:
        raise PlaceError(f"RAGTAG_MEMBERS: {error}") from None
    if len(members) != size:
        raise PlaceError(f"RAGTAG_MEMBERS has {len(members)} addresses for the {size} peers of RAGTAG_SIZE")
    return members


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[PeerId, int]:
    rank, size = _integer(env, rank_name), _integer(env, size_name)
    assert rank is not None
    assert size is not None  # both were needed
    if not 1 <= size <= SEATS_MAX:
        raise PlaceError(f"{size_name} is {size}; a crew has 1 to {SEATS_MAX} peers")
    if rank >= size:
        raise PlaceError(
            f"{rank_name} is {rank}; the {size} peers of {size_name} are numbered 0 to {size - 1}"
        )
    return rank, size
