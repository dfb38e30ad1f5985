"""What peers tell each other first, and who is refused for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from ragtag import __version__
from ragtag.app.crew.parties import outvoted_by
from ragtag.app.crew.transport import await_meeting
from ragtag.app.environment import Place
from ragtag.core.errors import Error
from ragtag.core.types import PeerId
from ragtag.core.wire import VERSION
from ragtag.network.driver.driver import Driver

_log = logging.getLogger("ragtag")


class JoinError(Error, RuntimeError):
    """This peer could not join its crew; the message says why and what to do."""


class _Hello(msgspec.Struct, frozen=True):
    """What peers tell each other first."""

    ragtag: str
    wire: int
    size: int
    seed: int


def read_hello(blob: bytes) -> _Hello:
    """What a peer said first. Raises ValueError where that is no hello."""
    try:
        return msgspec.json.decode(blob, type=_Hello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def greet(place: Place, driver: Driver, deadline_s: float, late: bool = False) -> int:
    """Meet the others; how many were there. late: they have met before, and answer at once."""
    mine, node = _Hello(__version__, VERSION, place.size, place.seed), driver.node
    began_s = driver.now_s()
    meeting = driver.meet(0, msgspec.json.encode(mine), deadline_s, late)
    met = await_meeting(driver, meeting, 2 * deadline_s + 1.0)
    refused = _refused(mine, met.blobs)
    for peer, why in refused.items():
        _log.warning("peer %d is refused: %s", peer, why)
        driver.leave(peer)
    absent = tuple(peer for peer in met.missing if peer not in node.gone)
    missing = _names(absent)
    if absent and driver.other_versions:
        message = (
            f"peer {missing} of crew {place.crew!r} speaks another wire format than version {VERSION}; "
            f"install the same version of Ragtag ({__version__} here) on every peer"
        )
        if len(absent) >= 1 + len(met.blobs) - len(refused):  # the smaller party ends, as above
            raise JoinError(message)
        _log.warning("%s", message)
    begins = node.n == 1 or (place.token is not None and not late)
    if begins and set(range(node.n)) <= {node.me} | node.gone:
        return 0  # the first one: there is nobody yet, or only those that take part later
    if not met.blobs:
        of = f"of crew {place.crew!r}"
        nobody = (
            f"the other peer {of} did not answer"
            if node.n == 2
            else (f"none of the other {node.n - 1} peers {of} answered")
        )
        raise JoinError(
            f"{nobody} within "
            f"{deadline_s:g} s; are they started, with the same crew name, and does the firewall let UDP "
            "through?"
        )
    if absent:
        waited_s = min(deadline_s, round(driver.now_s() - began_s, 1))
        _log.warning("peer %s did not answer within %g s; going on without", missing, waited_s)
    return len(met.blobs) - len(refused)


def _refused(mine: _Hello, blobs: Mapping[PeerId, bytes]) -> dict[PeerId, str]:
    """Who says another hello than this peer, and what is other in it: the larger party goes on without them.

    Raises JoinError where this peer is not of the larger party.
    """
    hellos: dict[PeerId, _Hello | None] = {}
    refused: dict[PeerId, str] = {}
    for peer, blob in blobs.items():
        try:
            theirs = hellos[peer] = read_hello(blob)
        except ValueError as error:
            hellos[peer] = None
            refused[peer] = f"peer {peer} says no hello that can be read ({error}); is it Ragtag?"
            continue
        if theirs != mine:
            refused[peer] = _difference(peer, mine, theirs)
    if larger := outvoted_by(mine, hellos):
        raise JoinError(refused[larger[0]])
    return refused


def _difference(peer: PeerId, mine: _Hello, theirs: _Hello) -> str:
    what, here, there = next(
        (what, here, there)
        for what, here, there in (
            ("version of Ragtag", mine.ragtag, theirs.ragtag),
            ("number of peers", mine.size, theirs.size),
            ("seed", mine.seed, theirs.seed),
            ("wire format", mine.wire, theirs.wire),
        )
        if here != there
    )
    return f"peer {peer} has another {what}: {there} there, {here} here; make them equal"


def _names(peers: tuple[PeerId, ...]) -> str:
    return ", ".join(map(str, peers))
