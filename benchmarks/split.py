"""Split learning's bytes, counted in a crew: beside the formulas, and federated and large-batch training.

    OMP_NUM_THREADS=1 python benchmarks/split.py

One epoch of scikit-learn's digits (1,437 samples) in virtual time, four clients and a server, the net of
``ragtag leak`` (16 channels, cut behind its pooling: 256 values a sample), batches of 16. ``lines``: what the
simulated lines carried, headers, questions and news of versions included. Federated averaging and large-batch
SGD are counted by their formulas. Client compute is that of one sample forward and backward, as torch counts
multiplications and additions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.privacy import CutForm, SplitClient, SplitServer
from ragtag.privacy.split import Cut, crossover_clients, federated_bytes, large_batch_bytes, split_bytes
from ragtag.recipes.nopeek.training import Samples, accuracy, cut_net
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from stored import how

RESULTS = Path(__file__).parent / "results" / "split.json"
CLIENTS, BATCH, RATE, STEP_S = 4, 16, 0.05, 0.02


def per_sample_flops(front: nn.Module, back: nn.Module | None, x: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        codes = front(x)
        (codes if back is None else back(codes)).sum().backward()
    return counter.get_total_flops() / len(x)


def trained(samples: Samples) -> dict[str, Any]:
    """An epoch in a crew: bytes, turns, accuracy."""
    width = math.prod(cut_net((1, 8, 8), 0)[0](samples.train_x[:2]).shape[1:])
    form = CutForm(BATCH, tuple(cut_net((1, 8, 8), 0)[0](samples.train_x[:2]).shape[1:]))
    order = torch.from_numpy(generator(0, "clients' samples").permutation(len(samples.train_y)))
    n = len(order) // (CLIENTS * BATCH) * BATCH
    crew = SimulatedCrew(
        CLIENTS + 1, Faults(latency_s=0.005, rate_bytes_per_s=12.5e6), seed=0, cost=ComputeCost(STEP_S)
    )
    found: dict[str, Any] = {"up": 0, "down": 0, "labels": 0, "answered": 0, "missed": 0, "accuracy": []}
    fronts: list[nn.Module] = []
    above = cut_net((1, 8, 8), 0)[1]

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, form)
        if peer.me == 0:
            server = SplitServer(cut, above, torch.optim.SGD(above.parameters(), RATE))
            server.serve(10.0)
            found["down"] += server.traffic.down_bytes
            return
        front = cut_net((1, 8, 8), 0)[0]
        fronts.append(front)
        client, optimizer = SplitClient(cut, front), torch.optim.SGD(front.parameters(), RATE)
        mine = order[(peer.me - 1) * n : peer.me * n]
        for some in torch.split(mine, BATCH):
            peer.compute()
            if client.backward(samples.train_x[some], samples.train_y[some]) is not None:
                optimizer.step()
            optimizer.zero_grad()
        client.finish()
        found["up"] += client.traffic.up_bytes
        found["labels"] += client.traffic.label_bytes
        found["answered"] += client.answered
        found["missed"] += client.missed

    crew.run(train)
    above.eval()
    for front in fronts:
        front.eval()
        found["accuracy"].append(accuracy(front, above, samples.held_x, samples.held_y))
    lines = sum(crew.world.traffic(peer).bytes_sent for peer in range(CLIENTS + 1))
    return found | {"samples": n * CLIENTS, "width": width, "lines": lines, "virtual_s": crew.world.now_s}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    samples = Samples.of(None)
    found = trained(samples)
    front, above = cut_net((1, 8, 8), 0)
    below = sum(p.numel() for p in front.parameters())
    parameters = below + sum(p.numel() for p in above.parameters())
    formula = split_bytes(found["samples"], found["width"])
    counted = found["up"] + found["down"]
    steps = found["samples"] // (CLIENTS * BATCH)
    whole, part = (per_sample_flops(front, back, samples.train_x[:BATCH]) for back in (above, None))
    rows = [
        ["split, a server", counted / CLIENTS, part, "codes and labels go to the server"],
        [
            "federated averaging, once an epoch",
            federated_bytes(1, parameters),
            whole,
            "models go to the others",
        ],
        ["large-batch SGD", large_batch_bytes(steps, parameters), whole, "gradients go to the others"],
    ]
    goal = ["counted payload / formula", counted / formula, "within", 0.01]
    record = {
        **made,
        "clients": CLIENTS,
        "parameters": parameters,
        "below_the_cut": below,
        "epoch": found,
        "formula_bytes": formula,
        "goal": goal,
        "lines_over_payload": found["lines"] / (counted + found["labels"]),
        "crossover_clients": crossover_clients(found["samples"], found["width"], parameters),
        "columns": [
            "method",
            "bytes of a client in an epoch",
            "flops of a client for a sample",
            "what leaves",
        ],
        "rows": rows,
    }
    for name, sent, flops, leaves in rows:
        print(f"  {name:36s}{sent / 1e6:8.3f} MB{flops / 1e3:10.0f} kflop   {leaves}")
    off = abs(counted / formula - 1)
    print(f"  counted / formula {counted / formula:.4f}, goal within 1 %{'' if off <= 0.01 else ', missed'}")
    print(
        f"  lines carried {record['lines_over_payload']:.3f} times the payload; "
        f"answered {found['answered']}, missed {found['missed']}; accuracy {found['accuracy']}"
    )
    print(f"  fewer bytes than federated averaging from {record['crossover_clients']:.1f} clients on")
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
