"""Feature-space hijacking of a client of split learning, by the weight of its NoPeek.

    OMP_NUM_THREADS=1 python benchmarks/hijacking.py

The net on digits of ``ragtag reproduce nopeek``, cut behind two convolutions; the client trains on 1,437
images as with an honest server, and the server has the 360 others. Scored are 1,024 of the client's images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from ragtag.privacy import hijacking
from ragtag.privacy.hijacking import PULL
from ragtag.recipes.nopeek.training import Samples, cut_net
from stored import how

RESULTS = Path(__file__).parent / "results" / "hijacking.json"
HARDER = 10 * PULL
CASES = ((0.0, PULL), (10.0, PULL), (100.0, PULL), (100.0, HARDER))
"""Weights of NoPeek, and how hard the server pulls."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="of nets and attackers")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    torch.set_num_threads(1)
    digits = Samples.of(None)
    begin_s = time.process_time()
    weights = {}
    for weight, pull in CASES:
        runs = []
        for seed in range(arguments.seeds):
            front, _ = cut_net(tuple(digits.train_x.shape[1:]), seed)
            given = digits.train_x, digits.held_x
            found = hijacking(front, *given, nopeek=weight, pull=pull, seed=seed)
            runs.append({"seed": seed, "hidden": found.hidden, **asdict(found)})
            print(
                f"  weight {weight:5g}, pull {pull:3g}, seed {seed}: {found.hidden:.1%} of variance hidden, "
                f"SSIM {found.ssim:.2f} (mean public image {found.blind_ssim:.2f}), dCor {found.dcor:.3f}",
                flush=True,
            )
        weights[f"{weight:g}" if pull == PULL else f"{weight:g}, pulled harder"] = {
            name: [run[name] for run in runs] for name in ("hidden", "ssim", "blind_ssim", "dcor")
        } | {"runs": runs}
    record = {
        **made,
        "seeds": arguments.seeds,
        "weights": weights,
        "cpu_s": time.process_time() - begin_s,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
