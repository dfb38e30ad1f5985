"""What a killed, a frozen and a sleeping peer cost the others, in crews of real processes on this machine.

    python benchmarks/faults_live.py                       # three peers, steps of 50 ms, 1M parameters
    python benchmarks/faults_live.py --parameters 16.8e6 --faults kill

Each crew averages after every step. In mid-run one of its peers is killed (SIGKILL), stopped for five seconds
(SIGSTOP), or sleeps a second in each step under ``schedule="partial"``. Printed and stored: the others'
median step before, and the longest step that began after; both by their own clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stored import how

RESULTS = Path(__file__).parent / "results" / "faults_live.json"
PEER = """
import json, os, sys, time
import torch, ragtag
folder, parameters, seconds, sleeps = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
torch.manual_seed(0)
crew = ragtag.join()
model = torch.nn.Linear(parameters // 1000, 1000, bias=False)
schedule = "partial" if sleeps else None
optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, schedule=schedule)
slow = crew.rank == crew.size - 1 and sleeps > 0
model.weight.grad = torch.zeros_like(model.weight)
took = []
open(f"{folder}/pid.{crew.rank}", "w").write(str(os.getpid()))
began = time.monotonic()
while time.monotonic() < began + seconds:
    at = time.monotonic()
    time.sleep(0.05 + (sleeps if slow else 0.0))
    optimizer.step()
    took.append((at, time.monotonic() - at))
json.dump(took, open(f"{folder}/took.{crew.rank}", "w"))
crew.leave(finish=False)
"""
FAULTS = ["kill", "stop", "sleep"]
SECONDS, FAULT_AT_S, STOPPED_S = 16.0, 8.0, 5.0


def crew(fault: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One crew with one fault."""
    sleeps = 1.0 if fault == "sleep" else 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "peer.py").write_text(PEER)
        command = [
            *(sys.executable, "-m", "ragtag", "run", "-n", str(asked.peers), "-o", name + "/run"),
            *("peer.py", name, str(int(asked.parameters)), str(SECONDS), str(sleeps)),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL) as run:
            pids = [folder / f"pid.{peer}" for peer in range(asked.peers)]
            until_s = time.monotonic() + 120.0
            while not all(path.exists() and path.read_text() for path in pids):
                if run.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError("the crew did not begin")
                time.sleep(0.05)
            time.sleep(FAULT_AT_S)
            at_s, victim = time.monotonic(), int(pids[-1].read_text())
            if fault == "kill":
                os.kill(victim, signal.SIGKILL)
            elif fault == "stop":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(victim, signal.SIGCONT)
            run.wait(120.0)
        took = [json.loads((folder / f"took.{peer}").read_text()) for peer in range(asked.peers - 1)]
    before = [s for peer in took for t, s in peer[len(peer) // 8 :] if t + s < at_s]
    after = [s for peer in took for t, s in peer if t + s >= at_s]
    median_s = statistics.median(before)
    row = {
        "fault": fault, "steps_before": len(before), "steps_after": len(after),
        "median_step_before_s": median_s, "longest_step_before_s": max(before),
        "longest_step_after_s": max(after), "mean_step_after_s": statistics.fmean(after),
        "longest_over_median": max(after) / median_s,
    }  # fmt: skip
    mean_s = row["mean_step_after_s"]
    was = f"median step before {1e3 * median_s:6.1f} ms, longest {1e3 * max(before):6.1f} ms"
    now = f"after: mean {1e3 * mean_s:6.1f} ms, longest {1e3 * max(after):6.1f} ms"
    print(f"{fault:<6} {was}; {now} ({row['longest_over_median']:.2f} medians)", flush=True)
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--peers", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=["kill", "stop", "sleep"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help=f"a JSON file, such as {RESULTS}")
    asked = parser.parse_args()
    made = how()
    rows = [crew(fault, asked) for fault in asked.faults for _ in range(asked.repeats)]
    if asked.out:
        kept = {
            **made, "peers": asked.peers, "parameters": int(asked.parameters),
        }  # fmt: skip
        asked.out.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
