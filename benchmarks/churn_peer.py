"""One peer of benchmarks/churn.py: waits for its turn, trains digits until then, and tells what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # (an optimizer imports it; here, so that joining is timed alone)
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ragtag
import ragtag.app.join  # (`ragtag.join` imports it at first use: 180 modules, before the first message)
from ragtag.app.demo.task import evaluate, load_digits
from ragtag.app.invitation.token import kept_token
from ragtag.core.types import Outcome


def model_of(parameters: int) -> nn.Module:
    """A perceptron of about so many parameters, the same weights on every peer."""
    torch.manual_seed(1)
    width = int((-75 + (75**2 + 4 * parameters) ** 0.5) / 2)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def resident_mb() -> float:
    """What this process holds in memory, in MB of 2^20 bytes; 0 where Linux's /proc is not there."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    out, parameters, every, averager = Path(sys.argv[1]), *map(float, sys.argv[2:4]), sys.argv[4]
    lines = out.open("w", buffering=1)

    def tell(**fields: object) -> None:
        lines.write(json.dumps({"t": time.time(), **fields}) + "\n")

    digits = load_digits(0)
    model = model_of(int(parameters))
    data = DataLoader(TensorDataset(digits.train_images, digits.train_labels), batch_size=16, shuffle=True)
    tell(what="warm")
    turn = sys.stdin.readline()  # until when to train; nothing: the run is over
    if not turn:
        return
    ends_s = float(turn)
    os.environ["RAGTAG_TOKEN"] = kept_token(Path(os.environ["RAGTAG_RUN"]))  # as `ragtag join FOLDER` does
    tell(what="joining")
    crew = ragtag.join(deadline_s=60.0)
    tell(what="joined", seat=crew.rank)
    method = ragtag.Moshpit(group=4) if averager == "moshpit" else ragtag.RPS()
    steps, outcomes = 0, 0

    def took(outcome: Outcome) -> None:
        nonlocal outcomes
        outcomes += 1
        others = int((outcome.averaged).sum())
        tell(
            what="round",
            seat=crew.rank,
            round=outcome.round,
            total_s=outcome.total_s,
            chunks=others,
            of=len(outcome.averaged),
            live=len(crew.live),
            weight=float(outcome.weight.max()),
            memory_mb=resident_mb(),
        )

    optimizer = crew.optimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model=model,
        averager=method,
        every=int(every),
        on_outcome=took,
    )
    tell(what="ready", seat=crew.rank)
    epoch = 0
    while time.time() < ends_s:
        for inputs, targets in crew.split(data):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            tell(what="step", n=steps)
            if time.time() >= ends_s:
                break
        epoch += 1
    own = [p.detach().clone() for p in model.parameters()]
    last = optimizer.average()
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(own, model.parameters(), strict=True)])
    save_file(
        {f"p{i}": p.detach() for i, p in enumerate(model.parameters())}, out.with_suffix(".safetensors")
    )
    loss, accuracy = evaluate(model, digits)
    tell(
        what="end",
        seat=crew.rank,
        steps=steps,
        epochs=epoch,
        loss=loss,
        accuracy=accuracy,
        round=last.round,
        arrived=float(last.averaged.mean()),
        drift=float(moved.norm()),
        live=sorted(crew.live),
    )
    crew.leave()


if __name__ == "__main__":
    main()
