"""A DDP script whose model is on the device that it is told: run by test_on_a_gpu, a rank in each process.

Arguments: the device; the hook ("crew" or "sparse"); a file in which torch's ranks meet. Prints each tenth
weight.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ragtag

STEPS = 10


def main(device: str, hook: str, meet: str) -> None:
    with ragtag.join(deadline_s=60.0) as crew:
        torch.manual_seed(0)
        layers = torch.nn.Linear(20, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1)
        module = torch.nn.Sequential(*layers).to(device)
        if hook == "crew":
            model = ragtag.hooks.ddp(module, ragtag.hooks.CrewState(crew, module), bucket_cap_mb=0.005)
        else:
            dist.init_process_group("gloo", init_method=f"file://{meet}", rank=crew.rank, world_size=2)
            state = ragtag.hooks.SparseState(model=module, ratio=0.1, dense_below=50)
            model = DistributedDataParallel(module, bucket_cap_mb=0.005)
            model.register_comm_hook(state, ragtag.hooks.sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        source = torch.Generator().manual_seed(100 + crew.rank)
        for _ in range(STEPS):
            inputs = torch.randn(32, 20, generator=source)
            targets = inputs[:, :5].sin().sum(1, keepdim=True)
            optimizer.zero_grad()
            (model(inputs.to(device)) - targets.to(device)).square().mean().backward()
            optimizer.step()
        if hook == "sparse":
            dist.destroy_process_group()
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        print("ended", weights.device.type, " ".join(f"{w:.7g}" for w in weights[::10].tolist()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
