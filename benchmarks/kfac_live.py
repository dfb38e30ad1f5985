"""K-FAC in crews of eight processes on this machine, where datagrams are lost and peers die and freeze.

    python benchmarks/kfac_live.py
    python benchmarks/kfac_live.py --worlds "5 % lost" --seeds 1

Data, net, batches, rates and settings are those that ``ragtag reproduce kfac`` has chosen for K-FAC; its
crews are in virtual time, and these are real: ``ragtag run --faults``, UDP over loopback. A step computes for
a quarter of a second. In the last world a peer is killed in mid-run, and another stopped for five seconds.

Printed and stored: the step from which on the accuracy held out is 95 % in the mean of five steps, over the
calm crew's; and the longest step over the median one, of peers that were neither killed nor frozen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.stored import how

RESULTS = Path(__file__).parent / "results" / "kfac_live.json"
PEERS, STEPS, STEP_S, FROZEN_S, LIMIT_S = 8, 60, 0.25, 5.0, 300.0
KILLED, KILLED_AT, FROZEN, FROZEN_AT = 1, 16, 2, 26
"""Which peer is killed, and which is stopped, and after how many of its steps."""
WORLDS = {
    "calm": "",
    "5 % lost": "loss=0.05",
    "10 % lost": "loss=0.1",
    "10 % lost, one killed, one frozen": "loss=0.1",
}
GOALS = {"steps": 1.1, "longest": 3.0}


def peer(folder: Path, seed: int) -> None:
    """One peer's training, as a user's script has it."""
    import torch
    from torch.nn import functional as F

    import ragtag
    from ragtag.recipes.kfac.recipe import TUNED
    from ragtag.recipes.kfac.training import BATCH, KFAC_NAME, Images, kfac_options, optimizers, paces

    torch.set_num_threads(1)
    settings, samples = TUNED[KFAC_NAME], Images(None)
    net = samples.net(seed)
    (inner,) = optimizers(settings, net)
    (rate,) = paces([inner], STEPS)
    with ragtag.join() as crew:
        optimizer = crew.optimizer(inner, averager="rps+repair", model=net, average="gradients")
        kfac = crew.kfac(net, inner, **kfac_options(settings))
        crew.keep(rate=rate)
        part = slice(crew.rank * BATCH // PEERS, (crew.rank + 1) * BATCH // PEERS)
        looks, took_s, oldest = [], [], 0
        for x, y in samples.batches(seed):
            if crew.step >= STEPS:
                break
            began_s = time.monotonic()
            time.sleep(STEP_S)
            inner.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            kfac.step()
            optimizer.step()
            while rate.last_epoch < crew.step:
                rate.step()
            took_s.append(time.monotonic() - began_s)
            oldest = max(oldest, kfac.age or 0)
            looks.append(samples.look(net)[0])
            (folder / f"at.{crew.rank}").write_text(f"{os.getpid()} {len(looks)}")
        told = {"took_s": took_s, "looks": looks, "oldest": oldest}
        (folder / f"peer.{crew.rank}").write_text(json.dumps(told))


def signalled(folder: Path, peer: int, after: int, run: subprocess.Popen[str], what: signal.Signals) -> int:
    """Send a signal to a peer once it has taken so many steps; its process."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s and run.poll() is None:
        at = folder / f"at.{peer}"
        words = at.read_text().split() if at.exists() else []
        if len(words) == 2 and int(words[1]) >= after:
            os.kill(int(words[0]), what)
            return int(words[0])
        time.sleep(0.01)
    raise RuntimeError(f"peer {peer} has not come to its step {after}")


def crew(world: str, seed: int) -> dict[str, Any]:
    """One crew; what came of it."""
    from ragtag.recipes.kfac.training import TARGET, first_at

    killed, frozen = "killed" in world, "frozen" in world
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        faults = ["--faults", WORLDS[world]] if WORLDS[world] else []
        command = [
            *(sys.executable, "-m", "ragtag", "run", "-n", str(PEERS), "--seed", str(seed), *faults),
            *("--no-watch", "-o", name + "/run", str(Path(__file__).resolve()), "--peer", name),
            *("--seeds", str(seed)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "said").open("w") as said:
            run = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, text=True)
            try:
                if killed:
                    signalled(folder, KILLED, KILLED_AT, run, signal.SIGKILL)
                if frozen:
                    stopped = signalled(folder, FROZEN, FROZEN_AT, run, signal.SIGSTOP)
                    time.sleep(FROZEN_S)
                    os.kill(stopped, signal.SIGCONT)
                run.wait(LIMIT_S)
            finally:
                run.kill()
        if run.returncode:
            raise RuntimeError(f"{world}: {(folder / 'said').read_text()[-4000:]}")
        told = {int(one.suffix[1:]): json.loads(one.read_text()) for one in folder.glob("peer.*")}
    if len(told) != PEERS - killed:
        raise RuntimeError(f"{world}: peers {sorted(told)} ended")
    whole = [each for peer, each in told.items() if not (frozen and peer == FROZEN)]
    row = {
        "world": world,
        "seed": seed,
        "reached": first_at(TARGET, told[0]["looks"]),
        "accuracy": told[0]["looks"][-1],
        "median_step_s": median(median(each["took_s"]) for each in whole),
        "longest": max(max(each["took_s"]) / median(each["took_s"]) for each in whole),
        "oldest": max(each["oldest"] for each in told.values()),
    }
    print(
        f"{world:<36} seed {seed}: 95 % at step {row['reached']}, in the end {row['accuracy']:.1%}; "
        f"longest step {row['longest']:.2f} medians of {1e3 * row['median_step_s']:.0f} ms",
        flush=True,
    )
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help=f"a JSON file, such as {RESULTS}")
    parser.add_argument("--peer", type=Path, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer is not None:
        peer(asked.peer, asked.seeds)
        return
    made = how()
    rows = [crew(world, seed) for world in asked.worlds for seed in range(asked.seeds)]
    of = {world: [row for row in rows if row["world"] == world] for world in asked.worlds}
    steps = {world: fmean(row["reached"] for row in each) for world, each in of.items()}
    worlds = [
        {
            "world": world,
            "steps": steps[world],
            "over_calm": steps[world] / steps["calm"] if "calm" in steps else None,
            "longest": max(row["longest"] for row in each),
            "accuracy": fmean(row["accuracy"] for row in each),
        }
        for world, each in of.items()
    ]
    if asked.out is not None:
        found = {"peers": PEERS, "steps": STEPS, "goals": GOALS, "worlds": worlds, "rows": rows}
        asked.out.write_text(json.dumps({**made, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
