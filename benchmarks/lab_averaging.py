"""Averaging over links with a rate, a short queue and loss: Ragtag beside gloo's all_reduce over TCP.

    python benchmarks/lab_averaging.py                          # 4 peers, 16 MB, 500 Mbit/s each way; root
    python benchmarks/lab_averaging.py --mbit 100 --mb 4
    python benchmarks/lab_averaging.py -n 2 --mbit 100 --mb 4 --delay-ms 25 --losses 0.01

For each loss a lab (benchmarks/lab) is built, and each way averages in it, round by round. All peers are told
to begin a round by a pipe, which no link delays; the round takes as long as its slowest peer. Ragtag's
methods take turns in the same processes; gloo has its own for each congestion control of TCP. A way that
takes longer than --limit-s ends with the rounds that it did. The first three, or a quarter, do not count.

The line's limit is the time in which one uplink sends what each peer must (both stages, its share to each of
the others), as datagrams with all headers, without loss. A round of 4 peers on 2 cores may be bounded by
those: `busy` is how much of them all processes used, others' too, and `cpu` the milliseconds that a peer
computed in a round. `averaged` is the share of chunks that came as averages, `heard` that of all peers'
chunks in them, `dropped` the frames a round that found no room.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab import Lab, LabError, host_of, why_not
from ragtag.network.control.path import CONTROLLER, CONTROLLERS
from stored import how, keep_run

ROOT = Path(__file__).parents[1]
PORT = 4747
OURS = ("rps", "rps+repair", "allreduce")
GLOO = ("gloo cubic", "gloo bbr")
WARM = 3
"""Rounds that do not count: deadlines and windows are learned, buffers made."""
MEET_S = 60.0
FRAME, PAYLOAD = 1152 + 42, 1088
"""Bytes of a datagram with all headers, and of values in it."""


# -- A peer, in its namespace


def peer(kind: str, me: int, asked: argparse.Namespace) -> None:
    """Average as each line of the input says; prints a line for each."""
    torch.set_num_threads(1)
    if kind == "gloo":
        gloo(me, asked)
    else:
        ours(me, asked)


def ours(me: int, asked: argparse.Namespace) -> None:
    """Ragtag's methods, a channel each."""
    from ragtag.codecs.dense import fp32
    from ragtag.core.types import Average
    from ragtag.core.wire import Identity, n_chunks
    from ragtag.network.control import path as paths
    from ragtag.network.driver.driver import Driver
    from ragtag.network.link.udp import UdpLink
    from ragtag.protocols.node import Channel, Node
    from ragtag.protocols.rounds.allreduce import direct
    from ragtag.protocols.rounds.rps import rps, rps_repair

    paths.CONTROLLER = asked.control
    driver = Driver(
        Node(me, asked.n, seed=0), UdpLink((host_of(me), PORT)), Identity("lab-averaging", me),
        {other: (host_of(other), PORT) for other in range(asked.n)},
    )  # fmt: skip
    driver.start()
    chunks = n_chunks(round(asked.mb * 1e6 / 4), fp32.elements)
    for number, method in enumerate((rps, rps_repair, direct)):
        channel = Channel(method, fp32, chunks, probe_s=5.0, rtt_s=0.01, reuse=True)
        driver.configure(number, channel, number).result(5)
    assert not driver.meet(0, b"", MEET_S).result(MEET_S).missing
    values = np.random.default_rng(me).standard_normal((chunks, fp32.elements)).astype(np.float32)
    print("ready", flush=True)
    for line in sys.stdin:
        began_s, before_s = time.perf_counter(), time.process_time()
        outcome = driver.average(Average(OURS.index(line.strip()), values, 1.0)).result(asked.limit_s)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
        heard = float(np.unpackbits(outcome.heard.view(np.uint8)).sum()) / (asked.n * chunks)
        said = {"s": took_s, "averaged": float(outcome.averaged.mean()), "heard": heard, "cpu_s": cpu_s}
        print(json.dumps(said), flush=True)
    driver.close(1.0)


def gloo(me: int, asked: argparse.Namespace) -> None:
    """torch.distributed's all_reduce."""
    import torch.distributed as dist

    os.environ |= {
        "MASTER_ADDR": host_of(0), "MASTER_PORT": str(PORT + 1), "GLOO_SOCKET_IFNAME": "eth0"
    }  # fmt: skip
    dist.init_process_group("gloo", rank=me, world_size=asked.n, timeout=timedelta(seconds=asked.limit_s))
    tensor = torch.randn(round(asked.mb * 1e6 / 4))
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s, before_s = time.perf_counter(), time.process_time()
        dist.all_reduce(tensor)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
        tensor /= asked.n
        print(json.dumps({"s": took_s, "averaged": 1.0, "heard": 1.0, "cpu_s": cpu_s}), flush=True)


# -- All of them


class Peers:
    """A process in each namespace, which does a round when told to."""

    def __init__(self, kind: str, lab: Lab, asked: argparse.Namespace, undo: ExitStack) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self._said: list[queue.Queue[str]] = [queue.Queue() for _ in lab.names]
        self._processes = []
        for me, lines in enumerate(self._said):
            command = [sys.executable, *sys.argv, "--peer", kind, str(me)]
            pipe = subprocess.PIPE
            process = lab.start(me, command, env=env, stdin=pipe, stdout=pipe, text=True)
            reader = threading.Thread(target=self._read, args=(process, lines))
            reader.start()
            for action in (reader.join, process.wait, process.kill):
                undo.callback(action)
            self._processes.append(process)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    def tell(self, line: str) -> None:
        """Tell all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

    def hear(self, until_s: float) -> list[str] | None:
        """A line of each; None if one is late."""
        said = []
        for me, lines in enumerate(self._said):
            try:
                said.append(lines.get(timeout=max(0.0, until_s - time.monotonic())))
            except queue.Empty:
                return None
            if not said[-1]:
                raise RuntimeError(f"peer {me} has ended")
        return said


def busy_s() -> tuple[float, float]:
    """Seconds that the machine's cores have computed, and that they have been there."""
    text = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    ticks = [int(one) for one in text.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def rounds_of(
    ways: list[str], peers: Peers, lab: Lab, asked: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """What each way's rounds were, ways in turn; a way's end when its time is up, or a round is late."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    spent_s = dict.fromkeys(ways, 0.0)
    for _ in range(WARM + asked.rounds):
        for way in [one for one in ways if spent_s[one] < asked.limit_s]:
            before, (busy, all_) = dropped(lab), busy_s()
            began_s = time.monotonic()
            peers.tell(f"{way}\n")
            said = peers.hear(began_s + asked.limit_s)
            spent_s[way] += time.monotonic() - began_s
            if said is None:
                return found  # they are still at it: nobody can begin another
            each, (busier, more) = [json.loads(line) for line in said], busy_s()
            found[way].append(
                {
                    "s": max(one["s"] for one in each),
                    "averaged": statistics.fmean(one["averaged"] for one in each),
                    "heard": statistics.fmean(one["heard"] for one in each),
                    "cpu_s": statistics.fmean(one["cpu_s"] for one in each),
                    "dropped": dropped(lab) - before,
                    "busy": (busier - busy) / max(1, more - all_),
                }
            )
    return found


def dropped(lab: Lab) -> int:
    """Frames for which queues had no room."""
    counts = [lab.counts(one) for one in range(len(lab.names))]
    return sum(one.up_dropped + one.down_dropped for one in counts)


def measure(loss: float, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way at one loss."""
    rows = []
    line = {"rate_mbit": asked.mbit, "queue_ms": asked.queue_ms, "delay_ms": asked.delay_ms}
    with Lab(asked.n, **line, loss=loss, burst=asked.burst) as lab:
        for kind, ways in (("ours", list(OURS)), *(("gloo", [way]) for way in GLOO)):
            ways = [way for way in ways if way in asked.ways]
            if not ways:
                continue
            if kind == "gloo":
                try:
                    lab.congestion(ways[0].split()[1])
                except LabError as error:
                    rows.append(shown({"loss": loss, "way": ways[0], "rounds": 0, "why": str(error)}))
                    continue
            with ExitStack() as undo:
                peers = Peers(kind, lab, asked, undo)
                if peers.hear(time.monotonic() + 2 * MEET_S) is None:
                    raise RuntimeError(f"peers did not meet at a loss of {loss}")
                found = rounds_of(ways, peers, lab, asked)
            rows += [shown({"loss": loss, "way": way, **summary(found[way], asked)}) for way in ways]
    return rows


def summary(rounds: list[dict[str, Any]], asked: argparse.Namespace) -> dict[str, Any]:
    """Figures of a way's rounds."""
    if not rounds:
        return {"rounds": 0, "why": f"no round within {asked.limit_s:g} s"}
    rounds = rounds[min(WARM, len(rounds) // 4) :]
    took_s = [one["s"] for one in rounds]
    means = {
        key: statistics.fmean(one[key] for one in rounds) for key in ("averaged", "heard", "busy", "cpu_s")
    }
    return {
        "rounds": len(rounds), "median_s": statistics.median(took_s), "longest_s": max(took_s), **means,
        "p99_s": sorted(took_s)[int(0.99 * len(took_s))],
        "dropped": statistics.fmean(one["dropped"] for one in rounds), "s": took_s,
    }  # fmt: skip


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row of the table."""
    head = f"{row['loss']:>6.1%}  {row['way']:<12}"
    if not row["rounds"]:
        print(f"{head} not available: {row['why']}", flush=True)
        return row
    print(f"{head}{row['median_s'] * 1e3:>9.0f}{row['longest_s'] * 1e3:>9.0f}{row['rounds']:>8}"
          f"{row['averaged']:>10.2%}{row['heard']:>9.2%}{row['dropped']:>9.0f}{row['busy']:>7.0%}"
          f"{row['cpu_s'] * 1e3:>7.0f}", flush=True)  # fmt: skip
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=4, help="peers")
    parser.add_argument("--mb", type=float, default=16.0, help="of float32")
    parser.add_argument("--mbit", type=float, default=500.0, help="per second, each way")
    parser.add_argument("--queue-ms", type=float, default=20.0)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--losses", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.05, 0.1])
    parser.add_argument("--burst", type=float, help="so many lost in a row, on average")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ways", nargs="+", default=[*OURS, *GLOO], choices=[*OURS, *GLOO])
    parser.add_argument(
        "--control", default=CONTROLLER, choices=sorted(CONTROLLERS), help="of Ragtag's paths"
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each way at each loss")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "lab_averaging.json",
                        help="a file of runs, each by a command of its own")  # fmt: skip
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        return peer(asked.peer[0], int(asked.peer[1]), asked)
    reason = why_not()
    if reason:
        sys.exit(reason)
    limit_s = 2 * (asked.n - 1) / asked.n * asked.mb * 8 / asked.mbit * FRAME / PAYLOAD
    load = os.getloadavg()
    print(f"{asked.n} peers average {asked.mb:g} MB, {asked.mbit:g} Mbit/s each way, queues "
          f"of {asked.queue_ms:g} ms; the line's limit is {limit_s * 1e3:.0f} ms; load {load[0]:.1f}",
          flush=True)  # fmt: skip
    print(f"{'loss':>6}  {'way':<12}{'median':>9}{'longest':>9}{'rounds':>8}{'averaged':>10}{'heard':>9}"
          f"{'dropped':>9}{'busy':>7}{'cpu':>7}")  # fmt: skip
    rows: list[dict[str, Any]] = []
    run = {
        **how(),
        "setting": {key: value for key, value in vars(asked).items() if key not in ("out", "peer")},
        "limit_s": limit_s, "rows": rows,
    }  # fmt: skip
    for loss in asked.losses:
        rows += measure(loss, asked)
        run["load"] = {"before": load, "after": os.getloadavg()}
        keep_run(asked.out, run)
    return None


if __name__ == "__main__":
    main()
