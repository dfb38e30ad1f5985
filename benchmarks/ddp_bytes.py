"""Bytes per step of a 1M-parameter model in DDP: its own all-reduce, the sparse hook, Ragtag's transport.

    python benchmarks/ddp_bytes.py [-n 4] [--parameters 1000000] [--few 5 --many 25]

Every way is run twice, for few and for many steps, in a network namespace of its own (unprivileged: unshare),
and the loopback interface's counter is read when all have ended: (many - few) steps make the difference, so
start-up does not count. What is counted are all bytes of all ranks with their TCP, UDP and IP headers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LO = Path("/proc/net/dev")
WAYS = ("all-reduce", "sparse 1%", "sparse 0.1%", "average", "average bf16", "average int8")


def lo_bytes() -> int:
    line = next(line for line in LO.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def worker(way: str, parameters: int, steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ragtag

    torch.manual_seed(0)
    width = max(1, int((parameters / 3) ** 0.5))
    layers = [torch.nn.Linear(width, width) for _ in range(3)]
    module = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    with contextlib.ExitStack() as stack:
        if way.startswith("average"):
            crew = stack.enter_context(ragtag.join())
            codec: Any = way.partition(" ")[2] or "fp32"
            state = ragtag.hooks.CrewState(crew, module, codec=codec)
            ddp = ragtag.hooks.ddp(module, state)
            rank = crew.rank
        else:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            rank = dist.get_rank()
            ddp = DistributedDataParallel(module)
            if way != "all-reduce":
                ratio = float(way.split()[1].rstrip("%")) / 100
                ddp.register_comm_hook(ragtag.hooks.SparseState(ratio=ratio), ragtag.hooks.sparse)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        source = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, width, generator=source)).square().mean().backward()
            optimizer.step()


def inside(way: str, n: int, parameters: int, steps: int) -> None:
    """In a fresh namespace: bring loopback up, run, count."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    script = [__file__, "--worker", way, "--parameters", str(parameters), "--many", str(steps)]
    subprocess.run([*command, *script], check=True, stdout=sys.stderr, timeout=300)
    print(lo_bytes())


def count(way: str, n: int, parameters: int, steps: int) -> int:
    options = ["--inside", way, "-n", str(n), "--parameters", str(parameters), "--many", str(steps)]
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=400)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr.decode()[-3000:]}")
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=5)
    parser.add_argument("--many", type=int, default=25)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker, given.parameters, given.many)
    if given.inside:
        return inside(given.inside, given.n, given.parameters, given.many)
    found: dict[str, float] = {}
    for way in given.ways:
        many, few = (count(way, given.n, given.parameters, steps) for steps in (given.many, given.few))
        found[way] = (many - few) / (given.many - given.few) / given.n
        first = found[given.ways[0]]
        print(f"{way:14} {found[way]:12,.0f} bytes per rank and step  {first / found[way]:6.1f} x fewer")
    print(json.dumps(found))
    return None


if __name__ == "__main__":
    main()
