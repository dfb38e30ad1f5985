"""Run a command in each namespace of a lab, all at once, and print what became of it. Linux, and root, only.

    python -m benchmarks.lab --peers 4 --rate 500 --queue-ms 20 --loss 0.01 -- python train.py
    python -m benchmarks.lab --rate 100 --delay-ms 20 --loss 0.01 --burst 5       # measures the lab itself

The command finds its crew by RAGTAG_RANK, RAGTAG_SIZE, RAGTAG_CREW and RAGTAG_PEERS (addresses of all, with
port 4747), as ``ragtag.join()`` reads them. Each line that it prints has its rank in front. The status is 0
if that of all commands is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from typing import IO

from . import Lab, LabError, probe

PROBED_S = 2.0
UNLIMITED_MBIT = 50.0
"""Offered where there is no rate."""


def show(rank: int, lines: IO[str]) -> None:
    """Print what a command prints, with its rank."""
    for line in lines:
        print(f"[{rank}] {line}", end="", flush=True)


def commands(lab: Lab, command: list[str], limit_s: float) -> bool:
    """Run them, and print the table; whether all went well."""
    began_s, readers, processes = time.monotonic(), [], []
    for rank in range(len(lab.names)):
        process = lab.start(
            rank, command, env={**os.environ, **lab.environment(rank)}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        processes.append(process)
        readers.append(threading.Thread(target=show, args=(rank, process.stdout)))
        readers[-1].start()
    took_s: dict[int, float] = {}
    while len(took_s) < len(processes) and time.monotonic() < began_s + limit_s:
        for rank, process in enumerate(processes):
            if rank not in took_s and process.poll() is not None:
                took_s[rank] = time.monotonic() - began_s
        time.sleep(0.01)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.kill()
    for reader in readers:
        reader.join(timeout=5)
    print(f"{'rank':>4} {'address':<13} {'status':>6} {'s':>8} {'MB up':>8} {'MB down':>8} "
          f"{'packets in':>11} {'lost':>7} {'up full':>8} {'down full':>9}")  # fmt: skip
    for rank, process in enumerate(processes):
        counts, status = lab.counts(rank), "late" if process in late else process.wait()
        print(f"{rank:>4} {lab.hosts[rank]:<13} {status:>6} {took_s.get(rank, limit_s):>8.2f} "
              f"{counts.up / 1e6:>8.1f} {counts.down / 1e6:>8.1f} {counts.seen:>11} "
              f"{counts.lost / max(1, counts.seen):>7.2%} {counts.up_dropped:>8} "
              f"{counts.down_dropped:>9}")  # fmt: skip
    return not late and all(process.returncode == 0 for process in processes)


def measured(lab: Lab) -> bool:
    """Print what probes find: one sender below the rate, one above it, all others at once to peer 0."""
    mbit = lab.rate_mbit or UNLIMITED_MBIT
    others = list(range(1, len(lab.names)))
    print(f"{'probe':<28} {'Mbit/s':>8} {'lost':>7} {'in a row':>8} {'ms':>7} {'longest':>8}")
    for name, senders, share in (
        ("1 to 0, at half the rate", [1], 0.5),
        ("1 to 0, at 1.5 times it", [1], 1.5),
        ("all to 0, at the rate each", others, 1.0),
    ):
        count = max(200, round(PROBED_S * share * mbit * 1e6 / 8 / 1242))
        found = probe(lab, senders, 0, offered_mbit=share * mbit, count=count)
        for sender, one in zip(senders, found, strict=True):
            print(f"{name if sender == 1 else '':<28} {one.rate_mbit:>8.2f} {one.loss:>7.2%} "
                  f"{one.burst:>8.2f} {one.delay_ms:>7.2f} {one.longest_ms:>8.2f}")  # fmt: skip
    return True


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rate", type=float, help="Mbit/s, each way; else as fast as the machine")
    parser.add_argument("--queue-ms", type=float, default=20.0)
    parser.add_argument("--queue-bytes", type=int, help="in place of --queue-ms")
    parser.add_argument("--loss", type=float, default=0.0, help="a share")
    parser.add_argument("--burst", type=float, help="so many lost in a row, on average")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="a uniform draw on top of the delay")
    parser.add_argument("--offloads", action="store_true", help="network cards segment and join")
    parser.add_argument("--limit-s", type=float, default=600.0, help="then all is killed")
    parser.add_argument("command", nargs="*", help="after --; without one, the lab is measured")
    asked = parser.parse_args()
    try:
        lab = Lab(
            asked.peers, rate_mbit=asked.rate, queue_ms=asked.queue_ms, queue_bytes=asked.queue_bytes,
            loss=asked.loss, burst=asked.burst, delay_ms=asked.delay_ms, jitter_ms=asked.jitter_ms,
            offloads=asked.offloads, limit_s=asked.limit_s + 30,
        )  # fmt: skip
        with lab:
            well = commands(lab, asked.command, asked.limit_s) if asked.command else measured(lab)
    except (LabError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
