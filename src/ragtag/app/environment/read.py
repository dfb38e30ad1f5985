"""Reads a process's place in a crew from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ragtag.app.environment.addresses import Address, parse_address
from ragtag.app.environment.place import Place, PlaceError, Rendezvous
from ragtag.core.faultspec import check_peers, parse_faults
from ragtag.core.types import SEATS_MAX, PeerId
from ragtag.protocols.membership.types import KEY_BYTES


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
        one_machine=all(host.startswith("127.") or host == "::1" for host, _ in peers),
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
