"""Strangers, members gone mad, and donors that are none: nobody crashes, nothing grows."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.network.transfer.fetch import Donor, fetch_state
from ragtag.network.transfer.session import DonorLimits
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import AES
from ragtag.protocols.transfer.frame import FRAME_BYTES_MAX, FrameSeal
from ragtag.protocols.transfer.types import BLOB_BYTES_MAX, TransferError
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    HELLO_BYTES,
    VERDICT_BYTES,
    FrameKeys,
    Gone,
    Here,
    Message,
    NewcomerEnd,
    Offering,
    Status,
    Verdict,
    Want,
    Wanted,
    answered,
    greeting,
)
from tests.network.transferring import KEY, PATIENCE_S, SCHEMA, Trainer, layout_of, training, until

LIMITS = DonorLimits(
    strangers_max=4,
    members_max=2,
    handshake_s=PATIENCE_S,  # a member that a busy machine holds up here is no stranger
    idle_s=0.3,
    chunk_s=0.3,
    cpu_share=1.0,
    link_share=1.0,
)


def exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


def member(trainer: Trainer, host: str = "127.0.0.1") -> tuple[socket.socket, FrameSeal]:
    """A connection of someone who has the key."""
    sock = socket.create_connection(trainer.server.address, PATIENCE_S, (host, 0))
    greeted = exactly(sock, GREETING_BYTES)
    hello = NewcomerEnd(KEY, greeted, AES, KeyPair(b"N" * 32))
    sock.sendall(hello.data)
    keys = hello.judged(exactly(sock, VERDICT_BYTES))
    assert isinstance(keys, FrameKeys)
    return sock, FrameSeal(keys)


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the donor ends the connection, whatever it says before."""
    sock.settimeout(PATIENCE_S)
    with sock, contextlib.suppress(ConnectionError):
        while sock.recv(65_536):
            pass
    return True


def works(trainer: Trainer) -> bool:
    fetched = fetch_state(
        KEY, [trainer.donor], schema=SCHEMA, deadline_s=PATIENCE_S, layout_hash_of=layout_of
    )
    return len(fetched.blob) == trainer.total_bytes


# -- A donor


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with training(Trainer(0, 300_000, limits=LIMITS)) as trainers:
        yield trainers[0]


@given(st.binary(max_size=300), st.booleans())
def test_no_garbage_harms_a_donor(trainer: Trainer, data: bytes, known: bool) -> None:
    if known:
        until(lambda: trainer.server.n_connections < 2, "room for one more member")
    sock = member(trainer)[0] if known else socket.create_connection(trainer.server.address, PATIENCE_S)
    with sock, contextlib.suppress(ConnectionError):  # cut off in the middle
        sock.sendall(data)
    assert trainer.server.failure is None


@given(
    st.lists(
        st.sampled_from([Status(), Wanted(1), Want(0, 0), Want(1, 9999), Gone(1), Here(1, 1.0)]), max_size=30
    ),
    st.integers(0, 200),
    st.integers(0, 5000),
)
def test_no_order_of_messages_and_no_cut_harms_a_donor(
    trainer: Trainer, messages: list[Message], flip: int, cut: int
) -> None:
    until(lambda: trainer.server.n_connections < 2, "room for one more member")
    sock, session = member(trainer)
    data = bytearray(b"".join(session.seal(message) for message in messages))
    if flip < len(data):
        data[flip] ^= 0x10
    with sock, contextlib.suppress(ConnectionError):  # cut off in the middle
        sock.sendall(data[:cut])
    assert trainer.server.failure is None


def test_a_donor_works_after_all_that(trainer: Trainer) -> None:
    until(lambda: trainer.server.n_connections == 0, "all connections ended")
    assert works(trainer)


def test_who_drips_bytes_is_cut_off() -> None:
    began_s = time.monotonic()
    limits = replace(LIMITS, handshake_s=0.3)
    with training(Trainer(0, 300_000, limits=limits)) as (trainer,):
        with socket.create_connection(trainer.server.address, PATIENCE_S) as sock:
            exactly(sock, GREETING_BYTES)
            tick = threading.Event()
            with pytest.raises(ConnectionError):
                while time.monotonic() - began_s < PATIENCE_S:
                    sock.sendall(b"R")
                    tick.wait(0.01)
        assert trainer.server.ended["did not show the crew's key in time"] >= 1


def test_a_member_that_stops_within_a_frame_is_cut_off(trainer: Trainer) -> None:
    sock, session = member(trainer)
    sock.sendall(session.seal(Status())[:20])
    assert is_cut_off(sock)


def test_a_member_that_says_nothing_is_cut_off(trainer: Trainer) -> None:
    sock, _ = member(trainer)
    assert is_cut_off(sock)


def test_a_member_that_does_not_read_is_cut_off() -> None:
    with training(Trainer(0, 64_000_000, limits=LIMITS)) as trainers:
        sock, session = member(trainers[0])
        sock.sendall(session.seal(Wanted(0)))
        until(lambda: trainers[0].shelf.n_snapshots == 1, "a snapshot")
        for index in range(8):
            sock.sendall(session.seal(Want(1, index)))
        until(lambda: trainers[0].server.ended["took too long"] > 0, "cut off")
        sock.close()


def test_a_member_that_asks_for_too_much_is_cut_off(trainer: Trainer) -> None:
    sock, session = member(trainer)
    with contextlib.suppress(ConnectionError):
        sock.sendall(b"".join(session.seal(Status()) for _ in range(2000)))
        sock.sendall(session.seal(Wanted(0)))
    assert is_cut_off(sock)
    assert trainer.server.failure is None


def test_strangers_hold_few_connections_and_members_get_in(trainer: Trainer) -> None:
    strangers = [socket.create_connection(trainer.server.address, PATIENCE_S) for _ in range(40)]
    try:
        assert works(trainer)
        assert trainer.server.n_connections <= LIMITS.strangers_max + LIMITS.members_max
    finally:
        for sock in strangers:
            sock.close()


def test_strangers_do_not_decide_how_much_is_written() -> None:
    trainer = Trainer(0, 1000)
    began_s = time.monotonic()
    for _ in range(1000):
        trainer.server._refuse("nowhere", "no key")
    assert 1 <= len(trainer.notes) <= 1 + (time.monotonic() - began_s)
    trainer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is no address here")
def test_no_host_holds_all_places() -> None:
    """What it has more than others it gives to those that come."""
    limits = replace(LIMITS, members_max=3, idle_s=PATIENCE_S)
    with training(Trainer(0, 300_000, limits=limits)) as trainers:
        server = trainers[0].server
        holding = [member(trainers[0], "127.0.0.2")[0] for _ in range(3)]
        own, _ = member(trainers[0])
        until(lambda: server.ended["gave way to a newcomer from another host"] == 1, "one gives way")
        with pytest.raises(AssertionError):
            member(trainers[0])  # as many as the other has
        with pytest.raises(AssertionError):
            member(trainers[0], "127.0.0.2")
        for sock in (*holding, own):
            sock.close()


def test_where_there_is_no_room_a_newcomer_comes_again(trainer: Trainer) -> None:
    until(lambda: trainer.server.n_connections == 0, "all connections ended")
    held = [member(trainer)[0] for _ in range(LIMITS.members_max)]
    notes: list[str] = []
    fetched = fetch_state(
        KEY,
        [trainer.donor],
        schema=SCHEMA,
        deadline_s=PATIENCE_S,
        on_note=lambda what, donor, detail: notes.append(detail),
    )
    assert len(fetched.blob) == 300_000
    assert "is busy with other newcomers" in notes
    for sock in held:
        sock.close()


# -- On the line


class Relay:
    """Stands between newcomers and a donor, keeps all that goes through, and may change it.

    damage: of the bytes to newcomers, the one that is changed; ``None``: none is.
    """

    def __init__(self, trainer: Trainer, damage: int | None = None) -> None:
        self.to_donor, self.to_newcomers = bytearray(), bytearray()
        self._address, self._damage = trainer.server.address, damage
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @property
    def donor(self) -> Donor:
        return Donor("behind", self._listener.getsockname())

    def _carry(self) -> None:
        while True:
            try:
                newcomer, _ = self._listener.accept()
            except OSError:
                return
            with newcomer, socket.create_connection(self._address) as donor:
                while self._carried(newcomer, donor):
                    pass

    def _carried(self, newcomer: socket.socket, donor: socket.socket) -> bool:
        for source in select.select([newcomer, donor], [], [], PATIENCE_S)[0]:
            tape = self.to_donor if source is newcomer else self.to_newcomers
            with contextlib.suppress(ConnectionError):
                data = bytearray(source.recv(1 << 16))
                at = -1 if self._damage is None else self._damage - len(tape)
                tape += data
                if source is donor and 0 <= at < len(data):
                    data[at] ^= 1
                (donor if source is newcomer else newcomer).sendall(data)
                if data:
                    continue
            return False
        return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def through(relay: Relay) -> bytearray:
    """A state that is fetched through a relay."""
    try:
        return fetch_state(KEY, [relay.donor], schema=SCHEMA, deadline_s=PATIENCE_S).blob
    finally:
        relay.close()


def test_nobody_on_the_line_reads_the_state_or_can_use_what_went_over_it(trainer: Trainer) -> None:
    until(lambda: trainer.server.n_connections == 0, "all connections ended")
    relay = Relay(trainer)
    blob = through(relay)
    assert len(relay.to_newcomers) > len(blob) == trainer.total_bytes
    for at in range(0, len(blob) - 16, 1009):
        assert blob[at : at + 16] not in relay.to_newcomers
    assert SCHEMA.to_bytes(8, "big") not in relay.to_newcomers + relay.to_donor
    until(lambda: trainer.server.n_connections == 0, "that one ended")
    puts, given_bytes = len(trainer.puts), trainer.server.given_bytes
    with socket.create_connection(trainer.server.address, PATIENCE_S) as sock:
        exactly(sock, GREETING_BYTES)
        sock.sendall(relay.to_donor[:HELLO_BYTES])
        assert exactly(sock, VERDICT_BYTES) == b"RagX" + bytes([Verdict.KEY]) + bytes(VERDICT_BYTES - 5)
        sock.sendall(relay.to_donor[HELLO_BYTES:])
        assert is_cut_off(sock)
    assert (puts, given_bytes) == (len(trainer.puts), trainer.server.given_bytes)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (0, "is no donor"),
        (GREETING_BYTES - 1, "does not have this peer's key"),
        (GREETING_BYTES + VERDICT_BYTES - 1, "does not have this peer's key"),
        (GREETING_BYTES + VERDICT_BYTES + 20, "forged, or was damaged on its way"),
        (200_000, "forged, or was damaged on its way"),
    ],
)
def test_one_changed_byte_on_the_line_ends_the_connection(trainer: Trainer, at: int, error: str) -> None:
    with pytest.raises(TransferError, match=error):
        through(Relay(trainer, at))


# -- What a newcomer takes for a donor


class Impostor:
    """Listens, shakes hands if told to, and sends what it is given."""

    def __init__(self, *, shakes: bool, says: list[Message] | None = None, data: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._shakes, self._says, self._data = shakes, says or [], data
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def donor(self) -> Donor:
        return Donor("impostor", self._listener.getsockname())

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(PATIENCE_S)
            with sock, contextlib.suppress(ConnectionError):  # the newcomer has read enough
                self._play(sock)

    def _play(self, sock: socket.socket) -> None:
        if self._shakes:
            greeted = greeting(bytes(32))
            sock.sendall(greeted)
            answer, keys = answered(KEY, greeted, exactly(sock, HELLO_BYTES), KeyPair(b"D" * 32))
            sock.sendall(answer)
            assert isinstance(keys, FrameKeys)
            session = FrameSeal(keys)
            for message in self._says:
                sock.sendall(session.seal(message))
            if self._says and isinstance(self._says[-1], Offering):
                sock.sendall(session.seal_chunk(1, 5, bytes(32), 1))
                sock.sendall(session.seal_piece(memoryview(b"x"), memoryview(bytearray(FRAME_BYTES_MAX))))
        sock.sendall(self._data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def outcome_of(impostor: Impostor, deadline_s: float = 0.25) -> str:
    began_s = time.monotonic()
    try:
        with pytest.raises(TransferError) as error:
            fetch_state(KEY, [impostor.donor], schema=SCHEMA, deadline_s=deadline_s)
    finally:
        impostor.close()
    assert time.monotonic() - began_s < PATIENCE_S
    return str(error.value)


@given(st.binary(max_size=300), st.booleans())
def test_no_garbage_harms_a_newcomer(data: bytes, shakes: bool) -> None:
    assert "impostor" in outcome_of(Impostor(shakes=shakes, data=data), 0.05)


ASKED = [Here(1, 0.0), Offering(1, 3, 30, SCHEMA, 1, 10, 1, 0)]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ([Status()], "which only newcomers send"),
        ([Gone(1)], "does not have its snapshot any more"),
        (ASKED, "sent chunk 5, which it was not asked for"),
        ([Here(1, 0.0), Offering(1, 3, 30, SCHEMA, 1, BLOB_BYTES_MAX, 1, 0)], "which makes no sense"),
        ([Here(1 << 61, 1e-300)] * 3, ""),
    ],
)
def test_a_member_gone_mad_is_dropped_and_named(says: list[Message], error: str) -> None:
    assert error in outcome_of(Impostor(shakes=True, says=says), 1.0)


def test_a_donor_of_an_earlier_version_is_named() -> None:
    told = outcome_of(Impostor(shakes=False, data=struct.pack("<4sB3x32s", b"RagX", 1, bytes(32))), 5.0)
    assert "speaks version 1 of the transfer, and this peer 3; install the same version of Ragtag" in told


def test_another_program_is_named() -> None:
    text = outcome_of(
        Impostor(shakes=False, data=b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), 5.0
    )
    assert "what listens there is no donor of Ragtag" in text
