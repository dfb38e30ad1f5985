"""Time to a fixed training loss on a slow, lossy network: DDP over gloo beside Ragtag's sparse averages.

Four peers are network namespaces (benchmarks/lab). What each sends and what it receives passes a token bucket
of 50 Mbit/s, with a queue of 50 ms, and 1 % of what comes in is lost; segmentation offloads are off. In one
run, one after the other: DDP with cubic, DDP with BBR (where the kernel has it), gradients by selections,
differences to an anchor by selections every so many local steps. In two runs, each with one of the first two:

    python benchmarks/sparse_namespaces.py --ways sparse sparse-local ddp-cubic \\
        --json benchmarks/results/sparse_namespaces.json     # root, Linux

A peer's time runs from its first step, when all have met, to the first look at the loss (every 10 steps, over
the same 512 training examples everywhere) that finds it at the target; that of a way is its slowest peer's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lab import Lab, LabError, host_of, why_not
from stored import how, keep_run

ROOT = Path(__file__).parents[1]
PORT = 4848
EXAMPLES, WIDE, CLASSES, BATCH, LOOK, SHOWN = 8192, 256, 10, 32, 10, 512
WAYS = ("ddp-cubic", "ddp-bbr", "sparse", "sparse-local")


# -- The task


def model_of(seed: int = 0) -> nn.Module:
    """A network of 1.0M parameters, the same everywhere."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDE, 1024), nn.ReLU(), nn.Linear(1024, 704), nn.ReLU(), nn.Linear(704, CLASSES)
    )


def task(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and a teacher's labels."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDE, generator=draw)
    hidden = torch.tanh(inputs @ torch.randn(WIDE, 16, generator=draw) / 4)
    return inputs, (hidden @ torch.randn(16, CLASSES, generator=draw)).argmax(1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    me: int,
    asked: argparse.Namespace,
    agree: Callable[[bool], bool] = bool,
) -> dict[str, Any]:
    """Step until the loss is at the target, or time is up. agree: what all make of one's wish to stop."""
    n, target = asked.n, asked.target
    inputs, labels = task()
    mine = torch.arange(me, EXAMPLES, n)
    draw = torch.Generator().manual_seed(me)
    began_s, curve, steps = time.perf_counter(), [], 0
    while True:
        at = mine[torch.randint(0, len(mine), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[at]), labels[at]).backward()
        optimizer.step()
        steps += 1
        if steps % LOOK:
            continue
        with torch.no_grad():
            loss = float(F.cross_entropy(model(inputs[:SHOWN]), labels[:SHOWN]))
        curve.append((steps, time.perf_counter() - began_s, loss))
        if agree(loss <= target or curve[-1][1] > asked.limit_s):
            return {
                "reached": loss <= target,
                "steps": steps,
                "s": curve[-1][1],
                "loss": loss,
                "curve": curve,
            }


# -- A peer, in its namespace


def ddp(me: int, asked: argparse.Namespace) -> dict[str, Any]:
    """DistributedDataParallel over gloo."""
    import torch.distributed as dist

    os.environ |= {
        "MASTER_ADDR": host_of(0), "MASTER_PORT": str(PORT + 1), "GLOO_SOCKET_IFNAME": "eth0"
    }  # fmt: skip
    dist.init_process_group("gloo", rank=me, world_size=asked.n, timeout=timedelta(seconds=120))
    model = nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
    dist.barrier()

    def agree(stop: bool) -> bool:
        wish = torch.tensor([float(stop)])
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        return bool(wish)

    return {"tcp": congestion_in_use(me), **train(model, optimizer, me, asked, agree)}


def ours(me: int, asked: argparse.Namespace, local: bool) -> dict[str, Any]:
    """Ragtag, by selections: of gradients, or of differences after local steps."""
    import ragtag

    os.environ |= {
        "RAGTAG_RANK": str(me),
        "RAGTAG_SIZE": str(asked.n),
        "RAGTAG_CREW": f"namespaces-{'local' if local else 'steps'}",
        "RAGTAG_PEERS": ",".join(f"{host_of(peer)}:{PORT}" for peer in range(asked.n)),
    }
    model, rounds = model_of(), []
    with ragtag.join() as crew:
        if local:
            inner = torch.optim.SGD(model.parameters(), lr=asked.local_lr, momentum=0.9)
            compress = ragtag.TopK(ratio=asked.local_ratio, resync=0)
            optimizer = crew.optimizer(
                inner, model=model, compress=compress, every=asked.every, on_outcome=rounds.append
            )
        else:
            inner = torch.optim.SGD(model.parameters(), lr=asked.lr)
            compress = ragtag.TopK(ratio=asked.ratio, momentum_correction=0.9, resync=0)
            optimizer = crew.optimizer(
                inner, average="gradients", model=model, compress=compress, on_outcome=rounds.append
            )
        result = train(model, optimizer, me, asked)
        found = optimizer._averaged.compression
        result["rounds"] = len(rounds)
        result["expired"] = sum(outcome.expired for outcome in rounds)
        result["round_s"] = sorted(outcome.total_s for outcome in rounds)[len(rounds) // 2]
        result["compression"] = None if found is None else found._asdict()
        traffic = crew._peer.driver.traffic() if crew._peer.driver is not None else None
        result["bytes_sent"] = 0 if traffic is None else traffic.bytes_sent
    return result


def peer(way: str, me: int, asked: argparse.Namespace) -> None:
    """One peer of one way; prints its result."""
    torch.set_num_threads(1)
    result = ddp(me, asked) if way.startswith("ddp") else ours(me, asked, local=way.endswith("local"))
    print(json.dumps(result), flush=True)


# -- The network


def lab_of(n: int, asked: argparse.Namespace) -> Lab:
    """What all ways have in common."""
    return Lab(n, rate_mbit=asked.mbit, queue_ms=50.0, loss=asked.loss)


def congestion_in_use(me: int) -> list[str]:
    """What a peer's connections to others go by."""
    command = ["ss", "-tinH", "not", "dst", host_of(me)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    known = {"cubic", "bbr", "reno"}
    return sorted(known & set(shown.split()))


def measure(way: str, lab: Lab, asked: argparse.Namespace) -> dict[str, Any]:
    """All peers of one way, side by side; the slowest one's time counts."""
    if way.startswith("ddp"):
        try:
            lab.congestion(way.removeprefix("ddp-"))
        except LabError as error:
            return {"way": way, "not_run": str(error)}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    patience_s = asked.limit_s + 180.0
    with ExitStack() as undo:
        processes = []
        for me in range(asked.n):
            err = undo.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, *sys.argv, "--peer", way, str(me)]
            process = lab.start(me, command, env=env, stdout=subprocess.PIPE, stderr=err, text=True)
            undo.callback(process.wait)
            undo.callback(process.kill)
            processes.append((process, err))
        said = []
        for process, err in processes:
            out = process.communicate(timeout=patience_s)[0]
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if not lines:
                err.seek(0)
                return {"way": way, "not_run": f"a peer failed: {err.read()[-2000:]}"}
            said.append(json.loads(lines[-1]))
    slowest = max(said, key=lambda one: one["s"])
    summary = {key: value for key, value in slowest.items() if key != "curve"}
    return {"way": way, **summary, "reached": all(one["reached"] for one in said), "curve": said[0]["curve"]}


def keep(
    asked: argparse.Namespace, made: dict[str, Any], ratios: dict[str, float], rows: list[dict[str, Any]]
) -> None:
    """Put a run into the file. made: how it came to be."""
    setting = {key: value for key, value in vars(asked).items() if key not in ("json", "peer")}
    run = {
        **made, "setting": setting,
        "parameters": sum(p.numel() for p in model_of().parameters()), "ratios": ratios, "rows": rows,
    }  # fmt: skip
    keep_run(asked.json, run)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("-n", type=int, default=4)
    add("--mbit", type=float, default=50.0)
    add("--loss", type=float, default=0.01)
    add("--target", type=float, default=0.5, help="training loss")
    add("--limit-s", type=float, default=900.0, help="for each way")
    add("--lr", type=float, default=0.05, help="of both ways that average gradients: the best of .03 to .2")
    add("--local-lr", type=float, default=0.02)
    add("--ratio", type=float, default=0.001)
    add("--local-ratio", type=float, default=0.02)
    add("--every", type=int, default=10)
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--json", type=Path, help="a file of runs, each by a command of its own")
    add("--peer", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        return peer(asked.peer[0], int(asked.peer[1]), asked)
    reason = why_not()
    if reason:
        sys.exit(reason)
    made = how()
    with lab_of(asked.n, asked) as lab:
        rows = []
        for way in asked.ways:
            rows.append(measure(way, lab, asked))
            shown = {key: value for key, value in rows[-1].items() if key not in ("curve", "compression")}
            print(json.dumps(shown), flush=True)
    times = {row["way"]: row["s"] for row in rows if row.get("reached")}
    ratios = {
        f"{slow} / {quick}": times[slow] / times[quick]
        for slow in ("ddp-cubic", "ddp-bbr") for quick in ("sparse", "sparse-local")
        if slow in times and quick in times
    }  # fmt: skip
    print(json.dumps({key: round(value, 1) for key, value in ratios.items()}))
    if asked.json:
        keep(asked, made, ratios, rows)
    return None


if __name__ == "__main__":
    main()
