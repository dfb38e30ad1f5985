"""Eight real peers with a target batch, of which one dies and another comes every ten steps of the crew.

    python benchmarks/volunteers.py
    python benchmarks/volunteers.py --seeds 1 --steps 40

The samples, the model and its optimizer are those of ``ragtag reproduce dedloc``, whose crews are in virtual
time, and these are real: ``ragtag run`` with 2 % of all datagrams lost, kill -9, ``ragtag join``; UDP over
loopback. Peers are of speeds 1 to 4. One that comes has its modules imported before: the time from its first
message counts. It takes over the crew's model and its optimizer's momentum.

Printed and stored: in how many windows of ten steps the loss on samples held out, seen at peer 0 and by its
mean over seeds, lies outside the band of one process with the large batch (DeDLOC, section 3.1: the loss
against steps is that of large-batch training); what became of the samples of those that ended; how many steps
went by before a newcomer's first samples were in one; and whether those that ended have one model.
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
from ragtag.recipes.dedloc.training import (
    CALM,
    HELD_OUT,
    CrewSetup,
    drawn_samples,
    first_model,
    large_batch,
)

RESULTS = Path(__file__).parent / "results" / "volunteers.json"
PEERS, TARGET, BATCH, BATCH_S, LIMIT_S = 8, 1024, 16, 0.1, 240.0
"""BATCH_S: what a batch takes on a peer of speed 1."""
LOSS = "loss=0.02"
POLL_S = 0.02


def setup(steps: int) -> CrewSetup:
    """The crew, as the recipe has it."""
    return CrewSetup(PEERS, TARGET, BATCH, steps, change=steps)


def until(folder: Path, what: str) -> str:
    """What a file of the run says, once it is there. Raises RuntimeError: it does not come."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if (folder / what).exists():
            return (folder / what).read_text()
        time.sleep(POLL_S)
    raise RuntimeError(f"{folder / what} did not come within {LIMIT_S:g} s")


def told(folder: Path, what: str, says: str) -> None:
    """Have a file of the run, whole at once."""
    (folder / f".{what}").write_text(says)
    (folder / f".{what}").replace(folder / what)


def peer(folder: Path, seed: int, steps: int, number: int) -> None:
    """One peer's training, as a user's script has it.

    number: of one that comes; -1: it is a founder's seat.
    """
    import torch
    from torch.nn import functional as F
    from torch.nn.utils import parameters_to_vector

    import ragtag
    import ragtag.app.join  # (`ragtag.join` imports it at first use)
    from ragtag.core.seed import generator

    torch.set_num_threads(1)
    judges = drawn_samples(0, -1, 0, HELD_OUT)
    model, sgd = first_model(setup(steps).hidden)
    if number >= 0:
        told(folder, f"warm.{number}", str(os.getpid()))
        until(folder, f"turn.{number}")
    began_at = -1
    with ragtag.join() as crew:
        me = crew.rank if number < 0 else number
        speed = json.loads((folder / "speeds").read_text())[me]
        optimizer = crew.optimizer(
            sgd, averager="allreduce", model=model, average="gradients", target_batch=TARGET, weight=BATCH
        )
        told(folder, f"pid.{me}", str(os.getpid()))
        assert optimizer.samples is not None
        until(folder, "go")
        pauses = generator(seed, "volunteers", me)
        losses: dict[int, float] = {}
        at = 0
        while crew.step < steps:
            time.sleep(BATCH_S / speed * pauses.uniform(0.8, 1.2))
            x, y = drawn_samples(seed, me, at, BATCH)
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            at += 1
            if began_at < 0 and optimizer.samples.counted > 0:
                began_at = crew.step
            if me == 0 and crew.step not in losses:
                with torch.no_grad():
                    losses[crew.step] = float(F.cross_entropy(model(judges[0]), judges[1]))
                told(folder, "step", str(crew.step))
        crew.finish()
        account = optimizer.samples
        assert account is not None
        ended = {
            "losses": losses,
            "in_at": began_at,
            "samples": {
                "computed": account.computed,
                "counted": account.counted,
                "pending": account.pending,
                "dropped": dict(account.dropped),
            },
            "goodput": account.goodput,
            "model": parameters_to_vector(model.parameters()).tolist(),
        }
        told(folder, f"peer.{me}", json.dumps(ended))


def crew(seed: int, steps: int, every: int) -> dict[str, Any]:
    """One crew; what came of it."""
    changes = list(range(every, steps, every))
    if len(changes) >= PEERS:
        raise SystemExit(f"{len(changes)} peers would die, and there are {PEERS}: take fewer steps")
    speeds = setup(steps).speeds(CALM)
    speeds += speeds[1 : 1 + len(changes)]  # one that comes is as fast as the one that dies then
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told(folder, "speeds", json.dumps(speeds))
        script = [str(Path(__file__).resolve()), "--peer", name, "--seed", str(seed), "--steps", str(steps)]
        run = [sys.executable, "-m", "ragtag", "run", "-n", str(PEERS), "--seed", str(seed), "--faults", LOSS]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        begun: list[subprocess.Popen[str]] = []

        def begin(command: list[str], says: str) -> None:
            with (folder / says).open("w") as said:
                begun.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, text=True)
                )

        try:
            begin([*run, "--no-watch", "-o", f"{name}/run", *script], "said")
            for number in range(PEERS):
                until(folder, f"pid.{number}")
            for number in range(PEERS, PEERS + len(changes)):
                join = [sys.executable, "-m", "ragtag", "join", f"{name}/run"]
                begin([*join, *script, "--number", str(number)], f"said.{number}")
            for number in range(PEERS, PEERS + len(changes)):
                until(folder, f"warm.{number}")
            told(folder, "go", "")
            began_s = time.monotonic()
            until(folder, "step")
            for dies, at in enumerate(changes, 1):
                comes = PEERS + dies - 1
                while int((folder / "step").read_text()) < at:
                    if time.monotonic() > began_s + LIMIT_S:
                        raise RuntimeError(
                            f"the crew has not come to step {at}: {(folder / 'said').read_text()}"
                        )
                    time.sleep(POLL_S)
                os.kill(int((folder / f"pid.{dies}").read_text()), signal.SIGKILL)
                told(folder, f"turn.{comes}", str(at))
            for process in begun:
                process.wait(LIMIT_S)
            took_s = time.monotonic() - began_s
        finally:
            for process in begun:
                process.kill()
        there = sorted(set(range(PEERS + len(changes))) - set(range(1, 1 + len(changes))))
        missing = [number for number in there if not (folder / f"peer.{number}").exists()]
        if missing:
            said = [one.read_text()[-2000:] for one in sorted(folder.glob("said*"))]
            raise RuntimeError(f"peers {missing} did not end: {said}")
        ended = {number: json.loads((folder / f"peer.{number}").read_text()) for number in there}
    return measured(ended, changes, seed, took_s)


def measured(ended: dict[int, Any], changes: list[int], seed: int, took_s: float) -> dict[str, Any]:
    """What those that ended have told."""
    samples = [one["samples"] for one in ended.values()]
    computed = sum(each["computed"] for each in samples)
    dropped = sum(sum(each["dropped"].values()) for each in samples)
    unaccounted = max(
        abs(each["computed"] - each["counted"] - each["pending"] - sum(each["dropped"].values()))
        for each in samples
    )
    first = ended[0]["model"]
    apart = max(
        abs(a - b) for one in ended.values() for a, b in zip(first, one["model"], strict=True)
    )  # as float32 values, printed in full
    row = {
        "seed": seed,
        "losses": {int(step): loss for step, loss in ended[0]["losses"].items()},
        "took_s": took_s,
        "dropped": dropped / computed,
        "unaccounted": unaccounted,
        "steps_to_come": [ended[PEERS + n]["in_at"] - at for n, at in enumerate(changes)],
        "goodput": fmean(one["goodput"] for one in ended.values()),
        "apart": apart,
    }
    print(
        f"seed {seed}: {len(row['losses'])} steps seen at peer 0 in {took_s:.0f} s; {row['dropped']:.2%} of "
        f"the samples dropped, {unaccounted:g} unaccounted; newcomers' first samples in a step after "
        f"{', '.join(map(str, row['steps_to_come']))} steps; goodput {row['goodput']:.0%}; "
        f"models of those that ended {apart:g} apart",
        flush=True,
    )
    return row


def windows(rows: list[dict[str, Any]], steps: int) -> list[dict[str, float]]:
    """Each window's loss, by its mean over seeds, beside the band of one process with the large batch."""
    from ragtag.recipes.dedloc.compare import WINDOW, spans
    from ragtag.recipes.dedloc.recipe import ALONE, BAND_SEED

    band = spans([large_batch(setup(steps), BAND_SEED + seed) for seed in range(ALONE)])
    found = []
    for at, span in enumerate(band):
        seen = [
            fmean(loss for step, loss in row["losses"].items() if at * WINDOW < step <= (at + 1) * WINDOW)
            for row in rows
        ]
        low, high = span.low - span.apart, span.high + span.apart
        found.append({"loss": fmean(seen), "low": low, "high": high, "outside": not span.has(fmean(seen))})
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps of the crew between two changes")
    parser.add_argument("--out", type=Path, default=None, help=f"a JSON file, such as {RESULTS}")
    parser.add_argument("--peer", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=-1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer is not None:
        peer(asked.peer, asked.seed, asked.steps, asked.number)
        return
    made = how()
    rows = [crew(seed, asked.steps, asked.every) for seed in range(asked.seeds)]
    seen = windows(rows, asked.steps)
    for at, window in enumerate(seen):
        print(
            f"window {at}: loss {window['loss']:.4f}, band {window['low']:.4f} to {window['high']:.4f}"
            f"{', outside' if window['outside'] else ''}"
        )
    if asked.out is not None:
        found = {
            "peers": PEERS,
            "target": TARGET,
            "steps": asked.steps,
            "every": asked.every,
            "seeds": asked.seeds,
            "windows": seen,
            "outside": sum(window["outside"] for window in seen),
            "dropped": max(row["dropped"] for row in rows),
            "unaccounted": max(row["unaccounted"] for row in rows),
            "steps_to_come": median(n for row in rows for n in row["steps_to_come"]),
            "most_steps_to_come": max(n for row in rows for n in row["steps_to_come"]),
            "apart": max(row["apart"] for row in rows),
            "goodput": fmean(row["goodput"] for row in rows),
            "rows": rows,
        }
        asked.out.write_text(json.dumps({**made, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
