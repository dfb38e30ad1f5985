"""Without loss, an average is what torch.distributed's all_reduce over gloo comes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps
from tests.network.crew import PATIENCE_S, Crew, values_of

N, N_CHUNKS = 3, 40
SCRIPT = """
import sys, numpy as np, torch, torch.distributed as dist
rank, n, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
values = torch.from_numpy(np.load(f"{folder}/{rank}.npy"))
dist.all_reduce(values)
np.save(f"{folder}/sum-{rank}.npy", values.numpy())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def gloo_mean(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The mean of all peers' values, by gloo."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    for peer in range(N):
        np.save(folder / f"{peer}.npy", values_of(peer, N_CHUNKS))
    command = [sys.executable, "-c", SCRIPT]
    peers = [
        subprocess.Popen([*command, str(peer), str(N), str(folder / "store"), str(folder)])
        for peer in range(N)
    ]
    for process in peers:
        assert process.wait(PATIENCE_S) == 0
    return np.load(folder / "sum-0.npy") / N


@pytest.mark.parametrize("method", [rps, direct, ring], ids=lambda method: method.name)
def test_without_loss_it_is_what_gloo_comes_to(method: Averager, gloo_mean: np.ndarray) -> None:
    with Crew(N, N_CHUNKS, method=method) as crew:
        for outcome in crew.average().values():
            assert outcome.averaged.all()
            assert np.allclose(outcome.mean, gloo_mean, rtol=1e-6, atol=1e-6)
