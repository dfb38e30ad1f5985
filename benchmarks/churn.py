"""A crew of real processes in which somebody dies, freezes or comes every few seconds, beside a calm one.

    python benchmarks/churn.py                        # 8 peers, 5 minutes of churn, 5 minutes calm
    python benchmarks/churn.py --minutes 1 --averager moshpit

All peers join by a token: the first one begins the crew. kill -9, SIGSTOP for 2 to 6 s, or a new peer,
every 10 s on average (seeded). Newcomers' processes are started before, and wait for their turn: on a
machine of their own, as newcomers have, importing torch would not slow the others down. Printed: the
longest pause of a peer that was neither frozen nor starting, in median rounds; how long newcomers took from
their first message to their first average, and where it went; accuracy of both runs; how far the survivors'
models lie apart; what their processes hold in memory, in the second quarter of the run and in the last.
With --no-calm and --out the calm run that is stored there stays, with its own command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
from operator import itemgetter
from pathlib import Path

import torch
from safetensors.torch import load_file

from ragtag.app.invitation.token import Token, encode, keep_token, new_key
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from stored import how

PEER = Path(__file__).with_name("churn_peer.py")
START_S = 60.0
WARM_S = 240.0
"""How long all processes may take to import torch, on a few cores."""


@dataclass
class Peer:
    number: int
    process: subprocess.Popen
    file: Path
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

    def __init__(self, arguments: argparse.Namespace, folder: Path, churned: bool) -> None:
        self.arguments, self.folder, self.churned = arguments, folder, churned
        self.peers: list[Peer] = []
        self.spares: list[Peer] = []
        self.cold = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            address = probe.getsockname()
        keep_token(folder, encode(Token((address,), "churn", new_key(), begins=True)))
        self.started_s = time.time()

    def start(self) -> Peer:
        """Start a process that imports all it needs, and then waits for its turn."""
        number = len(self.peers) + len(self.spares)
        a, file = self.arguments, self.folder / f"process-{number:02d}.jsonl"
        env = os.environ | {
            "RAGTAG_NAME": f"p{number}",
            "RAGTAG_RUN": str(self.folder),
            "RAGTAG_STARTED": str(self.started_s),
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, str(PEER), str(file), str(a.parameters), str(a.every), a.averager]
        with (self.folder / f"process-{number:02d}.log").open("w") as log:
            process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        self.spares.append(peer := Peer(number, process, file))
        return peer

    def release(self) -> Peer:
        """It is the next one's turn."""
        peer = self.spares.pop(0) if self.spares else self.start_cold()
        self.peers.append(peer)
        print(self.ends_s, file=peer.process.stdin, flush=True)
        return peer

    def start_cold(self) -> Peer:
        """More come than were thought of."""
        self.cold += 1
        self.start()
        return self.spares.pop()

    def begin(self) -> None:
        """Start all peers, and wait until each has averaged."""
        a = self.arguments
        newcomers = math.ceil(60 * a.minutes / a.every_s / 2) + 2 if self.churned else 0
        for _ in range(a.peers + newcomers):
            self.start()
        self.wait("warm", self.spares, WARM_S)
        self.ends_s = time.time() + START_S / 2 + 60 * a.minutes
        self.wait("joined", [self.release()], START_S)
        self.wait("round", self.peers + [self.release() for _ in range(a.peers - 1)], START_S)
        self.began_s = time.time()

    def wait(self, what: str, peers: list[Peer], for_s: float) -> None:
        """Until all of these have said that."""
        until_s = time.time() + for_s
        while not all(any(line["what"] == what for line in peer.lines()) for peer in peers):
            if time.time() > until_s:
                raise SystemExit(f"not all peers said {what!r} within {for_s:g} s; see {self.folder}")
            time.sleep(0.1)

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
                self.release()
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
        """All end by themselves; who does not is ended. Who was never needed ends after them: to take so many
        processes apart costs both cores seconds, in which the others still average."""
        until_s = self.ends_s + 40.0
        for peer in self.peers:
            try:
                peer.process.wait(max(0.1, until_s - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(peer.process.pid, signal.SIGKILL)
                peer.process.wait()
        for spare in self.spares:
            assert spare.process.stdin is not None
            spare.process.stdin.close()
            os.killpg(spare.process.pid, signal.SIGKILL)
            spare.process.wait()

    def measure(self) -> dict:
        """What the peers told."""
        rounds_s, pauses, joins, ends, failed = [], [], [], [], []
        phases = [record for record in read_run(self.folder).records() if isinstance(record, trace.Phase)]
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
                seat = next(line["seat"] for line in lines if line["what"] == "joined")
                came = [phase for phase in phases if phase.peer == seat]
                within = [phase for phase in came if joining <= self.started_s + phase.t <= took + 0.5]
                joins.append((took - joining, {phase.name: round(phase.took_s, 2) for phase in within}))
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
            "join_s": [round(join, 2) for join, _ in sorted(joins, key=itemgetter(0))],
            "join_phases_s": [phases for _, phases in sorted(joins, key=itemgetter(0))],
            "accuracy": [line["accuracy"] for line in ends],
            "steps": sum(line["steps"] for line in ends),
            "ends": ends,
            "failed": failed,
            "distance": self.distances(),
            "memory_mb": self.memory(),
        }

    def memory(self) -> list[tuple[float, float]]:
        """Of each peer that was there throughout: the median of what it held in the second quarter of the
        run, and in the last.
        """
        found, whole_s = [], self.ends_s - self.began_s
        for peer in self.peers[: self.arguments.peers]:
            if peer.killed_s < math.inf:
                continue
            held = [
                ((o["t"] - self.began_s) / whole_s, o["memory_mb"])
                for o in peer.lines()
                if o["what"] == "round"
            ]
            quarters = [[mb for at, mb in held if a < at < b] for a, b in ((0.25, 0.5), (0.75, 1.0))]
            if all(quarters):
                found.append((statistics.median(quarters[0]), statistics.median(quarters[1])))
        return found

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
    made = how()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("churn",) if arguments.no_calm else ("calm", "churn"):
            folder = (arguments.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            run = Run(arguments, folder, churned=name == "churn")
            try:
                run.begin()
                counts = run.churn() if run.churned else {}
                run.finish()
            finally:
                for peer in run.peers + run.spares:
                    if peer.process.poll() is None:
                        os.killpg(peer.process.pid, signal.SIGKILL)
            results[name] = run.measure() | {"events": counts, "started cold": run.cold}
            show(name, results[name])
    if "calm" in results:
        means = [statistics.fmean(results[name]["accuracy"]) for name in ("calm", "churn")]
        print(
            f"accuracy: calm {means[0]:.1%}, churn {means[1]:.1%}, {100 * (means[1] - means[0]):+.1f} points"
        )
    if arguments.out is not None:
        document = {**made, "results": results} | stored_calm(arguments)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def stored_calm(arguments: argparse.Namespace) -> dict[str, dict]:
    """The calm run that was stored before, with its command, where none was made now."""
    if not arguments.no_calm or not arguments.out.exists():
        return {}
    stored = json.loads(arguments.out.read_text())
    calm = stored["results"].pop("calm", None)
    if calm is not None:
        return {"calm": stored | {"results": {"calm": calm}}}
    return {"calm": stored["calm"]} if "calm" in stored else {}


def show(name: str, found: dict) -> None:
    worst = found["longest_pauses"][-1]
    print(
        f"{name}: {found['rounds']} rounds, median {1e3 * found['median_round_s']:.0f} ms; longest pause "
        f"{worst[0]:.1f} medians, 99 % within {found['p99_pause_medians']:.1f}; events {found['events']}"
    )
    if found["join_s"]:
        print(f"  newcomers took {found['join_s'][0]:.1f} to {found['join_s'][-1]:.1f} s:")
        for join_s, phases in zip(found["join_s"], found["join_phases_s"], strict=True):
            print(f"    {join_s:5.2f}: " + ", ".join(f"{name} {took:.2f}" for name, took in phases.items()))
    print(f"  accuracy {', '.join(f'{a:.1%}' for a in found['accuracy'])}; steps {found['steps']}")
    if found["failed"]:
        print(f"  FAILED: processes {found['failed']}")
    if found["memory_mb"]:
        held = ", ".join(f"{early:.0f} and {late:.0f}" for early, late in found["memory_mb"])
        print(f"  MB held by those there throughout, second and last quarter: {held}")
    d = found["distance"]
    print(
        f"  distance from the mean of all survivors: worst {d['worst']:.2e}, median {d['median']:.2e}; "
        f"a model moves {d['drift_median']:.2e} between averages; norm {d['norm']:.3g}"
    )


if __name__ == "__main__":
    main()
