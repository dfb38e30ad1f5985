"""Which peer computes which named tensor, and which one stands in for it.

A pure function of what all peers know: names, costs, seats, living peers, a seed. So peers with the same view
agree without a message. It has three steps:

1. The founders' seats, dead or alive, share all names: in falling cost each name goes to the least loaded
   seat (longest processing time first, Graham 1969: at most 4/3 of the best that is possible), and then names
   of the most loaded seat are moved, or exchanged for another seat's, as long as that lowers its load.
2. A seat that the crew has grown by takes names from the most loaded ones, until it has a fair share.
3. What a dead peer had goes to the living, in falling cost, each name to the least loaded one.

So a peer that dies moves its own names and no others, and gets the same ones when it comes back. The price:
the peer that takes a dead one's largest name may have it beside a fair share. The second owner of a name is
the peer that gets it when the first dies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from ragtag.core import seed as random
from ragtag.core.types import PeerId
from ragtag.core.wire import name_hash

Costs = tuple[tuple[str, float], ...]
EXCHANGES_MAX = 100
"""Names that are moved or exchanged at most after each has had its seat."""
_ROUNDING = 1e-9
"""A load that falls by a smaller share has not fallen: sums of floats differ by their order."""


class OwnerPair(NamedTuple):
    """The peer that computes a named tensor, and the one that does when the first is silent."""

    first: PeerId
    second: PeerId


def assigned(
    costs: Mapping[str, float], live: Iterable[PeerId], *, seats: int, founded: int, seed: int
) -> dict[str, OwnerPair]:
    """The owners of each name.

    costs: the cost of each name, above 0, in any unit.
    live: the peers that live, at least one.
    seats: how many the crew has, taken or not.
    founded: how many it had when it began.

    Raises:
        ValueError: a cost is not above 0 and finite, no peer lives, or one beyond the last seat does.
    """
    for name, cost in costs.items():
        if not 0 < cost < math.inf:
            raise ValueError(f"the cost of {name!r} is {cost}; give a number above 0")
    alive = frozenset(live)
    if not alive or min(alive) < 0 or max(alive) >= seats or not 1 <= founded <= seats:
        raise ValueError(f"live peers {sorted(alive)} of {seats} seats, of which {founded} at first")
    return dict(_assigned(tuple(sorted(costs.items())), alive, seats, founded, seed))


@lru_cache(maxsize=64)
def _assigned(
    costs: Costs, live: frozenset[PeerId], seats: int, founded: int, seed: int
) -> tuple[tuple[str, OwnerPair], ...]:
    cost, rank = dict(costs), _ranks(costs, seed)
    placed = _placed(costs, seats, founded, seed)
    first = _among(placed, cost, rank, live)
    second = dict(first)
    if len(live) > 1:
        for peer in live:
            without = _among(placed, cost, rank, live - {peer})
            second.update({name: without[name] for name, owner in first.items() if owner == peer})
    return tuple((name, OwnerPair(first[name], second[name])) for name, _ in costs)


def _ranks(costs: Costs, seed: int) -> dict[str, int]:
    """The order among names of equal cost, which differs between seeds."""
    return {name: random.stream_key(seed, "named owner", name_hash(name)) for name, _ in costs}


@lru_cache(maxsize=64)
def _placed(costs: Costs, seats: int, founded: int, seed: int) -> dict[str, PeerId]:
    """Each name's seat, whichever peers live."""
    cost, rank = dict(costs), _ranks(costs, seed)
    turn = seed % founded
    loads = [(0.0, (seat - turn) % founded, seat) for seat in range(founded)]
    heapq.heapify(loads)
    names: list[list[str]] = [[] for _ in range(seats)]
    for name in sorted(cost, key=lambda name: (-cost[name], rank[name], name)):
        load, at, seat = heapq.heappop(loads)
        names[seat].append(name)
        heapq.heappush(loads, (load + cost[name], at, seat))
    for _ in range(EXCHANGES_MAX):
        if not _exchange(names[:founded], cost):
            break
    for seat in range(founded, seats):
        _take_share(names, seat, cost)
    return {name: seat for seat, own in enumerate(names) for name in own}


def _exchange(names: list[list[str]], cost: Mapping[str, float]) -> bool:
    """Move a name of the most loaded seat to another, or exchange it for one there, so that the larger of
    their loads falls most. Returns whether it falls at all.
    """
    load = [math.fsum(cost[name] for name in own) for own in names]
    giver = max(range(len(names)), key=lambda seat: (load[seat], -seat))
    least, found = load[giver] * (1 - _ROUNDING), None
    for seat, own in enumerate(names):
        if seat != giver:
            for given in names[giver]:
                for taken in (None, *own):
                    less = cost[given] - (0.0 if taken is None else cost[taken])
                    most = max(load[giver] - less, load[seat] + less)
                    if most < least:
                        least, found = most, (seat, given, taken)
    if found is None:
        return False
    seat, given, taken = found
    names[giver].remove(given)
    names[seat].append(given)
    if taken is not None:
        names[seat].remove(taken)
        names[giver].append(taken)
    return True


def _take_share(names: list[list[str]], seat: PeerId, cost: Mapping[str, float]) -> None:
    """A new seat takes names from the most loaded ones, each the largest that does not overburden it."""
    load = [math.fsum(cost[name] for name in own) for own in names]
    while True:
        giver = max(range(seat), key=lambda other: (load[other], -other))
        fits = [name for name in names[giver] if load[seat] + cost[name] < load[giver]]
        if not fits:
            return
        name = max(fits, key=lambda name: (cost[name], name))
        names[giver].remove(name)
        names[seat].append(name)
        load[giver] -= cost[name]
        load[seat] += cost[name]


def _among(
    placed: Mapping[str, PeerId], cost: Mapping[str, float], rank: Mapping[str, int], live: frozenset[PeerId]
) -> dict[str, PeerId]:
    """Each name's owner: its seat's peer, or the least loaded of the living where that one is dead."""
    load = dict.fromkeys(live, 0.0)
    owner = {name: seat for name, seat in placed.items() if seat in live}
    for name in sorted(owner):  # in one order: sums of floats depend on it
        load[owner[name]] += cost[name]
    loads = [(load[peer], peer) for peer in live]
    heapq.heapify(loads)
    orphans = (name for name in placed if name not in owner)
    for name in sorted(orphans, key=lambda name: (-cost[name], rank[name], name)):
        least, peer = heapq.heappop(loads)
        owner[name] = peer
        heapq.heappush(loads, (least + cost[name], peer))
    return owner
