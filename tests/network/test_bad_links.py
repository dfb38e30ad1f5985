"""Links that turn bad while peers average, in the lab (benchmarks/lab): they take smaller datagrams than
before, none at all, or lose three of ten. Drivers go on, and average with everybody again.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.lab import Lab
from ragtag.core.wire import DATAGRAM_BYTES
from tests.network.labs import environment, lab_of
from tests.network.test_namespaces import N

pytestmark = pytest.mark.root

CHUNKS = 96
"""About a hundred kilobytes of values."""
WITHIN_S = 30.0
"""How long what is waited for may take: far longer than it does."""
DOWN_S = 2.0
STEP_S = 0.01
"""How long a peer computes between two rounds; one that is alone would else have thousands a second."""
ENOUGH = 5
"""So many rounds with everybody, from each peer, are to go on averaging."""
LOSS_PER_MILLE = 300

PEER = """
import json, os, select, sys, time
import numpy as np
from benchmarks.lab import host_of
from ragtag.codecs.dense import fp32
from ragtag.core.types import Average
from ragtag.core.wire import Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.node import Channel, Node
from tests.network.test_bad_links import CHUNKS, STEP_S, WITHIN_S
from tests.network.test_namespaces import N, PORT

me = int(sys.argv[1])
values = [np.random.default_rng(peer).standard_normal((CHUNKS, 272)).astype(np.float32) for peer in range(N)]
six = os.environ.get("PREFIX6")
hosts = [f"{six}{peer + 1}" if six else host_of(peer) for peer in range(N)]
endpoint = UdpLink((hosts[me], PORT))
addresses = {peer: (hosts[peer], PORT) for peer in range(N)}
driver = Driver(Node(me, N, 1), endpoint, Identity("otters", me), addresses)
driver.start()
driver.configure(0, Channel(direct, fp32, CHUNKS, 1.0, 1e-3), 7).result(WITHIN_S)
assert not driver.meet(0, b"", WITHIN_S).result(WITHIN_S).missing
while not select.select([sys.stdin], [], [], STEP_S)[0]:
    began_s = time.monotonic()
    outcome = driver.average(Average(0, values[me], 1.0)).result(WITHIN_S)
    members = [peer for peer in range(N) if (outcome.heard >> np.uint64(peer) & np.uint64(1)).all()]
    mean = np.mean([values[peer] for peer in members], axis=0)
    print(json.dumps({
        "began_s": began_s, "members": members, "whole": bool(outcome.averaged.all()),
        "off": float(np.abs(outcome.mean - mean).max()), "segmentation": endpoint.segmentation,
        "datagrams": sorted(way.datagram_bytes for way in driver.directions()),
    }), flush=True)
driver.close(1.0)
"""


@dataclass(frozen=True)
class Said:
    """What a peer says of a round. began_s: by the machine's clock; members: who is in all of it; off: how
    far it is from their mean; datagrams: how large they may be on the ways to the others.
    """

    began_s: float
    members: list[int]
    whole: bool
    off: float
    segmentation: bool
    datagrams: list[int]


Rounds = list[list[Said]]


def with_all(rounds: list[Said]) -> list[Said]:
    """The rounds in which everybody is."""
    return [said for said in rounds if said.whole and said.members == list(range(N))]


class Peers:
    """One process for each namespace, which averages round after round until its input is closed."""

    def __init__(self, lab: Lab, folder: Path, undo: ExitStack, **variables: str) -> None:
        script = folder / "peer.py"
        script.write_text(PEER)
        self._heard: queue.Queue[tuple[int, str]] = queue.Queue()
        self._said: Rounds = [[] for _ in range(N)]
        for peer in range(N):
            pipe = subprocess.PIPE
            command = [sys.executable, str(script), str(peer)]
            own = environment() | variables
            process = lab.start(peer, command, env=own, stdin=pipe, stdout=pipe, text=True)
            reader = threading.Thread(target=self._read, args=(peer, process))
            reader.start()
            for action in (reader.join, process.wait, process.kill):
                undo.callback(action)

    def _read(self, peer: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((peer, line))
        self._heard.put((peer, ""))

    def until(self, enough: Callable[[Rounds], bool], since_s: float) -> Rounds:
        """Wait until the rounds that have begun since then are enough; what was said of them, by peer."""
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            rounds = [[said for said in of if said.began_s >= since_s] for of in self._said]
            if enough(rounds):
                return rounds
            late = f"not within {WITHIN_S} s; last: {[of[-3:] for of in rounds]}"
            assert time.monotonic() < deadline_s, late
            try:
                peer, line = self._heard.get(timeout=WITHIN_S)
            except queue.Empty:
                raise AssertionError(late) from None
            assert line, f"peer {peer} has ended"
            self._said[peer].append(Said(**json.loads(line)))

    def go_on(self, since_s: float) -> Rounds:
        """Wait until everybody averages with everybody; what is averaged is right."""
        rounds = self.until(lambda rounds: all(len(with_all(of)) >= ENOUGH for of in rounds), since_s)
        assert max(said.off for of in rounds for said in with_all(of)) < 1e-5
        return rounds

    def send(self, packets: int, since_s: float) -> None:
        """Wait until each peer sends each other one datagrams of so many packets, and averages with all."""
        size = [packets * DATAGRAM_BYTES] * (N - 1)

        def enough(rounds: Rounds) -> bool:
            return all(sum(said.datagrams == size for said in with_all(of)) >= ENOUGH for of in rounds)

        self.until(enough, since_s)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of(N, offloads=True) as lab:
        yield lab


@pytest.fixture
def peers(lab: Lab, tmp_path: Path) -> Iterator[Peers]:
    with ExitStack() as undo:
        peers = Peers(lab, tmp_path, undo)
        peers.go_on(0.0)
        yield peers


def test_they_go_on_where_links_take_small_datagrams_only(lab: Lab, peers: Peers) -> None:
    """Below the size of ours: the system cuts them, and refuses to cut trains."""
    lab.mtu(576)
    peers.go_on(time.monotonic())
    for peer in range(N):
        lines = lab.run(peer, "cat", "/proc/net/snmp").splitlines()
        titles, counts = (line.split() for line in lines if line.startswith("Ip:"))
        assert int(dict(zip(titles, counts, strict=True))["FragCreates"]) > 0


def test_datagrams_are_as_large_as_links_take_and_become_smaller_with_them(tmp_path: Path) -> None:
    """Of frames of 9,000 bytes; then of less, as a peer's own card says, or as nobody says (a black hole)."""
    with lab_of(N) as lab, ExitStack() as undo:
        lab.mtu(9000)
        peers = Peers(lab, tmp_path, undo)
        peers.send(7, 0.0)
        for mtu, packets, silently in ((4000, 3, True), (2400, 2, False), (1500, 1, True), (576, 1, False)):
            lab.mtu(mtu, silently=silently)
            began_s = time.monotonic()
            peers.go_on(began_s)
            peers.send(packets, began_s)


def test_over_ipv6(tmp_path: Path) -> None:
    """1,280 bytes are the least that every path takes: a datagram of one packet has 1,200."""
    with lab_of(N) as lab, ExitStack() as undo:
        lab.mtu(65535)
        for peer in range(N):
            lab.run(peer, "sysctl", "-q", "-w", "net.ipv6.conf.eth0.disable_ipv6=0")
            lab.run(peer, "ip", "-6", "address", "add", f"fd00::{peer + 1}/64", "dev", "eth0", "nodad")
        peers = Peers(lab, tmp_path, undo, PREFIX6="fd00::")
        for mtu, packets in ((65535, 56), (9000, 7), (1280, 1)):
            lab.mtu(mtu)
            began_s = time.monotonic()
            peers.send(packets, began_s)
            peers.go_on(began_s)


def test_they_go_on_after_a_link_was_down(lab: Lab, peers: Peers) -> None:
    """Sends fail meanwhile; the others average without that peer, and with it as soon as it is back."""
    lab.up(0, False)
    down_s = time.monotonic()

    def enough(rounds: Rounds) -> bool:
        alone = [sum(said.members == [1, 2] for said in of) for of in rounds[1:]]
        return min(alone) >= ENOUGH and time.monotonic() > down_s + DOWN_S

    rounds = peers.until(enough, down_s)
    assert not any(with_all(of) for of in rounds)
    lab.up(0)
    peers.go_on(time.monotonic())


def test_they_go_on_where_three_of_ten_are_lost(lab: Lab, peers: Peers) -> None:
    """Averages are complete while that lasts, and after it."""
    share = LOSS_PER_MILLE / 1000
    lab.lose(share)
    peers.go_on(time.monotonic())
    for peer in range(N):
        counts = lab.counts(peer)
        assert abs(counts.lost / counts.seen - share) < 5 * (share * (1 - share) / counts.seen) ** 0.5
    lab.lose(0.0)
    peers.go_on(time.monotonic())
