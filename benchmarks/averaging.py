"""Averaging a vector between processes on loopback: Ragtag beside gloo's all_reduce, in one run.

    python benchmarks/averaging.py                    # 4 processes, 10M float32
    python benchmarks/averaging.py -n 8 --values 1e6 --rounds 30

Rounds of gloo and of Ragtag's methods take turns in the same processes, so that they see the same machine.
"rps sealed" goes over links that encrypt, as they do wherever an address is not loopback.
The physical limit beside them is a memory-to-memory copy of the bytes that one process sends and receives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ragtag.codecs.dense import fp32
from ragtag.core.seed import generator
from ragtag.core.types import Average, Outcome
from ragtag.core.wire import Identity, n_chunks
from ragtag.network.driver.driver import Driver
from ragtag.network.link import Link
from ragtag.network.link.sealed import SealedLink, fast_suite
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps
from ragtag.protocols.sealing.noise import KEY_BYTES, KeyPair
from ragtag.protocols.sealing.sessions import Sessions, card_of
from stored import how

METHODS: dict[str, Averager] = {"rps": rps, "allreduce": direct, "ring": ring, "rps sealed": rps}
DEADLINE_S = 60.0


def contributions(outcome: Outcome, n: int) -> float:
    """The share of all peers' chunks that are in this peer's averages."""
    return float(np.unpackbits(outcome.heard.view(np.uint8)).sum()) / (n * len(outcome.heard))


def started(me: int, store: int, ports: list[int], *, seals: bool) -> Driver:
    """A driver of peer ``me`` at the ports of a crew."""
    identity = Identity(f"benchmark-{store}", me)
    addresses = {peer: ("127.0.0.1", port) for peer, port in enumerate(ports)}
    link: Link = UdpLink(addresses[me])
    if seals:
        keys = [KeyPair(generator(store, "benchmark keys", peer).bytes(KEY_BYTES)) for peer in addresses]
        cards = {addresses[peer]: (peer, card_of(fast_suite(), key)) for peer, key in enumerate(keys)}
        sessions = Sessions(bytes(KEY_BYTES), keys[me], cards.get, os.urandom, fast_suite())
        link = SealedLink(link, identity, sessions)
    driver = Driver(Node(me, len(ports), seed=0), link, identity, addresses)
    driver.start()
    return driver


def peer(me: int, n: int, fds: list[int], ports: list[int], arguments: argparse.Namespace, out) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(arguments.store),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    dist.init_process_group("gloo", rank=me, world_size=n, timeout=timedelta(seconds=DEADLINE_S))
    chunks = n_chunks(arguments.values, fp32.elements)
    drivers = {
        "clear": started(me, arguments.store, ports[:n], seals=False),
        "sealed": started(me, arguments.store, ports[n:], seals=True),
    }
    over = {name: drivers["sealed" if name.endswith("sealed") else "clear"] for name in METHODS}
    for number, (name, method) in enumerate(METHODS.items()):
        channel = Channel(method, fp32, chunks, probe_s=5.0, rtt_s=0.01, reuse=True)
        over[name].configure(number, channel, number).result(5)
    for driver in drivers.values():
        driver.meet(0, b"", DEADLINE_S).result(DEADLINE_S)
    values = np.random.default_rng(me).standard_normal((chunks, fp32.elements)).astype(np.float32)
    tensor = torch.from_numpy(values.copy())
    took: dict[str, list[float]] = {name: [] for name in ("gloo", *METHODS)}
    arrived: dict[str, list[float]] = {name: [] for name in METHODS}
    processor: dict[str, list[float]] = {name: [] for name in ("gloo", *METHODS)}
    copies = []
    errors = dict.fromkeys(METHODS, 0.0)
    for _ in range(arguments.rounds + 2):
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        dist.all_reduce(tensor)
        took["gloo"].append(time.perf_counter() - began)
        processor["gloo"].append(time.process_time() - used)
        dist.barrier()  # what is done between rounds takes no processor from one that is under way
        expected = tensor.numpy() / n
        for number, name in enumerate(METHODS):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            outcome = over[name].average(Average(number, values, 1.0)).result(DEADLINE_S)
            took[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
            dist.barrier()
            arrived[name].append(contributions(outcome, n))
            if arrived[name][-1] == 1.0:
                errors[name] = max(errors[name], float(np.abs(outcome.mean - expected).max()))
        tensor.copy_(torch.from_numpy(values))
        dist.barrier()
        began = time.perf_counter()
        for _ in range(4 * (n - 1)):  # in and out of the kernel, both stages
            np.copyto(tensor.numpy()[: chunks // n], values[: chunks // n])
        copies.append(time.perf_counter() - began)
        tensor.copy_(torch.from_numpy(values))
    dist.barrier()
    for driver in drivers.values():
        driver.close(5.0)
    out.put((me, took, arrived, errors, copies, processor))
    dist.destroy_process_group()


def free_ports(n: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    """Run the processes and print ratios of medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=4, help="processes")
    parser.add_argument("--values", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "averaging.json")
    arguments = parser.parse_args()
    made = how()
    *ports, arguments.store = free_ports(2 * arguments.n + 1)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=peer, args=(i, arguments.n, [], ports, arguments, out))
        for i in range(arguments.n)
    ]
    for process in processes:
        process.start()
    results = sorted(out.get(timeout=20 * DEADLINE_S) for _ in processes)
    for process in processes:
        process.join(DEADLINE_S)
    # a round takes as long as its slowest process; the first two warm up
    slowest = {
        name: [max(r[1][name][i] for r in results) for i in range(2, arguments.rounds + 2)]
        for name in results[0][1]
    }
    median = {name: statistics.median(times) for name, times in slowest.items()}
    limit = statistics.median(max(r[4][i] for r in results) for i in range(2, arguments.rounds + 2))
    arrival = {name: statistics.mean(a for r in results for a in r[2][name][2:]) for name in METHODS}
    processor = {
        name: statistics.median(sum(r[5][name][i] for r in results) for i in range(2, arguments.rounds + 2))
        for name in results[0][5]
    }
    figures = {
        **made,
        "processes": arguments.n,
        "values": arguments.values,
        "rounds": arguments.rounds,
        "median_s": median,
        "quartiles_s": {name: statistics.quantiles(times, n=4) for name, times in slowest.items()},
        "ratio_to_gloo": {name: median[name] / median["gloo"] for name in METHODS},
        "sealed_to_clear": median["rps sealed"] / median["rps"],
        "processor_s": processor,
        "memory_copy_s": limit,
        "arrived": arrival,
        "largest_error": {name: max(r[3][name] for r in results) for name in METHODS},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    size = arguments.values * 4 / 1e6
    print(f"{arguments.n} processes average {size:g} MB on loopback, {arguments.rounds} rounds, medians:")
    print(f"  memory copies of the same bytes  {limit * 1e3:7.1f} ms")
    print(
        f"  gloo all_reduce                  {median['gloo'] * 1e3:7.1f} ms               "
        f"{processor['gloo']:6.3f} s of processors"
    )
    for name in METHODS:
        print(
            f"  ragtag {name:<25} {median[name] * 1e3:7.1f} ms  {median[name] / median['gloo']:5.2f} x gloo  "
            f"{processor[name]:6.3f} s of processors  "
            f"arrived {arrival[name]:.4%}  error {figures['largest_error'][name]:.1e}"
        )


if __name__ == "__main__":
    main()
