"""What K-FAC's savings cost in accuracy: fewer images in convolutions' factors, and factors in blocks.

    python benchmarks/kfac_options.py
    python benchmarks/kfac_options.py --seeds 4

The net, digits, batches, optimizer and rates of ``ragtag reproduce kfac`` in one process, 60 steps; a seed
draws the net's first weights and the batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional as F

from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.recipes.kfac.recipe import TUNED
from ragtag.recipes.kfac.training import KFAC_NAME, Images, Settings, kfac_options, optimizers, paces
from stored import how

RESULTS = Path(__file__).parent / "results" / "kfac_options.json"
STEPS = 60
CASES: tuple[dict[str, Any], ...] = (
    {},
    *({"images_every": every} for every in (4, 16)),
    *({"block_rows": rows} for rows in (72, 40, 20)),
)


def accuracy(settings: Settings, seed: int, options: dict[str, Any]) -> float:
    """On what is held out, after all steps."""
    samples = Images(None)
    net = samples.net(seed)
    (inner,) = optimizers(settings, net)
    (rate,) = paces([inner], STEPS)
    kfac = KFAC(net, inner, **kfac_options(settings), **options)
    for _, (x, y) in zip(range(STEPS), samples.batches(seed), strict=False):
        inner.zero_grad()
        F.cross_entropy(net(x), y).backward()
        kfac.step()
        inner.step()
        rate.step()
    return samples.look(net)[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        **how(),
        "seeds": arguments.seeds,
        "steps": STEPS,
        "settings": TUNED[KFAC_NAME].text,
    }
    torch.set_num_threads(1)
    rows = record["rows"] = []
    for options in CASES:
        found = [accuracy(TUNED[KFAC_NAME], seed, options) for seed in range(arguments.seeds)]
        option, value = next(iter(options.items()), ("none", 0))
        rows.append({"option": option, "value": value, "mean": fmean(found), "accuracy": found})
        print(
            f"{option} {value}: {fmean(found):.2%} ({min(found):.1%} to {max(found):.1%})",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
