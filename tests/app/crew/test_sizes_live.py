"""A mixed crew of real processes: batches follow speeds, and every sample is used once an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core import trace

SRC = Path(__file__).parents[3] / "src"
PATIENCE_S = 110.0
SAMPLES, BATCH, EPOCHS = 640, 32, 3

SCRIPT = """
import json, sys, time
import torch, ragtag
torch.set_num_threads(1)
SLEEPS_S = [.002, .006]  # per sample
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = crew.optimizer(
        sgd, averager=ragtag.AllReduce(), model=model, weight="samples", coherence=ragtag.Coherence(every=2)
    )
    data = torch.utils.data.TensorDataset(torch.arange(int(sys.argv[2])))
    loader = torch.utils.data.DataLoader(data, batch_size=int(sys.argv[3]), shuffle=True)
    split = crew.split(loader, sizes=ragtag.BatchSizes(grain=4))
    epochs = []
    for epoch in range(int(sys.argv[4])):
        sizes, used = [], []
        for (batch,) in split:
            time.sleep(SLEEPS_S[crew.rank] * len(batch))
            optimizer.zero_grad()
            model(torch.randn(len(batch), 4) + 1).square().mean().backward()
            optimizer.step()
            sizes.append(len(batch))
            used += batch.tolist()
        epochs.append((sizes, used))
    with open(f"{sys.argv[1]}/{crew.rank}.json", "w") as file:
        json.dump(epochs, file)
"""


@pytest.mark.slow
def test_batches_follow_speeds_of_real_processes(tmp_path: Path) -> None:
    """One takes three times as long for a sample: of two batches it gets a quarter, the other the rest."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")}
    arguments = [str(tmp_path), *map(str, (SAMPLES, BATCH, EPOCHS))]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "ragtag.app.cli.main",
            "run",
            "-n",
            "2",
            "-o",
            str(run),
            "train.py",
            *arguments,
        ],
        env=clean | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    peers = [json.loads((tmp_path / f"{peer}.json").read_text()) for peer in range(2)]
    told = [record for record in read_run(run).records() if isinstance(record, trace.Epoch)]
    for epoch in range(EPOCHS):
        used = Counter(i for peer in peers for i in peer[epoch][1])
        assert set(used) == set(range(SAMPLES))
        twice = sum(count > 1 for count in used.values())  # where the machine is so busy that claims are late
        assert {(e.samples, e.missed, e.twice) for e in told if e.epoch == epoch} == {(SAMPLES, 0, twice)}
    fast, slow = (peer[-1][0][1:-2] for peer in peers)  # by then speeds are known
    assert sum(fast) / len(fast) > 1.8 * sum(slow) / len(slow)
    assert report_json(run)["coherence"]["count"] > 0
