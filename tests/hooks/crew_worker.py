"""A DDP script as a user would write it, with Ragtag's hook: run by test_crew_ranks, a peer in each process.

Arguments: how many steps; at which of them peer 1 has NaN, peer 3 is killed, peer 1 is frozen (-1: never).
Prints a line for each step (step, seconds, loss, round, who was heard, behind, expired), at the end weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch

import ragtag

FREEZE_S = 0.8


def heard(state: ragtag.hooks.CrewState) -> str:
    """The round, who is in most of its average, and whether this peer has fallen behind."""
    outcome = state.outcome
    assert outcome is not None
    bits = sorted(outcome.heard.tolist())[len(outcome.heard) // 2]
    return f"{outcome.round} {bits:b} {state.behind:d} {outcome.expired:d}"


def freeze(for_s: float) -> None:
    """Stop this process, and have it continued from outside."""
    subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def main(steps: int, nan_at: int, kill_at: int, freeze_at: int) -> None:
    with ragtag.join(deadline_s=60.0) as crew:
        torch.manual_seed(crew.rank)  # all begin with the model of the lowest peer all the same
        layers = torch.nn.Linear(20, 100), torch.nn.BatchNorm1d(100), torch.nn.ReLU(), torch.nn.Linear(100, 1)
        module = torch.nn.Sequential(*layers)
        state = ragtag.hooks.CrewState(crew, module)
        model = ragtag.hooks.ddp(module, state, bucket_cap_mb=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        print("began", hash(tuple(module[0].weight.flatten().tolist())), flush=True)
        source = torch.Generator().manual_seed(100 + crew.rank)
        for step in range(steps):
            if (step, crew.rank) == (kill_at, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if (step, crew.rank) == (freeze_at, 1):
                freeze(FREEZE_S)
            began_s = time.monotonic()
            inputs = torch.randn(32, 20, generator=source)
            targets = inputs[:, :5].sin().sum(1, keepdim=True)
            loss = (model(inputs) - targets).square().mean()
            if (step, crew.rank) == (nan_at, 1):
                loss = loss * float("nan")
            optimizer.zero_grad()
            try:
                loss.backward()
            except ragtag.NotFinite as error:
                print("refused", error, flush=True)
                continue
            optimizer.step()
            print("step", step, time.monotonic() - began_s, loss.item(), heard(state), flush=True)
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        print("ended", " ".join(f"{w:.7g}" for w in weights[:50].tolist()), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
