"""Secure aggregation beside plain averages: processor time, time over lines, bytes, what owners see.

    OMP_NUM_THREADS=1 python benchmarks/secagg.py

16 peers, 1M values, of which any 4 may drop out, and do, at each stage in turn; each sum must be exact.

Processor time is of one thread: a plain aggregator adds 16 arrived float32 vectors up and divides, and its
clients do nothing; runs take turns, and the table has medians. A client's time is with the block that it
adds up and unmasks. Time over lines is virtual: of a calm round, and of rounds in which four peers die
without a word just before they would send a stage's message. The others wait for these as long as their own
deadlines say, which have seen four rounds that took as long as the calm one. Beside it stand a calm average
through one peer that adds up, by named tensors that are asked for (``crew.tensors``), and one by RPS, which
is what a crew does otherwise and has no such peer. The processor time of a client and of the aggregator is
added. Chi-square is Pearson's,
of the bytes and of the 16-bit halves of what owners get of each client, as deviations from its mean; of
vectors of zeros, whose own statistic is beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cryptography
import numpy as np
import torch

from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.faults import Crash, Faults
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.seed import generator
from ragtag.core.types import Arm, Floats, Left, Start
from ragtag.core.wire import n_chunks
from ragtag.privacy.secagg import SecureAverage
from ragtag.protocols.rounds.rps import RPS
from ragtag.protocols.secagg import (
    Download,
    Owns,
    Part,
    SecureAggregator,
    SecureClient,
    SecureSetting,
    SecureStage,
    SecureWaits,
    Summed,
    Unmasked,
    Unsummed,
    Upload,
    ring_for,
)
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.named import NamedTensors
from stored import how

RESULTS = Path(__file__).parent / "results" / "secagg.json"
N, VALUES, DROPS, CLIP, DEADLINE_S = 16, 1_000_000, 4, 1.0, 60.0
TIME_GOAL, DEVIATIONS_GOAL = 3.0, 4.0
LATENCY_S = 0.005
ROUNDS = 4
"""From which a peer has learned how long to wait."""
GONE = (3, 7, 8, 12)
SENT = {"KEYS": 0, "SHARES": 1, "MASKED": 2, "UNMASK": 4}
"""Which message of an owner is each stage's: the third are its parts, the fourth is the sum of its block."""
RATES = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}


@dataclass
class Round:
    """A round in one process. Times are of the processor. masked: what owners got of each client."""

    end: Summed | Unsummed
    client_s: list[float]
    aggregator_s: float
    up_bytes: int
    down_bytes: int
    masked: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)


class _Round:
    """Clients 0..n - 1 and the aggregator, n, in one process; messages come at once.

    gone: clients that send nothing from ``stage`` on, of which the others know at once.
    """

    def __init__(
        self, setting: SecureSetting, vectors: list[Floats], number: int, gone: tuple[int, ...], stage: int
    ) -> None:
        self.setting, self.gone, self.stage = setting, gone, stage
        self.spent = [0.0] * (setting.n + 1)
        self.machines: list[Any] = []
        for peer, vector in enumerate(vectors):
            begin_s = time.process_time()
            random = generator(0, "secure aggregation, keys", number, peer).bytes
            self.machines.append(SecureClient(setting, peer, vector, random, SecureWaits(DEADLINE_S)))
            self.spent[peer] += time.process_time() - begin_s
        self.machines.append(SecureAggregator(setting, SecureWaits(DEADLINE_S)))
        self.queue: deque[tuple[int, Any]] = deque((who, Start()) for who in range(setting.n + 1))
        self.parts: dict[int, list[Part]] = {block: [] for block in range(setting.blocks)}
        self.taken: dict[int, set[int]] = {block: set() for block in range(setting.blocks)}
        self.found = Round(Unsummed(None), [], 0.0, 0, 0)  # type: ignore[arg-type]
        self.told = False
        self.over = False

    def run(self) -> Round:
        while self.queue or not self.over:
            if not self.queue:
                assert not self.told, "nothing happens any more"
                self.told = True
                events = [(who, Left(peer)) for peer in self.gone for who in range(self.setting.n + 1)]
                self.queue += [event for event in events if event[0] not in self.gone]
            who, event = self.queue.popleft()
            stage = SecureStage.OVER if who == self.setting.n else self.machines[who].stage
            begin_s = time.process_time()
            effects = self.machines[who].step(0.0, event)
            self.spent[who] += time.process_time() - begin_s
            if who < self.setting.n:
                stage = max(stage, self.machines[who].stage)
            if who not in self.gone or stage < self.stage:
                for effect in effects:
                    self.carry(who, effect)
        self.found.client_s, self.found.aggregator_s = self.spent[:-1], self.spent[-1]
        return self.found

    def carry(self, who: int, effect: Any) -> None:
        found, n = self.found, self.setting.n
        if isinstance(effect, Upload):
            found.up_bytes += len(effect.body)
            self.queue.append((n, effect))
        elif isinstance(effect, Part):
            found.up_bytes += len(effect.body)
            found.masked.setdefault(effect.client, []).append(np.frombuffer(effect.body, np.uint32).copy())
            self.parts[effect.block].append(effect)
            self.queue += [(peer, effect) for peer in self.taken[effect.block]]
        elif isinstance(effect, Owns):
            self.taken[effect.block].add(who)
            self.queue += [(who, part) for part in self.parts[effect.block]]
        elif isinstance(effect, Download):
            found.down_bytes += len(effect.body)
            self.queue.append((effect.client, effect))
        elif isinstance(effect, Unmasked):
            found.down_bytes += n * len(effect.body)
            self.queue += [(peer, effect) for peer in range(n + 1)]
        elif not isinstance(effect, Arm) and who == n:
            found.end, self.over = effect, True


def secure_round(
    setting: SecureSetting, vectors: list[Floats], number: int, gone: tuple[int, ...] = (), stage: int = 9
) -> Round:
    """``gone`` send nothing from ``stage`` on. Keys are drawn from the round's own stream."""
    return _Round(setting, vectors, number, gone, stage).run()


def plain_round(vectors: list[Floats]) -> float:
    """Processor seconds of adding up and dividing, in place."""
    begin_s = time.process_time()
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    total /= np.float32(len(vectors))
    return time.process_time() - begin_s


def exact(setting: SecureSetting, vectors: list[Floats], end: Summed | Unsummed) -> bool:
    if not isinstance(end, Summed):
        return False
    total = np.zeros(setting.length, np.int64)
    for peer in end.clients:
        total += setting.joined(setting.quantised(vectors[peer])[0]).view(np.int32)
    return bool(np.array_equal(end.total.view(np.int32), total))


def deviations(words: np.ndarray[Any, Any], bits: int) -> float:
    """Pearson's chi-square of equally likely classes, in standard deviations from its mean."""
    parts = words.view(np.uint8 if bits == 8 else np.uint16)
    counts = np.bincount(parts, minlength=1 << bits)
    expected, df = len(parts) / (1 << bits), (1 << bits) - 1
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    return (chi2 - df) / math.sqrt(2 * df)


# -- Over lines


@dataclass
class Lined:
    """A round over lines, in virtual time.

    virtual_s: from the first peer's begin until the last that lives has the mean.
    lines_bytes: what lines carried. sent_s: when each of ``GONE`` sent its messages in it.
    waits: of each peer, after it.
    """

    virtual_s: float
    lines_bytes: float
    sent_s: dict[int, list[float]]
    waits: dict[int, SecureWaits] = field(default_factory=dict)


def over_lines(
    rate: float, kind: str, vectors: list[Floats], crash_s: float | None = None, calm: Lined | None = None
) -> Lined:
    """crash_s: when four peers die. calm: a round that taught peers how long they wait."""
    crashes = () if crash_s is None else tuple(Crash(peer, crash_s) for peer in GONE)
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=rate, crashes=crashes)
    crew = SimulatedCrew(N, faults, seed=0)
    sent_s: dict[int, list[float]] = {peer: [] for peer in range(N)}
    waits: dict[int, SecureWaits] = {}
    begins: list[float] = []
    ends: list[float] = []
    carried: list[int] = []

    def lines() -> int:
        return sum(crew.world.traffic(peer).bytes_sent for peer in range(N))

    def begin(peer: SimulatedTransport) -> None:
        peer.pause(1.0)  # all have opened the channel
        begins.append(peer.now_s())
        carried.append(lines())

    def secure(peer: SimulatedTransport) -> None:
        made = SecureAverage(
            peer, {"x": (VALUES,)}, clip=CLIP, dropouts=DROPS, deadline_s=DEADLINE_S,
            random=generator(0, "secure aggregation, keys", 99, peer.me).bytes,
            on_publish=lambda: sent_s[peer.me].append(peer.now_s()),
        )  # fmt: skip
        if calm is not None:
            made._waits = copy.deepcopy(calm.waits[peer.me])
        waits[peer.me] = made._waits
        begin(peer)
        mean = made.average({"x": torch.from_numpy(vectors[peer.me])})
        if crash_s is None:
            assert mean.clients == tuple(range(N))
        total = np.zeros(VALUES, np.int64)
        if peer.me == 1:
            for client in mean.clients:
                words = made.setting.quantised(vectors[client])[0]
                total += made.setting.joined(words).view(np.int32)
            exact_mean = made.setting.values(total.astype(np.int32).view(np.uint32))
            exact_mean /= np.float32(len(mean.clients))
            assert np.array_equal(mean["x"].numpy(), exact_mean), "the sum is not exact"
        ends.append(peer.now_s())

    def plain(peer: SimulatedTransport) -> None:
        names = [f"up/{i}" for i in range(1, N)]
        made = NamedTensors(peer, "plain", computed=dict.fromkeys([*names, "mean"], (VALUES,)))
        made.only(names if peer.me == 0 else ["mean"])
        begin(peer)
        look_s = 1e-3
        if peer.me == 0:
            while not all(made.newest(name) for name in names):
                peer.pause(look_s)
            total = torch.from_numpy(vectors[0].copy())
            for name in names:
                found = made.newest(name)
                assert found is not None
                total += found.tensor
            made.publish({"mean": total / N})
        else:
            made.publish({f"up/{peer.me}": torch.from_numpy(vectors[peer.me])})
            while made.newest("mean") is None:
                peer.pause(look_s)
        ends.append(peer.now_s())
        while len(ends) < N:
            peer.pause(LATENCY_S)

    def rps(peer: SimulatedTransport) -> None:
        channel = channel_of("rps")
        schema = Schema((TensorSpec("x", (VALUES,), "float32"),), fp32.name, "rps", "rps")
        peer.configure(channel, schema, RPS(), fp32)
        table = np.zeros((n_chunks(VALUES, fp32.elements), fp32.elements), np.float32)
        table.reshape(-1)[:VALUES] = vectors[peer.me]
        begin(peer)
        outcome = peer.start(channel, table, 1.0).wait()
        assert outcome.averaged.all()
        ends.append(peer.now_s())
        while len(ends) < N:
            peer.pause(LATENCY_S)

    crew.run({"secure": secure, "plain": plain, "rps": rps}[kind])
    assert len(ends) == N - len(crashes)
    for one in waits.values() if calm is None else ():
        for name, deadline in one._deadlines.items():
            took_s = deadline.typical_s()
            for _ in range(ROUNDS - 1):
                one.whole(name, took_s)
    return Lined(max(ends) - min(begins), float(lines() - min(carried)), sent_s, waits)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each kind for processor times")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    degree, threshold = ring_for(N, DROPS)
    setting = SecureSetting(N, VALUES, CLIP, degree, threshold, N - DROPS, blocks=N)
    vectors = [
        generator(0, "vector", peer).uniform(-CLIP, CLIP, VALUES).astype(np.float32) for peer in range(N)
    ]
    cases: dict[str, tuple[tuple[int, ...], int]] = {"none": ((), 9)}
    cases |= {stage.name: (GONE, int(stage)) for stage in list(SecureStage)[:4]}
    plain: list[float] = []
    rows: dict[str, dict[str, Any]] = {}
    bytes_counted: dict[str, int] = {}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for number in range(arguments.repeats):
        for name, (gone, stage) in cases.items():
            found = secure_round(setting, vectors, number, gone, stage)
            plain.append(plain_round(vectors))
            times[name].append((statistics.median(found.client_s), found.aggregator_s, sum(found.client_s)))
            row = rows.setdefault(name, {"exact": True})
            row["exact"] = bool(row["exact"] and exact(setting, vectors, found.end))
            row["in_the_sum"] = len(found.end.clients) if isinstance(found.end, Summed) else 0
            if name == "none":
                bytes_counted = {"up": found.up_bytes, "down": found.down_bytes}
    plain_s = statistics.median(plain)
    for name, row in rows.items():
        client_s, aggregator_s, clients_s = (
            statistics.median(run[at] for run in times[name]) for at in range(3)
        )
        row |= {
            "client_s": client_s,
            "aggregator_s": aggregator_s,
            "aggregator_over_plain": aggregator_s / plain_s,
            "all_over_plain": (clients_s + aggregator_s) / plain_s,
        }
    short = secure_round(setting, vectors, 99, (*GONE, 15), SecureStage.MASKED)
    below = str(short.end.error) if isinstance(short.end, Unsummed) else "a sum"
    zeros = [np.zeros(VALUES, np.float32)] * N
    seen = secure_round(setting, zeros, 77).masked
    chi2 = {
        f"{bits} bits": {
            "masked": [deviations(np.concatenate(seen[peer]), bits) for peer in range(N)],
            "unmasked": deviations(setting.quantised(zeros[0])[0], bits),
        }
        for bits in (8, 16)
    }
    worst = max(abs(z) for one in chi2.values() for z in one["masked"])  # type: ignore[attr-defined]
    formula = {"up": setting.upload_bytes(), "down": setting.download_bytes()}
    lines: dict[str, Any] = {}
    for name, rate in RATES.items():
        plain_line, rps = (over_lines(rate, kind, vectors) for kind in ("plain", "rps"))
        calm = over_lines(rate, "secure", vectors)

        lines[name] = {
            "plain": {"virtual_s": plain_line.virtual_s, "lines_bytes": plain_line.lines_bytes},
            "rps": {"virtual_s": rps.virtual_s, "lines_bytes": rps.lines_bytes},
            "secure": {},
        }
        times_of = {"none": None} | {
            drop: min(calm.sent_s[peer][message] for peer in GONE) - 1e-4 for drop, message in SENT.items()
        }
        for drop, crash_s in times_of.items():
            ran = calm if crash_s is None else over_lines(rate, "secure", vectors, crash_s, calm)
            took_s = ran.virtual_s + rows[drop]["client_s"] + rows[drop]["aggregator_s"]
            lines[name]["secure"][drop] = {
                "virtual_s": ran.virtual_s,
                "lines_bytes": ran.lines_bytes,
                "with_processor_over_plain": took_s / (plain_line.virtual_s + plain_s),
                "with_processor_over_rps": took_s / (rps.virtual_s + plain_s / N),
            }
    record = {
        **made,
        "cryptography": cryptography.__version__,
        "peers": N,
        "values": VALUES,
        "neighbours": degree,
        "threshold": threshold,
        "error_of_a_sum_at_most": setting.error,
        "repeats": arguments.repeats,
        "plain_s": plain_s,
        "four_of_16_drop_at": rows,
        "five_drop": below,
        "lines": lines,
        "bytes_counted": bytes_counted,
        "bytes_by_formula": formula,
        "plain_bytes_each_way": 4 * N * VALUES,
        "chi2_deviations": chi2,
        "goals": {"time_over_plain": TIME_GOAL, "chi2_deviations": DEVIATIONS_GOAL},
    }

    def goal(value: float, most: float) -> str:
        return f"(goal {most:g}{'' if value <= most else ', missed'})"

    print(f"  {N} peers, {VALUES:,} values, {degree} neighbours, {threshold} of their shares")
    print(f"  plain: an aggregator's processor time {plain_s * 1e3:.1f} ms")
    for name, row in rows.items():
        print(
            f"  4 drop at {name:7s} {'exact' if row['exact'] else 'NOT EXACT'}, {row['in_the_sum']:2d} in; "
            f"a client {row['client_s'] * 1e3:5.1f} ms, the aggregator {row['aggregator_s'] * 1e3:6.1f} ms: "
            f"{row['aggregator_over_plain']:.1f} times {goal(row['aggregator_over_plain'], TIME_GOAL)}, "
            f"all together {row['all_over_plain']:.0f} times"
        )
    print(f"  5 drop: {below}")
    for name, ran in lines.items():
        for drop, row in ran["secure"].items():
            over, rps_over = row["with_processor_over_plain"], row["with_processor_over_rps"]
            print(
                f"  lines of {name}, 4 drop at {drop:7s}{row['virtual_s']:6.2f} s; plain through one peer "
                f"{ran['plain']['virtual_s']:.2f} s, RPS {ran['rps']['virtual_s']:.2f} s; with processor "
                f"time {over:.2f} times plain {goal(over, TIME_GOAL)}, {rps_over:.1f} times RPS "
                f"{goal(rps_over, TIME_GOAL)}"
            )
    print(f"  bytes counted {bytes_counted}, by formula {formula}")
    print(f"  chi-square: at most {worst:.2f} deviations {goal(worst, DEVIATIONS_GOAL)}")
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0 if all(row["exact"] for row in rows.values()) and bytes_counted == formula else 1


if __name__ == "__main__":
    sys.exit(main())
