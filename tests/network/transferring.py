"""Donors with trainers that finish rounds, for tests of the transfer over real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator

from ragtag.core import seed as random
from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.fetch import Donor
from ragtag.network.transfer.session import DonorLimits
from ragtag.protocols.transfer.snapshots import Shelf

KEY = bytes(range(32))
SCHEMA = 0x51
PATIENCE_S = 60.0
ROUND_S = 0.02
FAST = DonorLimits(cpu_share=1.0, link_share=1.0)
"""No pacing: what is tested is not how long it takes."""


def blob_of(donor: int, round_: int, total_bytes: int) -> bytes:
    """A donor's state after a round: no two are alike, as replicas differ."""
    key = random.stream_key(1, "blob", donor, round_)
    return random.bits(key, -(-total_bytes // 8)).tobytes()[:total_bytes]


def layout_of(blob: bytes | bytearray) -> int:
    """Stands for the hash of a blob's structure: here that is its size."""
    return int.from_bytes(hashlib.blake2b(str(len(blob)).encode(), digest_size=8).digest(), "little")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something, with a deadline."""
    ends_s = time.monotonic() + PATIENCE_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < ends_s, f"never: {what}"
        tick.wait(0.005)


class Trainer:
    """A donor's server and a thread that finishes rounds and leaves snapshots."""

    def __init__(
        self,
        number: int,
        total_bytes: int,
        *,
        key: bytes = KEY,
        schema: int = SCHEMA,
        round_s: float = ROUND_S,
        server: type[DonorServer] = DonorServer,
        limits: DonorLimits = FAST,
        first_round: int = 0,
    ) -> None:
        self.number, self.total_bytes, self.schema, self.round_s = number, total_bytes, schema, round_s
        self.shelf = Shelf(threading.Lock())
        self.notes: list[tuple[str, str, str]] = []
        self.server = server(key, self.shelf, limits=limits, on_note=lambda *note: self.notes.append(note))
        self.puts: list[int] = []
        self.round = first_round
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    @property
    def name(self) -> str:
        return f"peer-{self.number}"

    @property
    def donor(self) -> Donor:
        return Donor(self.name, self.server.address)

    def start(self) -> None:
        self.server.start()
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.wait(self.round_s):
            if self.shelf.wanted(self.round):
                blob = blob_of(self.number, self.round, self.total_bytes)
                self.shelf.put(self.round, 10 * self.round, self.schema, layout_of(blob), blob)
                self.puts.append(self.round)
            self.round += 1

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
        self.server.close(PATIENCE_S)
        assert self.server.failure is None, self.server.failure


@contextlib.contextmanager
def training(*trainers: Trainer) -> Iterator[list[Trainer]]:
    """Started, and closed in the end."""
    try:
        for trainer in trainers:
            trainer.start()
        yield list(trainers)
    finally:
        for trainer in trainers:
            trainer.close()


def is_mosaic(blob: bytes | bytearray, trainers: list[Trainer], rounds: list[int], chunk_bytes: int) -> bool:
    """Whether each chunk is one of a donor's, of one of these rounds."""
    sources = [blob_of(t.number, round_, t.total_bytes) for t in trainers for round_ in rounds]
    return all(
        any(blob[at : at + chunk_bytes] == source[at : at + chunk_bytes] for source in sources)
        for at in range(0, len(blob), chunk_bytes)
    )
