"""Peers tell each other where they are, before they meet."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ragtag.app.environment.addresses import (
    Address,
    format_address,
    looked_up,
    parse_address,
    require_one_family,
)
from ragtag.app.environment.place import Place, PlaceError, Rendezvous
from ragtag.protocols.membership.types import KEY_BYTES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore


def reachable_host(place: Place) -> str:
    """The host under which the other peers reach this process.

    The one that its launcher says, where there is one. Else loopback on one machine, of the family of
    torchrun's store; else the address of the interface that leads to that store (a connected UDP socket knows
    it; nothing is sent).
    """
    if place.peers is not None:
        return place.peers[place.rank][0]
    if place.rendezvous is None:
        return "127.0.0.1"
    if place.one_machine:
        return "::1" if ":" in place.rendezvous.host else "127.0.0.1"
    host, port = place.rendezvous.host, place.rendezvous.port
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


_stores: list[TorchStore] = []  # a hosted store lives as long as its process: others may still be reading


_SIZE, _OTHER_SIZE = "size", "other size"
"""How many peers the first that came was told that there are, which stays, and another that differs."""


@dataclass(frozen=True, slots=True)
class Known:
    """What peers tell each other before they meet: where each takes data, by number.

    members: where each one's membership listens (``None``: there is no membership).
    key: the crew's (``None``: the same).
    """

    addresses: list[Address]
    members: tuple[Address, ...] | None = None
    key: bytes | None = field(default=None, repr=False)


def exchange_addresses(
    place: Place, my_address: Address, deadline_s: float, my_member: Address | None = None
) -> Known:
    """Tell the others this peer's UDP addresses and learn theirs, by number.

    Without a rendezvous the addresses are known (``place.peers``) or there is only this peer. All that is
    returned is numeric: no thread that must not wait looks up a name.

    deadline_s: seconds from now.

    Rank 0 leaves the crew's key in torchrun's store. The store does not authenticate its clients, so anybody
    that reaches it can read the key.

    Raises:
        TimeoutError: naming the peers that did not tell theirs in time, or the store that did not answer,
            or has ended.
        PlaceError: what a peer told, or the launcher says, is no address that this peer can send to.
    """
    if place.rendezvous is None:
        try:
            peers = [my_address] if place.peers is None else list(map(looked_up, place.peers))
            members = None if place.members is None else tuple(map(looked_up, place.members))
            require_one_family(peers, peers[place.rank])
            require_one_family(members or (), peers[place.rank])
        except ValueError as error:
            raise PlaceError(f"RAGTAG_PEERS, RAGTAG_MEMBERS: {error}") from None
        return Known(peers, members, place.key)
    import torch.distributed  # noqa: F401  (takes seconds, in which nobody is waited for)

    until_s = time.monotonic() + deadline_s
    store = _connect(place.rendezvous, deadline_s)
    _stores.append(store)
    try:
        return _exchanged(store, place, place.rendezvous, my_address, my_member, until_s, deadline_s)
    except RuntimeError:  # torch's DistNetworkError is one
        raise TimeoutError(
            f"torchrun's store at {_where(place.rendezvous)} has ended while peers told each other their "
            "addresses: without an agent it ends with peer 0, whose output says why"
        ) from None


def _exchanged(
    whole: TorchStore,
    place: Place,
    rendezvous: Rendezvous,
    my_address: Address,
    my_member: Address | None,
    until_s: float,
    deadline_s: float,
) -> Known:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public all the same

    # for messages alone: an agent keeps its store, and what is in it, when the number of its workers changes
    size = str(place.size).encode()
    if (first := whole.compare_set(_SIZE, "", size.decode())) != size:
        whole.set(_OTHER_SIZE, size.decode())
    store = PrefixStore(f"of {place.size}", whole)  # no peer takes addresses of a crew of another size
    mine = [my_address] if my_member is None else [my_address, my_member]
    store.set(f"address/{place.rank}", " ".join(map(format_address, mine)))
    if place.rank == 0:
        store.set("key", secrets.token_bytes(KEY_BYTES).hex())
    keys = [*(f"address/{peer}" for peer in range(place.size)), "key"]
    try:
        store.wait(keys, timedelta(seconds=max(0.001, until_s - time.monotonic())))
    except RuntimeError:  # torch's DistStoreError is one
        silent = ", ".join(str(peer) for peer in range(place.size) if not store.check([keys[peer]]))
        asked = "has it started?"
        if first != size or whole.check([_OTHER_SIZE]):
            other = first if first != size else whole.get(_OTHER_SIZE)
            asked = f"WORLD_SIZE is {other.decode('ascii', 'replace')[:9]} elsewhere: make them equal"
        raise TimeoutError(
            f"no address from peer {silent} of {place.size} within {deadline_s:g} s; {asked}"
        ) from None
    try:
        told = [store.get(key).decode("ascii", "replace").split() for key in keys[:-1]]
        if not all(1 <= len(words) <= 2 for words in told):
            raise ValueError("a peer told no address")
        found = [parse_address(words[0]) for words in told]
        members = tuple(parse_address(words[1]) for words in told if len(words) == 2)
        key = bytes.fromhex(store.get("key").decode("ascii", "replace"))
        require_one_family(found, my_address)
        require_one_family(members, my_address)
    except ValueError as error:
        raise PlaceError(f"in torchrun's store: {error}") from None
    store.set(f"read/{place.rank}", "yes")
    if rendezvous.hosted:  # stay until all have read; one that does not is missed by its peers later
        left_s = max(0.001, until_s - time.monotonic())
        with suppress(RuntimeError):
            store.wait([f"read/{peer}" for peer in range(place.size)], timedelta(seconds=left_s))
    if len(members) < place.size or len(key) != KEY_BYTES:
        return Known(found)
    return Known(found, members, key)


def _where(rendezvous: Rendezvous) -> str:
    return format_address((rendezvous.host, rendezvous.port))


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
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TimeoutError(f"torchrun's store at {_where(rendezvous)} did not answer: {first_line}") from None
    return PrefixStore(rendezvous.prefix, store)
