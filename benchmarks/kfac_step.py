"""What K-FAC adds to a training step: processor time over that of SGD with momentum, in turns.

    python benchmarks/kfac_step.py
    python benchmarks/kfac_step.py --depths 8 20 --batch 64 --cycles 1
    python benchmarks/kfac_step.py --images-every 4 --output FILE

ResNets of 8, 20 and 32 layers (He et al., CVPR 2016, section 4.2) on images of 32 x 32, a batch of 128, one
thread. Each pair of intervals is a whole number of cycles, so decompositions count in full: factors at every
step and decompositions at every tenth, as in kfac-pytorch's reference run on CIFAR-10; and at every tenth and
hundredth step, as KAISA (Pauloski and others, SC 2021) has them for larger nets. The goal is 1.5. With
``--images-every`` factors of convolutions are of some images only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.recipes.kfac.training import MOMENTUM, deep_resnet
from stored import how

RESULTS = Path(__file__).parent / "results" / "kfac_step.json"
INTERVALS = ((1, 10), (10, 100))
GOAL = 1.5


class Run:
    """One net and its optimizer, which take the same batch again and again."""

    def __init__(
        self,
        depth: int,
        batch: int,
        every: tuple[int, int] | None,
        images_every: int = 1,
        device: torch.device | str = "cpu",
        width: int = 16,
    ) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = deep_resnet(depth, width).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01, MOMENTUM)
        self.kfac: KFAC | None = None
        if every is not None:
            self.kfac = KFAC(
                self.net,
                self.optimizer,
                factor_every=every[0],
                inverse_every=every[1],
                images_every=images_every,
            )
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(batch, 3, 32, 32, generator=draw).to(device)
        self.y = torch.randint(0, 10, (batch,), generator=draw).to(device)

    def step(self) -> float:
        """The processor time of a step, in seconds."""
        began_s = time.process_time()
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(self.x), self.y).backward()
        if self.kfac is not None:
            self.kfac.step()
        self.optimizer.step()
        return time.process_time() - began_s


def measure(depth: int, batch: int, every: tuple[int, int], cycles: int, images_every: int) -> dict[str, Any]:
    """Whole cycles of K-FAC's steps, and as many of SGD's between them."""
    plain, kfac = Run(depth, batch, None), Run(depth, batch, every, images_every)
    plain.step()  # the first one allocates
    took: dict[str, list[float]] = {"sgd": [], "kfac": []}
    for _ in range(cycles * every[1]):
        took["sgd"].append(plain.step())
        took["kfac"].append(kfac.step())
    sgd_s, kfac_s = statistics.median(took["sgd"]), statistics.fmean(took["kfac"])
    return {
        "depth": depth, "batch": batch, "factor_every": every[0], "inverse_every": every[1],
        "images_every": images_every,
        "parameters": sum(p.numel() for p in plain.net.parameters()),
        "sgd_step_cpu_s": round(sgd_s, 4),
        "kfac_step_cpu_s": round(kfac_s, 4),
        "kfac_usual_step_cpu_s": round(statistics.median(took["kfac"]), 4),
        "kfac_longest_step_cpu_s": round(max(took["kfac"]), 4), "ratio": round(kfac_s / sgd_s, 3),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 20, 32], help="6 n + 2 each")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--cycles", type=int, default=1, help="of decompositions")
    parser.add_argument(
        "--images-every", type=int, default=1, help="of images one is in convolutions' factors"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    asked = parser.parse_args()
    made = how()
    torch.set_num_threads(1)
    print(f"{'net':<12}{'factors, bases every':<24}{'SGD':>9}{'K-FAC':>9}{'ratio':>7}")
    rows = []
    for depth in asked.depths:
        for every in INTERVALS:
            row = measure(depth, asked.batch, every, asked.cycles, asked.images_every)
            rows.append(row)
            print(
                f"ResNet-{depth:<5}{every[0]}, {every[1]:<21}{row['sgd_step_cpu_s']:>8.3f}s"
                f"{row['kfac_step_cpu_s']:>8.3f}s{row['ratio']:>7.2f}",
                flush=True,
            )
    asked.output.write_text(json.dumps({**made, "goal": GOAL, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
