"""How a process learns its place in a crew: from ``ragtag run``, from torchrun, or not at all.

``ragtag run`` tells its peers everything in ``RAGTAG_*`` variables. torchrun tells rank, size and where a
store is, through which the peers tell each other their addresses.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, format_faults, parse_faults
from ragtag.core.types import PEERS_MAX, PeerId

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore

Address = tuple[str, int]
"""Host and UDP port."""

_NAMES = ("RANK", "SIZE", "CREW", "SEED", "RUN", "STARTED", "PEERS", "FD", "READY_FD", "FAULTS")
VARIABLES = tuple(f"RAGTAG_{name}" for name in _NAMES)
"""What `ragtag run` sets in the environment of its peers."""


class PlaceError(ValueError):
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
    to hear that this peer has joined (``announce_ready``). rendezvous: torchrun's store.
    one_machine: whether all peers run on this machine.
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
        }
        return {name: str(value) for name, value in found.items() if value is not None}


def place_from_environment(env: Mapping[str, str] | None = None) -> Place | None:
    """This process's place in a crew, or ``None`` where nothing started it as a peer.

    ``env`` is ``os.environ`` unless given. ``ragtag run`` takes precedence over torchrun.

    Raises:
        PlaceError: variables are missing, not numbers, or contradict each other.
    """
    env = os.environ if env is None else env
    if "RAGTAG_RANK" in env or "RAGTAG_SIZE" in env:
        return _from_ragtag(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    return None


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
        one_machine=all(host.startswith("127.") or host == "::1" for host, _ in peers),
    )
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
    """What both ways of starting a peer take from ``RAGTAG_*``: seed, run folder, beginning, faults."""
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
    folder = env.get("RAGTAG_RUN")
    return replace(
        place,
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


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[PeerId, int]:
    rank, size = _integer(env, rank_name), _integer(env, size_name)
    assert rank is not None
    assert size is not None  # both were needed
    if not 1 <= size <= PEERS_MAX:
        raise PlaceError(f"{size_name} is {size}; one crew averages 1 to {PEERS_MAX} peers directly")
    if rank >= size:
        raise PlaceError(
            f"{rank_name} is {rank}; the {size} peers of {size_name} are numbered 0 to {size - 1}"
        )
    return rank, size


# -- Addresses


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


def reachable_host(place: Place) -> str:
    """The host under which the other peers reach this process.

    On one machine that is loopback; else the address of the interface that leads to torchrun's store (a
    connected UDP socket knows it; nothing is sent).
    """
    if place.rendezvous is None or place.one_machine:
        return "127.0.0.1"
    host, port = place.rendezvous.host, place.rendezvous.port
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


# -- Telling each other


_stores: list[TorchStore] = []  # a hosted store lives as long as its process: others may still be reading


def exchange_addresses(place: Place, my_address: Address, deadline_s: float) -> list[Address]:
    """Tell the others this peer's UDP address and learn theirs, by number.

    Without a rendezvous the addresses are known (``place.peers``) or there is only this peer.
    ``deadline_s``: seconds from now.

    Raises:
        TimeoutError: naming the peers that did not tell theirs in time, or the store that did not answer.
        PlaceError: what the store holds for a peer is no address.
    """
    if place.rendezvous is None:
        return [my_address] if place.peers is None else list(place.peers)
    import torch.distributed  # noqa: F401  (takes seconds, in which nobody is waited for)

    until_s = time.monotonic() + deadline_s
    store = _connect(place.rendezvous, deadline_s)
    _stores.append(store)
    store.set(f"address/{place.rank}", format_address(my_address))
    keys = [f"address/{peer}" for peer in range(place.size)]
    try:
        store.wait(keys, timedelta(seconds=max(0.001, until_s - time.monotonic())))
    except RuntimeError:  # torch's DistStoreError is one
        silent = ", ".join(str(peer) for peer, key in enumerate(keys) if not store.check([key]))
        raise TimeoutError(
            f"no address from peer {silent} of {place.size} within {deadline_s:g} s; has it started?"
        ) from None
    try:
        found = [parse_address(store.get(key).decode("ascii", "replace")) for key in keys]
    except ValueError as error:
        raise PlaceError(f"in torchrun's store: {error}") from None
    store.set(f"read/{place.rank}", "yes")
    if place.rendezvous.hosted:  # stay until all have read; one that does not is missed by its peers later
        left_s = max(0.001, until_s - time.monotonic())
        with suppress(RuntimeError):
            store.wait([f"read/{peer}" for peer in range(place.size)], timedelta(seconds=left_s))
    return found


def _connect(rendezvous: Rendezvous, deadline_s: float) -> TorchStore:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public all the same

    try:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=rendezvous.hosted,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            multi_tenant=True,  # a later init_process_group in this process shares the server
        )
    except RuntimeError as error:
        where = format_address((rendezvous.host, rendezvous.port))
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TimeoutError(f"torchrun's store at {where} did not answer: {first_line}") from None
    return PrefixStore(rendezvous.prefix, store)


def announce_ready(place: Place) -> None:
    """Tell the launcher that this peer has joined: once all have, the times of faults begin to count.

    Does nothing where no launcher listens.
    """
    if place.ready_fd is None:
        return
    with suppress(OSError):  # the launcher has gone: nobody to tell
        os.write(place.ready_fd, b"%d\n" % place.rank)
