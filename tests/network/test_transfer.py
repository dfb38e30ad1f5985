"""Fetching the state over real sockets, from donors that die, stall, damage, or are no donors at all."""

from __future__ import annotations

import errno
import math
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragtag.network.link.udp import PortInUse
from ragtag.network.transfer.budget import LinkBudget
from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.fetch import Donor, Line, fetch_state
from ragtag.network.transfer.session import Closed, DonorLimits, DonorSession
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import AES
from ragtag.protocols.transfer.frame import Chunk, FrameSeal
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.protocols.transfer.types import Came, Fetched, TransferError, chunk_bytes_for
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    VERDICT_BYTES,
    FrameKeys,
    NewcomerEnd,
    Status,
    Want,
    Wanted,
)
from tests.network.transferring import (
    KEY,
    PATIENCE_S,
    SCHEMA,
    Trainer,
    blob_of,
    is_mosaic,
    layout_of,
    training,
    until,
)

SIZE = 3_000_001
SLOW = DonorLimits(cpu_share=0.01, link_share=1.0)
"""So that there is time for what others do wrong."""
LONG_S = 0.4
"""Rounds so long that all donors have the same one before them when they are asked."""
ROOT = Path(__file__).parents[2]


def fetch(donors: list[Donor], **options: object) -> Fetched:
    arguments = {"schema": SCHEMA, "deadline_s": PATIENCE_S, "layout_hash_of": layout_of} | options
    return fetch_state(KEY, donors, **arguments)  # type: ignore[arg-type]


def check(fetched: Fetched, trainers: list[Trainer], size: int = SIZE) -> None:
    """It is complete, each chunk is one of a donor's, and it says what it is made of."""
    assert len(fetched.blob) == size == sum(fetched.given.values())
    assert is_mosaic(fetched.blob, trainers, list(fetched.rounds), chunk_bytes_for(size))
    assert fetched.step == 10 * fetched.round


class Damaging(DonorSession):
    """Its second chunk is not what it says."""

    def _data(self, snapshot, index):  # type: ignore[no-untyped-def]
        data = super()._data(snapshot, index)
        return memoryview(bytes(len(data))) if len(snapshot.hashes) > 1 else data


class Stalling(DonorSession):
    """In each connection it falls silent after a few chunks."""

    chunks = 3

    def _next_chunk(self, now_s):  # type: ignore[no-untyped-def]
        if self.given_bytes >= self.chunks * chunk_bytes_for(SIZE):
            self._wants.clear()
        else:
            super()._next_chunk(now_s)


class Mute(Stalling):
    """It offers its state, and gives nothing of it."""

    chunks = 0


def server_of(session: type[DonorSession]) -> type[DonorServer]:
    class Server(DonorServer):
        def _session(self, sock):  # type: ignore[no-untyped-def]
            return session(sock, self._key, self._shelf, self.limits, self._link, time.monotonic())

    return Server


# -- Donors of all kinds


def test_three_donors_share_the_work() -> None:
    with training(*(Trainer(i, SIZE, limits=SLOW, round_s=LONG_S) for i in range(3))) as trainers:
        fetched = fetch([trainer.donor for trainer in trainers])
        check(fetched, trainers)
        assert len(fetched.given) >= 2  # whoever has room; that three share alike is held in virtual time
        assert not fetched.dropped
        assert all(len(trainer.puts) == 1 for trainer in trainers)


def test_a_small_state_comes_from_one_donor_alone() -> None:
    with training(Trainer(0, 5)) as trainers:
        check(fetch([trainers[0].donor]), trainers, 5)


def test_one_damages_one_stalls_and_the_state_is_whole() -> None:
    bad = Trainer(1, SIZE, server=server_of(Damaging), round_s=LONG_S)
    slow = Trainer(2, SIZE, server=server_of(Stalling), round_s=LONG_S)
    with training(Trainer(0, SIZE, limits=SLOW, round_s=LONG_S), bad, slow) as trainers:
        fetched = fetch([trainer.donor for trainer in trainers])
        check(fetched, trainers)
        assert fetched.dropped["peer-1"] == "gave a damaged chunk"
        assert fetched.wasted_bytes > 0


def test_one_that_stalls_is_dropped_and_named_where_all_wait_for_it() -> None:
    told = pytest.raises(TransferError, match="stalled: no chunk came for")
    with training(Trainer(0, SIZE, server=server_of(Mute))) as trainers, told:
        fetch([trainers[0].donor], deadline_s=3.0)


def test_the_only_one_that_stalls_again_and_again_is_asked_until_all_is_there() -> None:
    with training(Trainer(0, 1_000_000, server=server_of(Stalling))) as trainers:
        fetched = fetch([trainers[0].donor], deadline_s=20.0)
        check(fetched, trainers, 1_000_000)
        assert len(trainers[0].notes) >= 2


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], Donor]]:
    """A donor in a process of its own."""
    code = (
        "import sys, tests.network.transferring as t\n"
        f"trainer = t.Trainer(7, {SIZE}, round_s={LONG_S})\n"
        "trainer.start()\n"
        "print(trainer.server.address[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout is not None
    try:
        yield child, Donor("doomed", ("127.0.0.1", int(child.stdout.readline())))
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE_S)


def test_a_donor_is_killed_in_the_middle(
    process: tuple[subprocess.Popen[str], Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    child, doomed = process
    whole = Line._chunk
    seen: list[int] = []

    def kill(link: Line, chunk: Chunk) -> Came:
        if link.name == doomed.name:
            seen.append(chunk.index)
            if len(seen) == 2:
                child.kill()
                child.wait(PATIENCE_S)
        return whole(link, chunk)

    monkeypatch.setattr(Line, "_chunk", kill)
    with training(*(Trainer(i, SIZE, limits=SLOW, round_s=LONG_S) for i in range(2))) as trainers:
        # The other two give for longer than a round, so that it gives, too, however late its rounds end; but
        # where a busy machine makes it answer late, it is asked for a round that they do not have.
        for _ in range(8):
            fetched = fetch([doomed, *(trainer.donor for trainer in trainers)])
            if seen:
                break
        check(fetched, [*trainers, Trainer(7, SIZE)])
        assert 2 <= len(seen) < SIZE // chunk_bytes_for(SIZE), (fetched.given, fetched.dropped, child.poll())
        assert fetched.given["doomed"] > 0
        assert "doomed" in fetched.dropped


def test_the_only_donor_is_killed_and_the_message_says_so(
    process: tuple[subprocess.Popen[str], Donor],
) -> None:
    child, doomed = process
    with pytest.raises(TransferError, match=r"doomed: nobody listens at .* that peer has ended"):
        fetch([doomed], on_note=lambda what, *_: child.kill() if what == "agreed" else None)


def test_two_newcomers_at_once_read_one_snapshot() -> None:
    with training(*(Trainer(i, SIZE, round_s=0.2) for i in range(3))) as trainers:
        donors = [trainer.donor for trainer in trainers]
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _: fetch(donors), range(2)))
        for fetched in both:
            check(fetched, trainers)
        assert all(1 <= len(trainer.puts) <= 2 for trainer in trainers)


def test_a_snapshot_that_is_replaced_in_between_is_asked_for_anew() -> None:
    trainers = [Trainer(i, SIZE) for i in range(2)]
    done = threading.Event()

    def replace(what: str, donor: str, detail: str) -> None:
        if what == "agreed" and not done.is_set():
            done.set()
            trainers[0].shelf.end()  # it has it no more

    with training(*trainers):
        fetched = fetch([trainer.donor for trainer in trainers], on_note=replace)
        check(fetched, trainers)
        assert done.is_set()


def test_the_only_donor_whose_snapshot_is_replaced_gives_its_next_one() -> None:
    trainer = Trainer(0, SIZE)
    done = threading.Event()

    def replace(what: str, donor: str, detail: str) -> None:
        if what == "agreed" and not done.is_set():
            done.set()
            trainer.shelf.end()

    with training(trainer):
        fetched = fetch([trainer.donor], on_note=replace)
        check(fetched, [trainer])
        assert len(trainer.puts) == 2


# -- Bad input


def test_another_crews_key_is_refused_with_what_to_do() -> None:
    with training(*(Trainer(i, 1000) for i in range(2))) as trainers:
        donors = [trainer.donor for trainer in trainers]
        with pytest.raises(
            TransferError, match=r"peer-0, peer-1: does not have this peer's key.*ragtag invite"
        ):
            fetch_state(bytes(32), donors, schema=SCHEMA, deadline_s=PATIENCE_S)
        until(lambda: all(t.notes and t.server.n_connections == 0 for t in trainers), "all refused it")
        assert trainers[0].notes and trainers[0].notes[0][0] == "refused"
        assert not trainers[0].puts


def test_another_model_is_named() -> None:
    told = pytest.raises(TransferError, match="schema 0000000000000abc, here 0000000000000051")
    with training(Trainer(0, 1000, schema=0xABC)) as trainers, told:
        fetch([trainers[0].donor])


def test_one_of_another_model_does_no_harm() -> None:
    with training(Trainer(0, SIZE, schema=0xABC), Trainer(1, SIZE)) as trainers:
        fetched = fetch([trainer.donor for trainer in trainers])
        check(fetched, trainers[1:])
        assert "another model" in fetched.dropped["peer-0"]


def test_a_state_that_is_not_built_as_was_said_is_refused() -> None:
    with training(Trainer(0, 1000)) as trainers, pytest.raises(TransferError, match="layout hash differs"):
        fetch([trainers[0].donor], layout_hash_of=lambda blob: 1)


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(TransferError, match="nobody listens at"):
        fetch([Donor("gone", address)])


def test_an_address_that_is_none() -> None:
    with pytest.raises(TransferError, match="is no address"):
        fetch([Donor("odd", ("127.0.0.1", 70_000))])


def test_a_donor_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TransferError, match="did not answer"):
            fetch([Donor("silent", silent.getsockname())], deadline_s=0.2)
        with training(Trainer(0, 1000)) as trainers:
            fetched = fetch([Donor("silent", silent.getsockname()), trainers[0].donor])
            assert "did not answer" in fetched.dropped["silent"]


def test_donors_that_catch_up_themselves_say_so_at_once() -> None:
    """Those that wait already, too, or each of two that are behind would wait for the other's snapshot."""
    behind, waits = Trainer(0, SIZE), Trainer(1, SIZE, round_s=PATIENCE_S)
    behind.shelf.gives(False)
    with training(behind, waits), ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, [behind.donor, waits.donor])
        until(lambda: waits.shelf._wanted < math.inf, "it is asked for a snapshot")
        waits.shelf.gives(False)
        with pytest.raises(TransferError, match="peer-0, peer-1: catches up with the crew itself"):
            fetching.result(PATIENCE_S / 2)


def test_one_that_catches_up_itself_does_no_harm() -> None:
    trainers = [Trainer(0, SIZE), Trainer(1, SIZE)]
    trainers[0].shelf.gives(False)
    with training(*trainers) as started:
        fetched = fetch([trainer.donor for trainer in started])
    check(fetched, trainers)
    assert list(fetched.given) == ["peer-1"]


class Revocable:
    """All have the same proof, until it is good no more."""

    good = True

    def prove(self, what: bytes) -> bytes:
        return b"alice"

    def proven(self, what: bytes, proof: bytes) -> bool:
        return self.good and len(what) > 32 and proof == b"alice"


def served(persons: Revocable) -> tuple[DonorSession, Shelf, socket.socket, FrameSeal]:
    """A donor's end of a connection to a newcomer that has proved its person at 0 s, and the newcomer's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        newcomer = socket.create_connection(listener.getsockname(), PATIENCE_S)
        sock = listener.accept()[0]
    sock.setblocking(False)
    shelf = Shelf(threading.Lock())
    donor = DonorSession(sock, KEY, shelf, DonorLimits(link_share=1.0), LinkBudget(1.0), 0.0, persons)
    donor.write(0.0)
    hello = NewcomerEnd(
        KEY, newcomer.recv(GREETING_BYTES, socket.MSG_WAITALL), AES, KeyPair(b"N" * 32), persons
    )
    newcomer.sendall(hello.data)
    until(lambda: donor.member or donor.read(0.0, 0.1, room=True) is not None, "it is let in")
    donor.write(0.0)
    keys = hello.judged(newcomer.recv(VERDICT_BYTES, socket.MSG_WAITALL))
    assert isinstance(keys, FrameKeys)
    return donor, shelf, newcomer, FrameSeal(keys)


def heard(donor: DonorSession, newcomer: socket.socket, data: bytes, now_s: float) -> None:
    """The newcomer says something, and the donor takes it."""
    newcomer.sendall(data)
    assert select.select([donor.sock], [], [], PATIENCE_S)[0]
    donor.read(now_s, 0.1, room=True)


def test_one_that_was_put_out_is_given_nothing_more_over_an_open_connection() -> None:
    persons = Revocable()
    donor, shelf, newcomer, seal = served(persons)
    with donor.sock, newcomer:
        heard(donor, newcomer, seal.seal(Wanted(3)), 0.1)
        shelf.put(3, 30, SCHEMA, 1, bytes(SIZE))
        donor.look(0.2)
        heard(donor, newcomer, b"".join(seal.seal(Want(1, index)) for index in range(8)), 0.2)
        donor.write(0.3)
        donor.write(5.0)
        persons.good = False
        donor.write(5.9)
        with pytest.raises(Closed, match="its person may not be in the crew any more"):
            donor.write(6.0)
        with pytest.raises(Closed, match="its person may not be in the crew any more"):
            heard(donor, newcomer, seal.seal(Wanted(4)), 6.1)


def test_a_newcomer_that_asks_on_and_on_is_cut_off() -> None:
    """It asks once for each thing, and has to be done with that."""
    for asks in (
        [Status(), Status()],
        [Wanted(3), Wanted(4)],
        [Wanted(3), Want(1, 0), Want(1, 1), Want(1, 0)],
    ):
        donor, shelf, newcomer, seal = served(Revocable())
        with donor.sock, newcomer:
            for ask in asks[:-1]:
                heard(donor, newcomer, seal.seal(ask), 0.1)
                if isinstance(ask, Wanted):
                    shelf.put(3, 30, SCHEMA, 1, bytes(SIZE))
                    donor.look(0.2)
            with pytest.raises(Closed, match="asked twice for the same"):
                heard(donor, newcomer, seal.seal(asks[-1]), 0.3)
    donor, shelf, newcomer, seal = served(Revocable())
    with donor.sock, newcomer, pytest.raises(Closed, match="asked on for a snapshot that is gone"):
        for number in range(100):
            heard(donor, newcomer, seal.seal(Want(number, 0)), 0.1)
            donor.write(0.1)


def test_training_that_stands_still_is_told() -> None:
    with training(Trainer(0, 1000, round_s=PATIENCE_S)) as trainers:
        trainers[0]._stop.set()
        with pytest.raises(TransferError, match="is it still training"):
            fetch([trainers[0].donor], deadline_s=0.3)


@pytest.mark.parametrize(
    ("key", "deadline_s", "error"), [(b"short", 1.0, "5 bytes"), (KEY, 0.0, "must be above 0")]
)
def test_arguments_are_checked(key: bytes, deadline_s: float, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fetch_state(key, [Donor("a", ("127.0.0.1", 1))], schema=1, deadline_s=deadline_s)


def test_a_port_in_use_is_named() -> None:
    trainer = Trainer(0, 1000)
    try:
        with pytest.raises(PortInUse, match="choose another port"):
            DonorServer(KEY, trainer.shelf, trainer.server.address)
    finally:
        trainer.close()


# -- What it costs a donor


def test_a_donor_uses_no_more_of_a_core_than_it_may() -> None:
    limits = DonorLimits(cpu_share=0.1, cpu_burst_s=0.001, link_share=1.0)
    size = 12_000_000
    with training(Trainer(0, size, limits=limits)) as trainers:
        fetched = fetch([trainers[0].donor])
        server = trainers[0].server
        check(fetched, trainers, size)
        # what one turn uses may overdraw the budget, and is paid back before the next: hence the slack
        assert server.used_s <= 0.1 * fetched.took_s + 0.001 + 0.02


def test_a_donor_times_rounds_anew_where_they_begin_anew() -> None:
    shelf = Shelf(threading.Lock())
    server = DonorServer(KEY, shelf)
    told: list[float] = []
    for at_s, round_ in ((100.0, 0), (102.0, 20), (110.0, -1), (111.0, 0), (171.0, 1), (231.0, 2)):
        shelf.wanted(round_)
        server._clock(at_s)
        told.append(server._round_s)
    server.close()
    assert told == pytest.approx([0.0, 0.1, 0.0, 0.0, 60.0, 60.0])


def test_a_connection_that_was_reset_before_it_is_served_does_not_end_the_donor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """macOS lets no option be set on such a socket (EINVAL)."""

    class Reset(socket.socket):
        def setsockopt(self, *args: object) -> None:  # type: ignore[override]
            raise OSError(errno.EINVAL, "Invalid argument")

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        fd, address = listener._accept()  # type: ignore[attr-defined]
        return Reset(fileno=fd), address

    server = DonorServer(KEY, Shelf(threading.Lock()))
    monkeypatch.setattr(socket.socket, "accept", accept)
    server.start()
    try:
        with socket.create_connection(server.address, PATIENCE_S) as newcomer:
            until(lambda: server.failure is not None or server.n_connections == 1, "it is taken")
            assert server.failure is None
            assert newcomer.recv(1), "its greeting"
    finally:
        server.close()


def test_blobs_of_donors_differ() -> None:
    assert blob_of(0, 1, 100) != blob_of(1, 1, 100) != blob_of(1, 2, 100)


def test_without_files_to_open_a_donor_says_so_once_and_goes_on_when_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = 0
    accept = DonorServer._accept

    def counted(server: DonorServer) -> None:
        nonlocal tried
        tried += 1
        accept(server)

    monkeypatch.setattr(DonorServer, "_accept", counted)
    notes: list[tuple[str, str, str]] = []
    server = DonorServer(KEY, Shelf(threading.Lock()), on_note=lambda *note: notes.append(note))
    server.start()
    taken: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    newcomer = socket.socket()
    try:
        newcomer.settimeout(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        newcomer.connect(server.address)
        until(lambda: tried >= 3, "it was tried again")
        assert [what for what, _, detail in notes if "Too many open files" in detail] == ["refused"]
        while taken:
            os.close(taken.pop())
        assert newcomer.recv(1)  # its greeting
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
        newcomer.close()
        server.close()
