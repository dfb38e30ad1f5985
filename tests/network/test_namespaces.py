"""Real loss: three peers of the lab (benchmarks/lab), where the kernel drops one datagram in twenty.

Offloads are off, as on a cheap network card, so the sending side may have to do without segmentation.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lab import Lab
from tests.network.labs import environment, lab_of

pytestmark = pytest.mark.root

N = 3
PORT = 4747
LOSS_PER_MILLE = 50
PATIENCE_S = 50.0
ANSWER_S = 20.0
"""How long a round, or a meeting, may take: far longer than it does."""
CHUNKS = 960
"""About a megabyte of values."""
PEER = """
import json, sys
import numpy as np
from benchmarks.lab import host_of
from ragtag.codecs.dense import fp32
from ragtag.core.types import Average
from ragtag.core.wire import Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.rps import rps
from tests.network.test_namespaces import ANSWER_S, CHUNKS, N, PORT, ROUNDS, values_of

me, folder = int(sys.argv[1]), sys.argv[2]
endpoint = UdpLink((host_of(me), PORT))
addresses = {peer: (host_of(peer), PORT) for peer in range(N)}
driver = Driver(Node(me, N, 1), endpoint, Identity("otters", me), addresses)
driver.start()
for number, (method, _) in enumerate(ROUNDS):
    channel = Channel({"rps": rps, "direct": direct}[method], fp32, CHUNKS, 5.0, 1e-3, 5.0)
    driver.configure(number, channel, 7).result(ANSWER_S)
found = []
for number, (method, rounds) in enumerate(ROUNDS):
    met = driver.meet(number, b"", ANSWER_S).result(ANSWER_S)
    assert not met.missing, met
    for at in range(rounds):
        outcome = driver.average(Average(number, values_of(me, at), me + 1.0)).result(ANSWER_S)
        arrays = {name: getattr(outcome, name) for name in ("mean", "heard", "weight", "averaged")}
        np.savez(f"{folder}/{method}-{at}-{me}.npz", **arrays)
        found.append({"expired": outcome.expired, "total_s": outcome.total_s, "missed": outcome.missed})
driver.meet(len(ROUNDS), b"", ANSWER_S).result(ANSWER_S)  # nobody leaves while another needs it
lost = driver.traffic().datagrams_lost
driver.close(1.0)
print(json.dumps({"rounds": found, "lost": lost, "segmentation": endpoint.segmentation}))
"""
ROUNDS = (("rps", 6), ("direct", 3))
"""What is averaged: by which method, and how often."""


def values_of(peer: int, round_: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a peer averages in a round: its own numbers."""
    rng = np.random.default_rng([peer, round_])
    return rng.standard_normal((CHUNKS, 272)).astype(np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Namespaces that reach each other over a bridge, with loss on what comes in."""
    with lab_of(N, loss=LOSS_PER_MILLE / 1000) as lab:
        yield lab


@pytest.fixture(scope="module")
def reports(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where the outcomes lie, and what each peer said of its rounds."""
    folder = tmp_path_factory.mktemp("namespaces")
    script = folder / "peer.py"
    script.write_text(PEER)
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    peers = [
        lab.start(peer, [sys.executable, str(script), str(peer), str(folder)], env=environment(), **pipe)
        for peer in range(N)
    ]
    ended = [process.communicate(timeout=PATIENCE_S) for process in peers]
    failed = [peer for peer, process in enumerate(peers) if process.returncode]
    assert not failed, "".join(f"peer {peer}: {error}" for peer, (_, error) in enumerate(ended))
    return folder, [json.loads(out) for out, _ in ended]


def outcomes(folder: Path, method: str, round_: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [dict(np.load(folder / f"{method}-{round_}-{peer}.npz")) for peer in range(N)]


def members(heard: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bool ``[n_chunks, N]``: who is in each chunk."""
    return (heard[:, None] >> np.arange(N, dtype=np.uint64) & np.uint64(1)).astype(bool)


def test_the_kernel_loses_what_it_was_asked_to(lab: Lab, reports: tuple[Path, list[dict[str, Any]]]) -> None:
    for peer in range(N):
        counts = lab.counts(peer)
        seen, lost = counts.seen, counts.lost
        assert seen > 9 * 2 * CHUNKS * (N - 1) / N  # two stages of nine rounds
        share = LOSS_PER_MILLE / 1000
        assert abs(lost / seen - share) < 5 * (share * (1 - share) / seen) ** 0.5


def test_rps_under_real_loss_averages_exactly_what_it_heard(
    reports: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, said = reports
    arrived, averaged, total = 0, 0, 0
    for round_ in range(dict(ROUNDS)["rps"]):
        own = np.stack([values_of(peer, round_) for peer in range(N)]).astype(np.float64)
        for peer, outcome in enumerate(outcomes(folder, "rps", round_)):
            who = members(outcome["heard"])
            weights = who * np.arange(1.0, N + 1)  # a peer's weight is its number and one
            expected = np.einsum("cp,pcv->cv", weights, own) / weights.sum(1, keepdims=True)
            np.testing.assert_allclose(outcome["mean"], expected, rtol=1e-5, atol=1e-5)
            got = outcome["averaged"]
            np.testing.assert_allclose(outcome["weight"][got], weights.sum(1)[got])
            assert (outcome["mean"][~got] == own[peer].astype(np.float32)[~got]).all()
            arrived, averaged, total = arrived + who[got].sum(), averaged + got.sum(), total + len(got)
    # one's own block has no loss: 1 in N of the averages comes surely, the others with 95 %
    share = LOSS_PER_MILLE / 1000
    assert averaged / total == pytest.approx(1 - share * (N - 1) / N, abs=0.015)
    # in a chunk: its owner's values surely, and those of the others with 95 %
    assert arrived / (averaged * N) == pytest.approx(1 - share * (N - 1) / N, abs=0.015)
    rounds = [entry for report in said for entry in report["rounds"][: dict(ROUNDS)["rps"]]]
    assert sum(entry["expired"] for entry in rounds) <= len(rounds) // 4, rounds
    assert all(report["lost"] > 0 for report in said)


def test_every_peer_that_hears_a_chunk_holds_the_same_bits(
    reports: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, _ = reports
    for method, rounds in ROUNDS:
        for round_ in range(rounds):
            found = outcomes(folder, method, round_)
            for one, other in ((0, 1), (0, 2), (1, 2)):
                both = found[one]["averaged"] & found[other]["averaged"]
                assert both.sum() > CHUNKS / 2
                assert (found[one]["mean"][both] == found[other]["mean"][both]).all()


def test_all_reduce_under_real_loss_ends_complete(reports: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, said = reports
    for round_ in range(dict(ROUNDS)["direct"]):
        weights = np.arange(1.0, N + 1)
        own = np.stack([values_of(peer, round_) for peer in range(N)]).astype(np.float64)
        expected = np.einsum("p,pcv->cv", weights, own) / weights.sum()
        for outcome in outcomes(folder, "direct", round_):
            assert outcome["averaged"].all()
            assert (outcome["heard"] == (1 << N) - 1).all()
            np.testing.assert_allclose(outcome["mean"], expected, rtol=1e-5, atol=1e-5)
    rounds = [entry for report in said for entry in report["rounds"][dict(ROUNDS)["rps"] :]]
    assert [entry["missed"] for entry in rounds] == [[]] * len(rounds)
