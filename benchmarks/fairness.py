"""How a bottleneck is shared: one Ragtag sender beside one TCP flow, in network namespaces (root only).

    python benchmarks/fairness.py                       # 100 Mbit/s, 20 ms of queue, cubic and BBR
    python benchmarks/fairness.py --mbit 50 --queue-ms 5 --seconds 20

Peers 0 and 1 average a vector again and again (RPS, as live: the product's driver over UDP). Peer 2 sends to
peer 1 by one TCP connection as fast as it may. Both meet in the queue before peer 1's downlink. Printed and
stored: what each had of that link over the time after the first seconds, as shares of their sum; each alone
first, for comparison. Beside TCP it is measured several times, in turns, and the run in the middle counts.
Each run is printed when it is over.
The goal is a share between a third and two thirds beside either kind of TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from lab.lab import Lab, host_of, why_not  # noqa: E402
from stored import how  # noqa: E402

PORT = 4747
TCP_CONGESTION = 13
SETTLE_S = 3.0
"""Seconds that do not count: rate controls find their rates."""
PATIENCE_S = 60.0


def averaging(me: int, asked: argparse.Namespace) -> None:
    """Peer 0 or 1: rounds until the time is up; prints the bytes that came while it counts."""
    import numpy as np

    from ragtag.codecs.dense import fp32
    from ragtag.core.types import Average
    from ragtag.core.wire import Identity, n_chunks
    from ragtag.network.driver.driver import Driver
    from ragtag.network.link.udp import UdpLink
    from ragtag.protocols.node import Channel, Node
    from ragtag.protocols.rounds.rps import rps

    driver = Driver(
        Node(me, 2, seed=0), UdpLink((host_of(me), PORT)), Identity("fairness", me),
        {other: (host_of(other), PORT) for other in range(2)},
    )  # fmt: skip
    driver.start()
    chunks = n_chunks(round(asked.mb * 1e6 / 4), fp32.elements)
    driver.configure(0, Channel(rps, fp32, chunks, probe_s=5.0, rtt_s=0.01, reuse=True), 0).result(5)
    driver.meet(0, b"", PATIENCE_S).result(PATIENCE_S)
    values = np.zeros((chunks, fp32.elements), np.float32)
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    counted: tuple[float, int] | None = None
    rounds = 0
    while (now_s := time.monotonic()) < began_s + SETTLE_S + asked.seconds:
        if counted is None and now_s >= began_s + SETTLE_S:
            counted, rounds = (now_s, driver.traffic().bytes_received), 0
        driver.average(Average(0, values, 1.0)).result(PATIENCE_S)
        rounds += 1
    assert counted is not None
    came = driver.traffic().bytes_received - counted[1]
    lost = sum(way.lost for way in driver.directions()) / max(1, sum(w.sent for w in driver.directions()))
    took_s = time.monotonic() - counted[0]
    print(json.dumps({"bytes_per_s": came / took_s, "rounds": rounds, "lost": lost}), flush=True)
    driver.close(1.0)


def tcp_sender(asked: argparse.Namespace) -> None:
    """Peer 2: one connection to peer 1, full speed."""
    with socket.create_connection((host_of(1), PORT + 1), timeout=PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, asked.tcp.encode())
        print("ready", flush=True)
        sys.stdin.readline()
        until_s, data = time.monotonic() + SETTLE_S + asked.seconds, bytes(1 << 16)
        with contextlib.suppress(ConnectionError):  # the receiver counts, and may close first
            while time.monotonic() < until_s:
                sock.sendall(data)


def tcp_receiver(asked: argparse.Namespace) -> None:
    """Beside peer 1: counts what comes by TCP."""
    with socket.create_server((host_of(1), PORT + 1)) as server:
        server.settimeout(PATIENCE_S)
        print("listening", flush=True)
        sock, _ = server.accept()
        print("ready", flush=True)
        sys.stdin.readline()
        began_s = time.monotonic()
        counted, came, buffer = began_s + SETTLE_S, 0, bytearray(1 << 18)
        while time.monotonic() < counted + asked.seconds and (n := sock.recv_into(buffer)):
            came += n if time.monotonic() >= counted else 0
        print(json.dumps({"bytes_per_s": came / asked.seconds}), flush=True)


ROLES = {
    "average-0": lambda asked: averaging(0, asked),
    "average-1": lambda asked: averaging(1, asked),
    "receive": tcp_receiver,
    "send": tcp_sender,
}
PLACES = {"average-0": 0, "average-1": 1, "receive": 1, "send": 2}


def measure(tcp: str, ours: bool, asked: argparse.Namespace) -> dict[str, Any]:
    """What each has of peer 1's downlink. tcp: its congestion control; empty: there is none."""
    roles = [*(("receive", "send") if tcp else ()), *(("average-0", "average-1") if ours else ())]
    with ExitStack() as undo:
        lab = undo.enter_context(Lab(3, rate_mbit=asked.mbit, queue_ms=asked.queue_ms))
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        started: dict[str, subprocess.Popen[str]] = {}
        for role in roles:
            command = [sys.executable, *sys.argv, "--role", role, "--tcp", tcp or "cubic"]
            pipe = subprocess.PIPE
            process = lab.start(PLACES[role], command, env=env, stdin=pipe, stdout=pipe, text=True)
            undo.callback(process.wait)
            undo.callback(process.kill)
            started[role] = process
            if role == "receive":
                assert process.stdout is not None and process.stdout.readline().strip() == "listening"
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        for process in started.values():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = {
            role: json.loads(process.stdout.readline())
            for role, process in started.items()
            if role != "send" and process.stdout is not None
        }
        counts = lab.counts(1)
    found: dict[str, Any] = {"tcp": tcp, "dropped_at_the_queue": counts.down_dropped}
    if tcp:
        found["tcp_mbit"] = said["receive"]["bytes_per_s"] * 8e-6
    if ours:
        found["ragtag_mbit"] = said["average-1"]["bytes_per_s"] * 8e-6
        found |= {"rounds": said["average-1"]["rounds"], "lost": said["average-0"]["lost"]}
    if tcp and ours:
        found["ragtag_share"] = found["ragtag_mbit"] / (found["ragtag_mbit"] + found["tcp_mbit"])
    print(line(found), flush=True)
    return found


def line(found: dict[str, Any]) -> str:
    """A run in words."""
    rates = {"ragtag": found.get("ragtag_mbit"), found["tcp"]: found.get("tcp_mbit")}
    words = [f"{who} {mbit:6.1f} Mbit/s" for who, mbit in rates.items() if mbit is not None]
    if "ragtag_share" in found:
        words.append(f"ragtag's share {found['ragtag_share']:.2f}")
    return ", ".join(words)


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose share is in the middle, with the shares of all."""
    ordered = sorted(runs, key=lambda row: row["ragtag_share"])
    return ordered[len(ordered) // 2] | {"shares": [row["ragtag_share"] for row in runs]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--queue-ms", type=float, default=20.0)
    parser.add_argument("--mb", type=float, default=8.0, help="of the vector that is averaged")
    parser.add_argument("--seconds", type=float, default=12.0, help="that count")
    parser.add_argument("--runs", type=int, default=3, help="beside each kind of TCP, an odd number")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--tcp", default="cubic", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        ROLES[asked.role](asked)
        return
    if why := why_not():
        sys.exit(f"fairness: {why}")
    made = how()
    rows = [measure(tcp, ours, asked) for tcp, ours in (("", True), ("cubic", False), ("bbr", False))]
    turns = [[measure(tcp, True, asked) for tcp in ("cubic", "bbr")] for _ in range(asked.runs)]
    between = [middle(list(runs)) for runs in zip(*turns, strict=True)]
    print("in the middle (goal: .33 to .67):")
    for row in between:
        print(line(row))
    rows += between
    if asked.out:
        kept = {
            **made, "mbit": asked.mbit, "queue_ms": asked.queue_ms,
            "goal_share": [1 / 3, 2 / 3],
        }  # fmt: skip
        asked.out.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
