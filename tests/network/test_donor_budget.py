"""What giving costs a donor, in virtual time: no step of its trainer loses more than the share it may."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragtag.core import seed as random
from ragtag.network.transfer import donor, session
from ragtag.network.transfer.budget import CpuBudget, LinkBudget
from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.fetch import Donor, fetch_state
from ragtag.network.transfer.session import DonorLimits, DonorSession
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import AES
from ragtag.protocols.transfer.frame import Chunk, FrameSeal, Reader
from ragtag.protocols.transfer.snapshots import Shelf, Snapshot
from ragtag.protocols.transfer.types import chunk_bytes_for
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    VERDICT_BYTES,
    FrameKeys,
    NewcomerEnd,
    Offering,
    Want,
    Wanted,
)
from tests.network.transferring import KEY, PATIENCE_S, SCHEMA, blob_of, layout_of

Used = Sequence[tuple[float, float]]
"""When something ended, and what it cost."""


def most_used_s(used: Used, window_s: float) -> float:
    """In any window: what is longer than it, or begins before it, counts as a whole."""
    most_s = sum_s = 0.0
    first = 0
    for at_s, cost_s in used:
        sum_s += cost_s
        while used[first][0] <= at_s - window_s:
            sum_s -= used[first][1]
            first += 1
        most_s = max(most_s, sum_s)
    return most_s


@pytest.mark.parametrize("cost_s", [2e-5, 4e-4, 3e-3])
@pytest.mark.parametrize("window_s", [0.011, 0.1, 1.0, 10.0])
def test_no_window_holds_more_than_the_share_a_burst_and_one_thing(cost_s: float, window_s: float) -> None:
    limits = DonorLimits()
    budget = CpuBudget(limits.cpu_share, limits.cpu_burst_s)
    draws = random.uniforms(random.stream_key(1, "costs"), 5000)
    now_s, used = 100.0, []
    for draw in draws.tolist():
        now_s += budget.pause_s(now_s)
        cost = 2 * cost_s * draw
        now_s += cost
        budget.spend(now_s, cost)
        used.append((now_s, cost))
    allowed_s = limits.cpu_share * window_s + limits.cpu_burst_s + 2 * cost_s
    assert most_used_s(used, window_s) <= allowed_s + 2 * cost_s  # the window may begin within a thing
    total_s = sum(cost for _, cost in used)
    assert total_s / (now_s - 100.0) == pytest.approx(limits.cpu_share, rel=0.05), "it is used, too"


def test_work_comes_in_slices() -> None:
    budget = CpuBudget(0.1, 0.001)
    now_s, pauses = 0.0, []
    for _ in range(1000):
        pause_s = budget.pause_s(now_s)
        if pause_s:
            pauses.append(pause_s)
        now_s += pause_s + 0.0001
        budget.spend(now_s, 0.0001)
    assert len(pauses) <= 100 and min(pauses) >= 0.01 - 1e-9


def test_after_a_rest_no_more_than_a_burst_is_there() -> None:
    budget = CpuBudget(0.1, 0.001)
    budget.spend(0.0, 0.0005)
    assert budget.pause_s(1000.0) == 0.0
    budget.spend(1000.0, 0.0011)
    assert budget.pause_s(1000.0) == pytest.approx(0.011)
    assert budget.pause_s(1000.005) == pytest.approx(0.006)
    assert budget.pause_s(1000.012) == 0.0


class Virtual:
    """The server's clocks, its pauses, and the time that it waits for others."""

    def __init__(self, server: DonorServer, thing_s: float) -> None:
        self.now_s = self.cpu_s = 0.0
        self.used: list[tuple[float, float]] = []
        self.worked = Counter[str]()  # bytes, by what was done with them, since the last thing began
        self.most = Counter[str]()  # in any one thing
        self._thing_s = thing_s
        self._handle, self._selector = server._handle, server._selector
        server._handle = self._work  # type: ignore[method-assign]
        server._selector = self  # type: ignore[assignment]

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    def _work(self, source: object, mask: int) -> None:
        self.worked.clear()
        self._handle(source, mask)
        self.most |= self.worked
        self.now_s += self._thing_s
        self.cpu_s += self._thing_s
        self.used.append((self.now_s, self._thing_s))

    def select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._selector.select(timeout_s)
        self.now_s += 0.0 if found else timeout_s
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@pytest.mark.parametrize("newcomers", [1, 3])
def test_a_donor_keeps_its_budget_from_the_first_chunk_on(
    newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, limits, size, thing_s = Shelf(threading.Lock()), DonorLimits(link_share=1.0), 2_000_000, 0.0004
    piece_bytes = chunk_bytes_for(size) // 2
    server = DonorServer(KEY, shelf, limits=limits)
    virtual = Virtual(server, thing_s)
    monkeypatch.setattr(donor, "time", virtual)
    monkeypatch.setattr(session, "PIECE_BYTES", piece_bytes)
    seal_piece, hashed = FrameSeal.seal_piece, Snapshot.hash

    def sealing(seal: FrameSeal, data: memoryview, into: memoryview) -> memoryview:
        virtual.worked["sealed"] += len(data)
        return seal_piece(seal, data, into)

    def hashing(snapshot: Snapshot, index: int, n_bytes: int) -> bytes | None:
        virtual.worked["hashed"] += n_bytes
        return hashed(snapshot, index, n_bytes)

    monkeypatch.setattr(FrameSeal, "seal_piece", sealing)
    monkeypatch.setattr(Snapshot, "hash", hashing)
    shelf.serve(server._wake, virtual.monotonic)
    blob, round_ = blob_of(0, 1, size), 0

    def fetch(_: int) -> int:
        here = [Donor("here", server.address)]
        return len(fetch_state(KEY, here, schema=SCHEMA, deadline_s=PATIENCE_S).blob)

    with ThreadPoolExecutor(newcomers) as pool:
        came = [pool.submit(fetch, i) for i in range(newcomers)]
        while not all(future.done() for future in came):
            server._turn()
            server._pay()
            if shelf.wanted(round_):
                shelf.put(round_, round_, SCHEMA, layout_of(blob), blob)
            round_ += 1
    server._end()
    assert [future.result() for future in came] == [size] * newcomers
    assert server.used_s == pytest.approx(virtual.cpu_s)
    assert virtual.most == {"sealed": piece_bytes, "hashed": piece_bytes}
    # From the first accepted connection on; a step of 11 ms has one burst, and a thing at each of its ends.
    for window_s in (0.011, 0.1, 0.25):
        allowed_s = limits.cpu_share * window_s + limits.cpu_burst_s + 2 * thing_s
        assert most_used_s(virtual.used, window_s) <= allowed_s


def test_a_newcomer_that_reads_little_at_a_time_gets_a_chunk_of_many_pieces_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has not left yet is not written over: there is memory for one piece."""
    blob, shelf = blob_of(0, 1, 100_000), Shelf(threading.Lock())
    monkeypatch.setattr(session, "PIECE_BYTES", 1 << 14)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        giving = DonorSession(ours, KEY, shelf, DonorLimits(), LinkBudget(1.0), 0.0)
        giving.write(0.0)
        hello = NewcomerEnd(KEY, theirs.recv(GREETING_BYTES), AES, KeyPair(b"N" * 32))
        theirs.sendall(hello.data)
        giving.read(0.0, 0.0, room=True)
        giving.write(0.0)
        keys = hello.judged(theirs.recv(VERDICT_BYTES))
        assert isinstance(keys, FrameKeys)
        seal = FrameSeal(keys)
        theirs.sendall(seal.seal(Wanted(0)) + seal.seal(Want(1, 0)))
        shelf.ask(giving, 0)
        assert shelf.put(0, 0, SCHEMA, layout_of(blob), blob)
        giving.read(0.0, 0.0, room=True)
        reader = Reader(1)
        reader.part(1, 0)
        reader.takes_chunks = True
        came: list[object] = []
        theirs.setblocking(False)
        for _ in range(1000):
            giving.write(0.0)
            with contextlib.suppress(BlockingIOError):
                frame = reader.filled(theirs.recv_into(reader.space()[:1000]))
                came += [] if frame is None else [seal.open(frame)]
    assert isinstance(came[-1], Chunk) and came[-1].intact and came[-1].data == blob
    assert giving.given_bytes == len(blob)
    assert [type(said) for said in came[:-1] if said is not None] == [Offering]


def test_the_budget_of_a_path_follows_its_rate() -> None:
    link = LinkBudget(0.25)
    link.sent(0.0, 1000, None)
    assert link.free_s < 0
    link.sent(1.0, 1000, 1e4)
    assert link.free_s == pytest.approx(1.4)
    link.sent(1.4, 1000, 2e3)  # held up by the sender itself: the path can do more
    assert link.free_s == pytest.approx(1.8)


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_shares_are_checked(share: float) -> None:
    with pytest.raises(ValueError, match="it must lie above 0"):
        CpuBudget(share, 0.0)
    with pytest.raises(ValueError, match="it must lie above 0"):
        LinkBudget(share)
