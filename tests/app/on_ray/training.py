"""A small training script for the tests: least squares, and a line now and then.

    training.py STOP

Peers train until the file STOP is there, and three minutes at most.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import ragtag

stop, until_s = Path(sys.argv[1]), time.time() + 180
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
crew = ragtag.join()
print(f"joined seat={crew.rank} size={crew.size} actor={os.getppid()}")
optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager=ragtag.RPS())
draw = torch.Generator().manual_seed(crew.rank)
truth = torch.arange(8.0)
steps, told_s = 0, 0.0
while not stop.exists():
    assert time.time() < until_s, "nobody has stopped this peer"
    inputs = torch.randn(16, 8, generator=draw)
    loss = (model(inputs).squeeze(1) - inputs @ truth).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    crew.log_step(loss.item(), 16)
    if time.time() - told_s > 0.3:
        told_s = time.time()
        print(f"step={steps} live={len(crew.live)}")
    time.sleep(0.02)
print(f"done loss={loss.item():.3g}")
crew.leave()
