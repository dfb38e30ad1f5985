"""A newcomer fetches the training state from several donors at once."""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ragtag.core.address import Address
from ragtag.core.errors import Error
from ragtag.network.transfer.connection import Link
from ragtag.protocols.transfer.machine import Transfer
from ragtag.protocols.transfer.types import (
    BLOB_BYTES_MAX,
    Arm,
    Ask,
    Connect,
    Drop,
    Expired,
    Fetch,
    Finished,
    GaveUp,
    Lost,
    Need,
    Outcome,
    Refused,
    Start,
    TransferEffect,
    TransferEvent,
)
from ragtag.protocols.transfer.wire import KEY_BYTES

Note = Callable[[str, str, str], None]
"""Told what, of which donor, and a detail."""


class TransferError(Error, RuntimeError):
    """No donor could give the state; the message says why, donor by donor. outcome: how far it came."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Donor:
    """A peer that may have the state: its name, and where it gives it away (an IP address and a TCP port)."""

    name: str
    address: Address


@dataclass(frozen=True, slots=True)
class Fetched:
    """A state, and what it is made of.

    round, step: of the agreed snapshot. rounds: chunks by round, more than one where donors of the agreed
    round were too few. given: bytes by donor. dropped: who was given up, and why. wasted_bytes: came twice,
    or damaged.
    """

    blob: bytearray
    round: int
    step: int
    rounds: Mapping[int, int]
    given: Mapping[str, int]
    dropped: Mapping[str, str]
    wasted_bytes: int
    took_s: float


def fetch_state(
    key: bytes,
    donors: Sequence[Donor],
    *,
    schema: int,
    deadline_s: float,
    layout_hash_of: Callable[[bytearray], int] | None = None,
    on_note: Note | None = None,
    agreed_min: int = 1,
    blob_bytes_max: int = BLOB_BYTES_MAX,
) -> Fetched:
    """Get the state from several donors at once, in this thread, within ``deadline_s`` seconds.

    key: the crew's. donors: three to eight are a good number, since each one that is asked takes a snapshot.
    schema: of this peer's model. layout_hash_of: computes from the whole blob what donors said of its
    structure. on_note(what, donor, detail): ``asked``, ``agreed`` (on a round), ``lost``, ``dropped``.
    agreed_min: see ``transfer_types.Need``. blob_bytes_max: a few times this peer's own state, so that a
    donor gone mad cannot fill its memory.

    Raises:
        TransferError: no donor could complete it; the message says why and what to do.
        ValueError: the key has not 32 bytes, a donor is named twice, or there is none.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"fetch: the crew's key has {len(key)} bytes; it must have {KEY_BYTES}")
    if not deadline_s > 0:
        raise ValueError(f"fetch: the deadline is {deadline_s} s; it must be above 0")
    machine = Transfer([donor.name for donor in donors], Need(schema, agreed_min, blob_bytes_max))
    driver = _Fetch(key, donors, machine, on_note)
    try:
        ended = driver.run(deadline_s)
    finally:
        driver.close()
    outcome = ended.outcome
    if isinstance(ended, GaveUp) or outcome.offer is None:
        raise TransferError(ended.reason if isinstance(ended, GaveUp) else "no offer", outcome)
    if layout_hash_of is not None and layout_hash_of(driver.blob) != outcome.offer.layout_hash:
        raise TransferError(
            "the state that came is not built as its donors said (its layout hash differs); run the same "
            "version of Ragtag and of the script on all machines",
            outcome,
        )
    return Fetched(
        blob=driver.blob,
        round=outcome.offer.round,
        step=outcome.offer.step,
        rounds=outcome.rounds,
        given=outcome.given,
        dropped=outcome.dropped,
        wasted_bytes=outcome.wasted_bytes,
        took_s=outcome.took_s,
    )


class _Fetch:
    """Runs the machine over sockets."""

    def __init__(self, key: bytes, donors: Sequence[Donor], machine: Transfer, on_note: Note | None) -> None:
        self._key, self._machine = key, machine
        self._addresses = {donor.name: donor.address for donor in donors}
        self._note = on_note if on_note is not None else lambda what, donor, detail: None
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, Link] = {}
        self._watched: dict[str, int] = {}
        self._wake_s = math.inf
        self._events: deque[TransferEvent] = deque()
        self._ended: Finished | GaveUp | None = None
        self._chunk_bytes = 0
        self.blob = bytearray()

    def run(self, deadline_s: float) -> Finished | GaveUp:
        """Until it is done, one way or the other."""
        self._events.append(Start(time.monotonic() + deadline_s))
        while True:
            self._work()
            if self._ended is not None:
                return self._ended
            self._watch()
            timeout_s = max(0.0, self._wake_s - time.monotonic())
            for selected, mask in self._selector.select(timeout_s):
                link: Link = selected.data
                if self._links.get(link.name) is link:
                    self._events += link.ready(mask)
                    self._work()
            if time.monotonic() >= self._wake_s:
                self._wake_s = math.inf
                self._events.append(Expired())

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._selector.close()

    def _work(self) -> None:
        """Tell the machine what has happened, and do what it says."""
        while self._events and self._ended is None:
            event = self._events.popleft()
            if isinstance(event, Lost | Refused):
                self._note("lost", event.donor, event.why)
                self._forget(event.donor)
            for effect in self._machine.step(time.monotonic(), event):
                self._apply(effect)

    def _apply(self, effect: TransferEffect) -> None:
        if isinstance(effect, Finished | GaveUp):
            self._ended = effect
        elif isinstance(effect, Arm):
            self._wake_s = min(self._wake_s, effect.at_s)
        elif isinstance(effect, Connect):
            link = Link(effect.donor, self._addresses[effect.donor], self._key, self._store)
            self._links[effect.donor] = link
            self._events += link.opened()
        elif isinstance(effect, Ask):
            self._note("asked", effect.donor, f"round {effect.round}")
            self._links[effect.donor].ask(effect.round)
        elif isinstance(effect, Fetch):
            self._fetch(self._links[effect.donor], effect.index)
        elif isinstance(effect, Drop):
            self._note("dropped", effect.donor, effect.why)
            self._forget(effect.donor)

    def _fetch(self, link: Link, index: int) -> None:
        offer = link.offer
        assert offer is not None
        if not self._chunk_bytes:
            try:
                self.blob = bytearray(offer.total_bytes)
            except MemoryError:
                raise TransferError(
                    f"the state has {offer.total_bytes} bytes, for which this machine has not enough memory"
                ) from None
            self._chunk_bytes = offer.chunk_bytes
            self._note("agreed", link.name, f"round {offer.round}, {offer.total_bytes} bytes")
        link.fetch(index)

    def _store(self, index: int, data: memoryview) -> None:
        first = index * self._chunk_bytes
        self.blob[first : first + len(data)] = data

    def _forget(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is None:
            return
        if self._watched.pop(name, 0) and link.sock is not None:
            self._selector.unregister(link.sock)
        link.close()

    def _watch(self) -> None:
        for name, link in self._links.items():
            before = self._watched.get(name, 0)
            if link.sock is None or before == link.interest:
                continue
            if before:
                self._selector.modify(link.sock, link.interest, link)
            else:
                self._selector.register(link.sock, link.interest, link)
            self._watched[name] = link.interest
