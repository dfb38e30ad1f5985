"""A million datagrams that nobody of the crew has sent: no exception, and none of them is believed."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.faults import Faults, Loss
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.seed import generator
from ragtag.core.types import Arrived, MessageKey, Met, Run, Tell
from ragtag.core.wire import CHUNK_BYTES, HEADER_BYTES, LONG_KINDS, Identity, Kind, headers_of
from ragtag.network.driver.driver import Driver
from ragtag.network.link.frame import Framer
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.joining import read_hello
from ragtag.protocols.crew.meet import MEET, from_rows, to_rows
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.network.crew import PATIENCE_S, Crew, mean_of, until, values_of
from tests.network.fuzz import ROWS, Source, same, shorts_of

SEED = int(os.environ.get("RAGTAG_FUZZ_SEED", "1"))


def receiver() -> Framer:
    framer = Framer(Identity("otters", 0), 2000)
    framer.schemas = dict.fromkeys(range(256), 7)
    return framer


# -- The framer: a million tables' rows and shorts


def strangers(dest: Framer, tables: int) -> tuple[int, int]:
    """Feed tables of strange rows; how many were refused, and how many damaged ones were not.

    The tag finds any change to one 64-bit word. Several changes may cancel out: in the chunk, where they
    leave the sum of its words as it was (``same``); else rarely, and those are the ones counted.
    """
    refused = slipped = 0
    for index in range(tables):
        source = Source(SEED, index)
        foreign = Source(SEED, index, crew="badgers").valid()
        elsewhere = Source(SEED, index, dest=5).valid()
        for table in (*(source.random() for _ in range(6)), foreign, elsewhere):
            rows, headers = dest.parse(table)
            assert len(rows) == 0
            assert dest.runs(rows, headers) == []
            refused += len(table)
        for true, bad in (source.flipped(), source.truncated(), source.spliced(), source.flipped()):
            rows, headers = dest.parse(bad)
            slipped += len(rows) - int(same(true, bad).sum())
            assert sum(len(run.payload) for run, *_ in dest.runs(rows, headers)) == len(rows)
            refused += len(bad) - len(rows)
    return refused, slipped


def short_strangers(dest: Framer, rounds: int) -> int:
    """Header-only datagrams: noise, damaged ones, and another crew's."""
    fed = 0
    for index in range(rounds):
        source = Source(SEED, index)
        kinds = [kind for kind in Kind if kind not in LONG_KINDS]
        mine, theirs = source.framer(), Source(SEED, index, crew="badgers").framer()
        noise = [row.tobytes() for row in source.noise(512 * HEADER_BYTES).reshape(-1, HEADER_BYTES)]
        foreign = [theirs.short(kind, 0) for kind in kinds]
        bits = source.draws.integers(0, 8 * HEADER_BYTES, 512).tolist()
        damaged = []
        for at in bits:
            data = bytearray(mine.short(kinds[at % len(kinds)], 0, chunk=at, seq=at))
            data[at // 8] ^= 1 << at % 8
            damaged.append(bytes(data))
        for data in (*noise, *foreign, *damaged):
            assert dest.parse_short(data) is None
            fed += 1
    return fed


def test_a_million_strange_datagrams_are_refused_and_counted() -> None:
    dest = receiver()
    refused, slipped = strangers(dest, 190)
    assert dest.refused.total == refused
    refused += short_strangers(dest, 40)
    assert dest.refused.total == refused >= 1_000_000
    assert slipped < 1e-4 * refused
    assert dest.refused.schemas == {}, "nobody was named as of another schema"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_strange_datagrams_are_refused_and_counted() -> None:
    dest = receiver()
    refused, slipped = strangers(dest, 2000)
    refused += short_strangers(dest, 200)
    assert dest.refused.total == refused >= 10_000_000
    assert slipped < 1e-4 * refused


def test_right_tags_on_absurd_fields_come_through_without_an_error() -> None:
    """Whoever knows the crew's name can make these; what becomes of them is the machines' business."""
    dest = receiver()
    for index in range(40):
        source = Source(SEED, index)
        table = source.absurd()
        rows, headers = dest.parse(table)
        assert 0 < len(rows) < ROWS, "data, and kinds that have no chunk"
        assert len(dest.probes) <= int((headers_of(table)["kind"] == Kind.PROBE).sum())
        dest.probes.clear()
        runs = dest.runs(rows, headers)
        assert sum(len(run.payload) for run, *_ in runs) <= len(rows)
        read = [dest.parse_short(data) for data in shorts_of(table, "otters")]
        assert any(read)
        assert {short.kind for short in read if short} == set(Kind) - set(LONG_KINDS)
    assert dest.refused.corrupt == dest.refused.foreign == 0


# -- A running crew under fire


class Gun:
    """A socket from which anything can be sent to any peer."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.shots = dict.fromkeys(crew.drivers, 0)

    def fire(self, peer: int, datagrams: list[bytes], spoofed: int | None = None) -> None:
        """Send, and wait until the peer's driver has taken it all in, so that no buffer overflows.

        spoofed: in another peer's name and from its address, as on a path that lets one lie about that.
        """
        sock = self.sock if spoofed is None else self.crew.endpoints[spoofed].sock
        driver, address = self.crew.drivers[peer], self.crew.addresses[peer]
        for at in range(0, len(datagrams), 64):
            batch = [*datagrams[at : at + 64], b"a mark"]  # malformed: when it is counted, all has come
            for data in batch:
                sock.sendto(data, address)
            self.shots[peer] += len(batch)
            self.wait(driver, peer)

    def wait(self, driver: Driver, peer: int) -> None:
        raise NotImplementedError


class CountingGun(Gun):
    """For datagrams that are all refused: the driver's counter says when they have come."""

    def wait(self, driver: Driver, peer: int) -> None:
        until(lambda: driver.traffic().refused >= self.shots[peer] or not driver.alive, "all was refused")


class MarkingGun(Gun):
    """For datagrams of which some are taken: only the marks are counted."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew)
        self.marks = dict.fromkeys(crew.drivers, 0)

    def wait(self, driver: Driver, peer: int) -> None:
        self.marks[peer] += 1
        malformed = driver.engine.framer.refused
        until(lambda: malformed.malformed >= self.marks[peer] or not driver.alive, "all was taken in")


def strange(crew: Crew, dest: int, index: int) -> list[bytes]:
    """About 250 datagrams to a peer that nobody of its crew sends now."""
    sender = (dest + 1) % crew.n
    source = Source(SEED, index, crew.name, sender, dest)
    badger = Source(SEED, index, "badgers", sender, dest)
    rows: list[bytes] = [row.tobytes() for row in (*source.random(40), *badger.valid(20))]
    for make in (source.flipped, source.truncated, source.spliced):
        true, bad = make(40)
        rows += [row.tobytes() for row, is_same in zip(bad, same(true, bad), strict=True) if not is_same]
    for size in source.draws.integers(0, 4000, 40).tolist():
        rows.append(source.noise(size).tobytes() if size % 1152 and size != HEADER_BYTES else b"")
    rows += [source.noise(HEADER_BYTES).tobytes() for _ in range(40)]
    rows += [row.tobytes()[: int(source.draws.integers(1, 1152))] + b"!" for row in source.valid(20)]
    return [rows[i] for i in source.draws.permutation(len(rows))]


def stale(crew: Crew, dest: int, index: int, round_: int) -> list[bytes]:
    """What a former process of a neighbour sent in this very round: all is right but its epoch."""
    sender = (dest + 1) % crew.n
    old = Framer(Identity(crew.name, sender), crew.drivers[sender].engine.framer.epoch - 100)
    old.schemas = {0: 7}
    k = crew.n_chunks // crew.n
    weight, heard = np.full(k, 1e6, np.float32), np.full(k, (1 << crew.n) - 1, np.uint64)
    payload = np.full((k, CHUNK_BYTES), index % 256, np.uint8)
    found: list[bytes] = []
    for stage in (0, 1):
        for block in range(crew.n):
            key = MessageKey(0, round_, stage, block)
            run = Run(dest, key, 0, k, payload, weight, heard, None, True)
            found += [
                row.tobytes() for row in old.data(run, np.arange(k), np.arange(k, dtype=np.uint64), True)
            ]
            found.append(old.short(Kind.END, dest, key=key, total=k))
    return [*found, old.short(Kind.BYE, dest), old.short(Kind.ACK, dest, received=1, highest=1, chunk=1)]


@pytest.mark.parametrize("method", [rps, direct, ring], ids=lambda method: method.name)
def test_a_crew_under_fire_from_outside_averages_as_if_nothing_were(method: Averager) -> None:
    """About 24,000 datagrams in all, before and in each round; each is refused, and each mean is right."""
    with Crew(3, 60, method=method) as crew:
        crew.meet()
        gun = CountingGun(crew)
        for round_ in range(10):
            asked = {}
            for peer in crew.drivers:
                gun.fire(peer, strange(crew, peer, 3 * round_ + peer))
                asked[peer] = crew.ask(peer, values_of(peer, 60, round_))
            for future in asked.values():
                outcome = future.result(PATIENCE_S)
                assert (outcome.heard == 0b111).all()
                assert not outcome.expired
                expected = mean_of(60, range(3), round_)
                np.testing.assert_allclose(outcome.mean, expected, rtol=1e-5, atol=1e-6)
        for peer, driver in crew.drivers.items():
            assert driver.alive
            assert driver.traffic().refused == gun.shots[peer] > 2400
            assert not [note for _, note in crew.notes[peer]]
        assert sum(gun.shots.values()) > 7_500


@pytest.mark.parametrize("method", [rps, direct], ids=lambda method: method.name)
def test_replays_of_a_former_process_change_nothing(method: Averager) -> None:
    with Crew(3, 60, method=method) as crew:
        crew.meet()
        gun = MarkingGun(crew)
        for round_ in range(6):
            for peer in crew.drivers:
                shots = stale(crew, peer, round_, round_) + stale(crew, peer, round_, round_ + 1)
                gun.fire(peer, shots, (peer + 1) % 3)
            for outcome in crew.average(round_=round_).values():
                assert (outcome.heard == 0b111).all()
                assert (outcome.weight == 3.0).all()
                np.testing.assert_allclose(outcome.mean, mean_of(60, range(3), round_), rtol=1e-5, atol=1e-6)
        assert all(driver.node.gone == frozenset() for driver in crew.drivers.values())
        assert not any(crew.notes)


def rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda method: method.name)
def test_a_forger_who_knows_the_crew_crashes_nobody(method: Averager) -> None:
    """Right tags on absurd fields may spoil a round (sealing comes later), but no driver, and no memory."""
    with Crew(3, 60, method=method) as crew:
        crew.meet()
        crew.average()
        gun = MarkingGun(crew)
        before = rss_bytes()
        for index in range(6):
            for peer, driver in crew.drivers.items():
                epoch = crew.drivers[(peer + 1) % 3].engine.framer.epoch
                source = Source(SEED, 10 * index + peer, crew.name, dest=peer, epoch=epoch)
                table = source.absurd(128)
                shots = [row.tobytes() for row in table] + shorts_of(source.absurd(128), crew.name)
                cuts = np.sort(source.draws.integers(0, 128, 30)).tolist()  # several packets to a datagram
                shots += [table[a:b].tobytes() for a, b in pairwise(cuts) if b > a]
                gun.fire(peer, shots, (peer + 1) % 3)
                assert driver.alive
            for outcome in crew.average(round_=index + 1, deadline_s=0.2).values():
                assert outcome.total_s < PATIENCE_S / 2
        for driver in crew.drivers.values():
            assert driver.alive
            node = driver.node
            assert all(len(machine.rounds) <= 8 for machine in node.channels.values())
            assert len(node._meetings._meetings) <= 32
            assert len(driver.engine._timers) < 10_000
            for flow in driver.engine.flows.values():
                assert len(flow.queue) <= 4096
                assert len(flow.inbound.endings) <= 4096
        assert rss_bytes() - before < 200 << 20


def test_a_round_far_ahead_is_not_believed() -> None:
    with Crew(2, 30) as crew:
        crew.meet()
        crew.average()
        forger = Framer(Identity(crew.name, 1), crew.drivers[1].engine.framer.epoch)
        forger.schemas = {0: 7}
        gun = MarkingGun(crew)
        ones, none = np.ones(1, np.float32), np.zeros(1, np.uint64)
        for round_ in ((1 << 32) - 1, 1 << 31, (1 << 24) + 1000):
            run = Run(0, MessageKey(0, round_, 0, 0), 0, 15, np.zeros((1, CHUNK_BYTES), np.uint8), ones, none)
            seq = crew.drivers[1].engine.flows[0].path.sent
            rows = forger.data(run, np.arange(1), np.array([seq], np.uint64))
            gun.fire(0, [rows[0].tobytes(), forger.short(Kind.END, 0, key=run.key, total=15, seq=seq)], 1)
        for round_ in (1, 2):
            for outcome in crew.average(round_=round_).values():
                assert outcome.round == round_
                assert (outcome.heard == 0b11).all()


def test_who_knows_all_but_the_address_changes_nothing() -> None:
    """Good-byes, numbers far ahead, values and rounds in the name of peers, as they would send them."""
    with Crew(3, 60) as crew:
        crew.meet()
        crew.average()
        gun = MarkingGun(crew)
        ones, all_ = np.ones(20, np.float32), np.full(20, 0b111, np.uint64)
        for dest in range(3):
            for sender in {0, 1, 2} - {dest}:
                forger = Framer(Identity(crew.name, sender), crew.drivers[sender].engine.framer.epoch)
                forger.schemas = {0: 7}
                shots = [forger.short(Kind.BYE, dest)] * 12
                shots += [forger.short(Kind.PING, dest, seq=(1 << 30) + i) for i in range(12)]
                for round_, block, stage in ((1, 0, 0), (1, 1, 1), (1000, 0, 0), (1, 61 << 6, 0)):
                    key = MessageKey(0, round_, stage, block)
                    run = Run(dest, key, 0, 20, np.full((20, CHUNK_BYTES), 64, np.uint8), ones, all_)
                    seqs = (
                        np.arange(1, 21, dtype=np.uint64) + crew.drivers[sender].engine.flows[dest].path.sent
                    )
                    shots += [row.tobytes() for row in forger.data(run, np.arange(20), seqs, True)]
                gun.fire(dest, shots)
        for round_ in (1, 2):
            for outcome in crew.average(round_=round_).values():
                assert outcome.round == round_ and not outcome.expired
                assert (outcome.heard == 0b111).all()
                np.testing.assert_allclose(outcome.mean, mean_of(60, range(3), round_), rtol=1e-5, atol=1e-6)
        for peer, driver in crew.drivers.items():
            assert driver.node.n == 3 and driver.node.gone == frozenset()
            assert driver.engine.framer.refused.elsewhere == 2 * (12 + 12 + 4 * 20)
            assert {note.what for _, note in crew.notes[peer]} == {"from elsewhere"}
            assert len(crew.notes[peer]) == 2  # once for each of the others


def test_numbers_far_ahead_are_not_believed_even_from_a_peers_own_address() -> None:
    with Crew(3, 60) as crew:
        crew.meet()
        crew.average()
        gun = MarkingGun(crew)
        for dest in range(3):
            sender = (dest + 1) % 3
            forger = Framer(Identity(crew.name, sender), crew.drivers[sender].engine.framer.epoch)
            gun.fire(dest, [forger.short(Kind.PING, dest, seq=(1 << 30) + i) for i in range(12)], sender)
            assert crew.drivers[dest].engine.framer.refused.leaps == 12
        for outcome in crew.average(round_=1).values():
            assert not outcome.expired and (outcome.heard == 0b111).all()


def test_a_flood_does_not_keep_a_round_from_ending() -> None:
    """What is sent without pause for the whole round: timers still run, and the round ends."""
    with Crew(3, 60, absent=[2], probe_s=0.3, faults=Faults(loss=Loss(0.05))) as crew:
        noise = [data for index in range(4) for data in strange(crew, 0, index)]
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        future = crew.ask(0, values_of(0, 60))
        give_up_s = time.monotonic() + PATIENCE_S
        shots = 0
        while not future.done() and time.monotonic() < give_up_s:
            sock.sendto(noise[shots % len(noise)], crew.addresses[0])
            shots += 1
        sock.close()
        outcome = future.result(0.0)
        assert outcome.expired
        assert shots > 100
        assert crew.drivers[0].alive


# -- What peers tell each other when they meet


def tell_runs(draws: np.random.Generator) -> Iterator[Run]:
    """Pieces of blobs, right and wrong, in any order."""
    for _ in range(400):
        total = int(draws.choice([0, 1, 2, 3, 964, 965, 1 << 31, (1 << 32) - 1]))
        k = int(draws.integers(0, 5))
        key = MessageKey(
            MEET, int(draws.choice([0, 0, 0, 1, 77, (1 << 32) - 1])), int(draws.integers(0, 3)), 0
        )
        first = int(draws.choice([0, 0, 1, 2, 963, (1 << 32) - 1]))
        payload = draws.integers(0, 256, (k, CHUNK_BYTES), dtype=np.uint8)
        mask = draws.random(k) < 0.5 if draws.random() < 0.3 else None
        peer, ended = int(draws.integers(0, 4)), bool(draws.random() < 0.3)
        zeros = np.zeros(k, np.float32), np.zeros(k, np.uint64)
        yield Run(peer, key, first, total, payload, *zeros, mask, ended)


def test_exchanges_take_whatever_is_told() -> None:
    for index in range(20):
        node = Node(0, 3, 1)
        draws = generator(SEED, "tell", index)
        effects = node.step(0.0, Tell(0, b"mine", 9.0))
        for at, run in enumerate(tell_runs(draws)):
            effects += node.step(0.001 * at, Arrived((run,)))
        assert len(node._meetings._meetings) <= 32
        assert sum(isinstance(effect, Met) for effect in effects) <= 1
        held = sum(blob.rows.nbytes for e in node._meetings._meetings.values() for blob in e._blobs.values())
        assert held <= 32 * 3 * 2 << 20


def test_a_blob_comes_back_as_it_was_or_not_at_all() -> None:
    for size in (0, 1, 1083, 1084, 1085, 5000):
        blob = generator(SEED, "blob", size).bytes(size)
        rows = to_rows(blob)
        assert from_rows(rows) == blob
        longer = rows.copy()
        longer[0, :4] = 255
        assert from_rows(longer) is None


HELLO = msgspec.json.encode({"ragtag": "0.1.0", "wire": 1, "size": 3, "seed": 0})


@settings(max_examples=120)
@given(
    st.one_of(
        st.binary(max_size=100),
        st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)).map(
            lambda at: HELLO[: at[0]] + bytes([at[1]]) + HELLO[at[0] + 1 :]
        ),
        st.integers(0, len(HELLO)).map(lambda at: HELLO[:at]),
        st.sampled_from([b"[" * 20_000, b'{"a":' * 20_000, b'{"ragtag":"\xff\xfe"}', b"1e999", b"{}"]),
    )
)
def test_a_hello_is_read_or_refused(blob: bytes) -> None:
    """Any error but this one would end the whole crew at one peer's strange greeting."""
    try:
        hello = read_hello(blob)
    except ValueError:
        return
    assert read_hello(msgspec.json.encode(hello)) == hello


def test_twenty_thousand_damaged_schemas_are_read_or_refused() -> None:
    schema = Schema(
        tuple(TensorSpec(f"layers.{i}.weight", (3, i + 1), "float32") for i in range(4)), "fp32", "rps"
    )
    text = schema.encode()
    draws = generator(SEED, "schemas")
    read = 0
    for _ in range(20_000):
        data = bytearray(text)
        for _ in range(int(draws.integers(1, 4))):
            at, how = int(draws.integers(0, len(data))), int(draws.integers(0, 4))
            if how == 0:
                data[at] = int(draws.integers(0, 256))
            elif how == 1:
                del data[at : at + int(draws.integers(1, 20))]
            elif how == 2:
                data[at:at] = data[: int(draws.integers(1, 20))]
            else:
                data[at:at] = b'[{"-9e"\xff\x00:,'[int(draws.integers(0, 12)) :]
            if not data:
                break
        try:
            other = Schema.decode(bytes(data))
        except ValueError:
            continue
        read += 1
        assert Schema.decode(other.encode()) == other
        assert other == schema or other.difference(schema)
    assert 0 < read < 10_000
