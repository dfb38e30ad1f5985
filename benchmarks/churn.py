"""A crew of real processes in which somebody dies, freezes or comes every few seconds, beside a calm one.

    python benchmarks/churn.py                        # 8 peers, 5 minutes of churn, 5 minutes calm
    python benchmarks/churn.py --minutes 1 --averager moshpit

All peers join by a token: the first one begins the crew. kill -9, SIGSTOP for 2 to 6 s, or a new peer, every
10 s on average (seeded). Printed: the longest pause of a peer that was neither frozen nor starting, in median
rounds; how long newcomers took from their first message to their first average; accuracy of both runs; how
far the survivors' models lie apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from ragtag.app.token import Token, encode, new_key

PEER = Path(__file__).with_name("churn_peer.py")
START_S = 60.0


@dataclass
class Peer:
    number: int
    process: subprocess.Popen
    file: Path
    started_s: float
    killed_s: float = math.inf
    frozen: list[tuple[float, float]] = field(default_factory=list)

    def lines(self) -> list[dict]:
        found = []
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # it was killed while it wrote
        return found


class Run:
    """One run of a crew."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.peers = arguments, folder, []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            address = probe.getsockname()
        self.token = encode(Token((address,), "churn", new_key()))
        self.started_s = time.time()

    def start(self) -> Peer:
        number = len(self.peers)
        a, file = self.arguments, self.folder / f"process-{number:02d}.jsonl"
        env = os.environ | {
            "RAGTAG_TOKEN": self.token,
            "RAGTAG_NAME": f"p{number}",
            "RAGTAG_RUN": str(self.folder),
            "RAGTAG_STARTED": str(self.started_s),
            "OMP_NUM_THREADS": "1",
        }
        argv = [
            sys.executable,
            str(PEER),
            str(file),
            str(self.ends_s),
            str(a.parameters),
            str(a.every),
            a.averager,
        ]
        log = (self.folder / f"process-{number:02d}.log").open("w")
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        self.peers.append(peer := Peer(number, process, file, time.time()))
        return peer

    def begin(self) -> None:
        """Start all peers, and wait until each has averaged."""
        self.ends_s = time.time() + START_S + 60 * self.arguments.minutes
        self.start()
        until_s = time.time() + START_S
        while not any(line["what"] == "joined" for line in self.peers[0].lines()) and time.time() < until_s:
            time.sleep(0.1)
        for _ in range(self.arguments.peers - 1):
            self.start()
        while time.time() < until_s:
            if all(any(line["what"] == "round" for line in peer.lines()) for peer in self.peers):
                break
            time.sleep(0.2)
        self.began_s = time.time()

    def alive(self) -> list[Peer]:
        return [p for p in self.peers if p.process.poll() is None and p.killed_s == math.inf]

    def churn(self) -> dict[str, int]:
        """Kill, freeze and start until a while before the end."""
        draw, a = random.Random(self.arguments.seed), self.arguments
        counts = {"kill": 0, "freeze": 0, "new": 0}
        thaw: list[tuple[float, Peer]] = []
        at_s = time.time() + draw.expovariate(1 / a.every_s)
        quiet_s = self.ends_s - 15.0
        while time.time() < quiet_s:
            for due in [entry for entry in thaw if entry[0] <= time.time()]:
                os.killpg(due[1].process.pid, signal.SIGCONT)
                due[1].frozen[-1] = (due[1].frozen[-1][0], time.time())
                thaw.remove(due)
            if time.time() < at_s:
                time.sleep(0.05)
                continue
            at_s += draw.expovariate(1 / a.every_s)
            still = [peer for _, peer in thaw]
            free = [peer for peer in self.alive() if peer not in still]
            what = draw.choice(["kill", "freeze", "new"])
            if what == "kill" and len(free) <= a.peers - 2:
                what = "new"
            if what == "new" and len(self.alive()) >= a.peers + 2:
                what = "kill"
            counts[what] += 1
            if what == "new":
                self.start()
                continue
            peer = draw.choice(free)
            if what == "kill":
                peer.killed_s = time.time()
                os.killpg(peer.process.pid, signal.SIGKILL)
            else:
                peer.frozen.append((time.time(), math.inf))
                os.killpg(peer.process.pid, signal.SIGSTOP)
                thaw.append((time.time() + draw.uniform(2.0, 6.0), peer))
        for _, peer in thaw:
            os.killpg(peer.process.pid, signal.SIGCONT)
            peer.frozen[-1] = (peer.frozen[-1][0], time.time())
        return counts

    def finish(self) -> None:
        until_s = self.ends_s + 40.0
        for peer in self.peers:
            try:
                peer.process.wait(max(0.1, until_s - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(peer.process.pid, signal.SIGKILL)
                peer.process.wait()

    def measure(self) -> dict:
        """What the peers told."""
        rounds_s, pauses, joins, ends, failed = [], [], [], [], []
        for peer in self.peers:
            lines = peer.lines()
            rounds = [line for line in lines if line["what"] == "round"]
            steady = [line for line in rounds if line["t"] > self.began_s]
            gaps = [(b["t"] - a["t"], a["t"], b["t"]) for a, b in pairwise(steady)]
            rounds_s += [gap for gap, _, _ in gaps]
            frozen = [(start - 0.1, end + 1.0) for start, end in peer.frozen]
            pauses += [
                (gap, peer.number, start - self.began_s)
                for gap, start, end in gaps
                if not any(start < until and end > since for since, until in frozen)
            ]
            joining = next((line["t"] for line in lines if line["what"] == "joining"), None)
            took = next((line["t"] for line in rounds if line["chunks"] > 0), None)
            if peer.number >= self.arguments.peers and joining is not None and took is not None:
                joins.append(took - joining)
            end = [line for line in lines if line["what"] == "end"]
            ends += end
            if peer.process.returncode != 0 and peer.killed_s == math.inf:
                failed.append(peer.number)
        median_s = statistics.median(rounds_s)
        return {
            "median_round_s": median_s,
            "rounds": len(rounds_s),
            "longest_pauses": [(round(g / median_s, 2), p, round(t, 1)) for g, p, t in sorted(pauses)[-8:]],
            "p99_pause_medians": sorted(g for g, _, _ in pauses)[int(0.99 * len(pauses))] / median_s,
            "join_s": [round(join, 2) for join in sorted(joins)],
            "accuracy": [line["accuracy"] for line in ends],
            "steps": sum(line["steps"] for line in ends),
            "ends": ends,
            "failed": failed,
            "distance": self.distances(),
        }

    def distances(self) -> dict:
        """How far survivors lie from their mean after the last average, beside what a round moves a model."""
        models, drifts = [], []
        for peer in self.peers:
            file = peer.file.with_suffix(".safetensors")
            if file.exists():
                models.append(torch.cat([tensor.flatten() for tensor in load_file(file).values()]))
                drifts += [line["drift"] for line in peer.lines() if line["what"] == "end"]
        mean = torch.stack(models).mean(0)
        own = [float((model - mean).norm()) for model in models]
        return {
            "norm": float(mean.norm()),
            "worst": max(own),
            "median": statistics.median(own),
            "drift_median": statistics.median(drifts),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every-s", type=float, default=10.0, help="mean time between events")
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--every", type=int, default=8, help="local steps between averages")
    parser.add_argument("--averager", choices=("rps", "moshpit"), default="rps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-calm", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for traces and logs")
    parser.add_argument("--out", type=Path, help="JSON results")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("churn",) if arguments.no_calm else ("calm", "churn"):
            folder = (arguments.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            run = Run(arguments, folder)
            try:
                run.begin()
                counts = run.churn() if name == "churn" else {}
                run.finish()
            finally:
                for peer in run.peers:
                    if peer.process.poll() is None:
                        os.killpg(peer.process.pid, signal.SIGKILL)
            results[name] = run.measure() | {"events": counts}
            show(name, results[name])
    if "calm" in results:
        means = [statistics.fmean(results[name]["accuracy"]) for name in ("calm", "churn")]
        print(
            f"accuracy: calm {means[0]:.1%}, churn {means[1]:.1%}, {100 * (means[1] - means[0]):+.1f} points"
        )
    if arguments.out is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        command = " ".join(["python", *sys.argv])
        arguments.out.write_text(
            json.dumps({"command": command, "machine": machine, "results": results}, indent=1) + "\n"
        )


def show(name: str, found: dict) -> None:
    worst = found["longest_pauses"][-1]
    print(
        f"{name}: {found['rounds']} rounds, median {1e3 * found['median_round_s']:.0f} ms; longest pause "
        f"{worst[0]:.1f} medians, 99 % within {found['p99_pause_medians']:.1f}; events {found['events']}"
    )
    if found["join_s"]:
        print(f"  newcomers took {found['join_s'][0]:.1f} to {found['join_s'][-1]:.1f} s: {found['join_s']}")
    print(f"  accuracy {', '.join(f'{a:.1%}' for a in found['accuracy'])}; steps {found['steps']}")
    if found["failed"]:
        print(f"  FAILED: processes {found['failed']}")
    d = found["distance"]
    print(
        f"  distance from the mean of all survivors: worst {d['worst']:.2e}, median {d['median']:.2e}; "
        f"a model moves {d['drift_median']:.2e} between averages; norm {d['norm']:.3g}"
    )


if __name__ == "__main__":
    main()
