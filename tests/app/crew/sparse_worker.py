"""A script that sends selections: run by test_sparse_live, a peer in each process.

Arguments: how many steps; the step from which on sending whole is said to take no time (-1: as measured).
Prints for each round its number, whether it was sent whole and whether a deadline ended it; at the end a hash
of the weights.
"""

from __future__ import annotations

import hashlib
import sys

import torch

import ragtag
from ragtag.codecs.sparse.advice import Choice
from ragtag.training.exchange.sparse import SparseReplica


def main(steps: int, whole_from: int) -> None:
    with ragtag.join(deadline_s=60.0) as crew:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(40, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
        optimizer = crew.optimizer(
            torch.optim.SGD(module.parameters(), lr=0.02),
            average="gradients",
            model=module,
            compress=ragtag.TopK(ratio=0.02, resync=0),
        )
        source = torch.Generator().manual_seed(100 + crew.rank)
        for step in range(steps):
            if step == whole_from:
                replica = optimizer._averaged.sparse
                assert isinstance(replica, SparseReplica)
                assert replica._bypass is not None
                replica._bypass.estimate = lambda: Choice(False, 0.0, 1.0, 0.0)  # type: ignore[method-assign]
            inputs = torch.randn(32, 40, generator=source)
            loss = (module(inputs) - inputs[:, :5].sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert optimizer.outcome is not None
            assert optimizer._averaged.compression is not None
            outcome, dense = optimizer.outcome, optimizer._averaged.compression.dense
            print("round", outcome.round, int(dense), int(outcome.expired), flush=True)
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        print("ended", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), loss.item(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
