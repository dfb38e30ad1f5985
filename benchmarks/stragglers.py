"""What a peer that is twenty times slower costs the others: real processes on loopback, by ``ragtag run``.

    python benchmarks/stragglers.py                          # 4 peers, 50 ms steps, one sleeps 1 s more
    python benchmarks/stragglers.py --seconds 8 --repeats 1  # in small
    python benchmarks/stragglers.py --schedules every        # what the others beside it come to

Each schedule runs calm and with the sleeper, by turns. A step is a real one on the digits of scikit-learn,
padded by sleep to ``--step-s``, so that four processes fit on two cores. Throughput is steps per second of
the peers that do not sleep, after ``WARM_STEPS``; accuracy is that of their own models on the test samples,
the mean over ``LOOKS`` models of the last steps (one alone errs by two points and more), which are looked at
when the time is over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.demo.task import LEARNING_RATE, evaluate, load_digits, make_model
from ragtag.schedules.base import Schedule
from ragtag.schedules.grouping import ProgressiveGrouping
from stored import how

RESULTS = Path(__file__).parent / "results" / "stragglers.json"
WARM_STEPS = 20
BATCH = 16
LOOKS, LOOK_EVERY = 20, 4
"""Models that are looked at in the end, and the steps between them."""
GOAL = {"throughput": 0.95, "accuracy_points": 1.0}
SCHEDULES = ("partial", "ssp", "matched", "grouping", "every")


def schedule_of(name: str) -> Schedule | ProgressiveGrouping:
    """The schedule that a name on the command line means."""
    schedules = ragtag.schedules
    made: dict[str, Schedule | ProgressiveGrouping] = {
        "every": schedules.EveryStep(),
        "partial": schedules.Partial(),
        "ssp": schedules.SSP(bound=4),
        "matched": schedules.Matched(),
        "grouping": schedules.ProgressiveGrouping(),
    }
    return made[name]


def train(arguments: argparse.Namespace) -> None:
    """One peer: train for so long, and leave figures in a file."""
    torch.set_num_threads(1)
    with ragtag.join() as crew:
        digits = load_digits(crew.seed)
        model = make_model(crew.seed)
        optimizer = crew.optimizer(
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            model=model,
            schedule=schedule_of(arguments.schedule),
            weight="samples",
        )
        data = TensorDataset(digits.train_images, digits.train_labels)
        split = crew.split(DataLoader(data, batch_size=BATCH, shuffle=True))
        more_s = arguments.sleep_s if crew.rank == crew.size - 1 else 0.0
        ends: list[float] = []
        kept: deque[torch.Tensor] = deque(maxlen=LOOKS)
        until_s = None
        while until_s is None or ends[-1] < until_s:
            for inputs, targets in split:
                began_s = time.monotonic()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                time.sleep(max(0.0, began_s + arguments.step_s - time.monotonic()) + more_s)
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.monotonic())
                if more_s or len(ends) % LOOK_EVERY == 0:
                    kept.append(parameters_to_vector(model.parameters()).detach().clone())
                crew.log_step(float(loss), len(targets))
                until_s = until_s or ends[0] + arguments.seconds
                if ends[-1] >= until_s:
                    break
        looks = []
        for vector in kept:
            vector_to_parameters(vector, model.parameters())
            looks.append(evaluate(model, digits))
        test_loss, accuracy = (statistics.fmean(values) for values in zip(*looks, strict=True))
        crew.log_eval(accuracy, test_loss, n=len(digits.test_labels))
        warm = min(WARM_STEPS, len(ends) // 2)
        figures = {
            "peer": crew.rank,
            "steps": len(ends),
            "steps_per_s": (len(ends) - 1 - warm) / (ends[-1] - ends[warm]) if len(ends) > 2 else 0.0,
            "rounds": -1 if optimizer.outcome is None else optimizer.outcome.round,
            "accuracy": accuracy,
            "loss": test_loss,
        }
        (Path(arguments.out) / f"figures-{crew.rank}.json").write_text(json.dumps(figures))


def measure(arguments: argparse.Namespace, schedule: str, sleep_s: float, seed: int) -> dict[str, Any]:
    """One run of the crew."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(arguments.keep or folder) / f"{schedule}-{'slowed' if sleep_s else 'calm'}-{seed}"
        command = [
            *(
                sys.executable,
                "-m",
                "ragtag.app.cli.main",
                "run",
                "-n",
                str(arguments.peers),
                "--seed",
                str(seed),
            ),
            *("--no-watch", "--json", "-o", str(trace), __file__),
            *("--worker", "--schedule", schedule, "--sleep-s", str(sleep_s), "--out", folder),
            *("--seconds", str(arguments.seconds), "--step-s", str(arguments.step_s)),
        ]
        deadline_s = 3 * arguments.seconds + 120.0
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        if done.returncode:
            raise RuntimeError(f"the crew failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        of = [
            json.loads((Path(folder) / f"figures-{peer}.json").read_text()) for peer in range(arguments.peers)
        ]
    fast = of[:-1]
    return {
        "seed": seed,
        "throughput": statistics.fmean(figures["steps_per_s"] for figures in fast),
        "accuracy": statistics.fmean(figures["accuracy"] for figures in fast),
        "last": of[-1],
        "others": fast,
    }


def compare(arguments: argparse.Namespace, schedule: str) -> dict[str, Any]:
    """Calm runs and runs with the sleeper, by turns."""
    calm, slowed = [], []
    for seed in range(arguments.repeats):
        turns = [(calm, 0.0), (slowed, arguments.sleep_s)]
        for into, sleep_s in turns if seed % 2 == 0 else reversed(turns):
            into.append(measure(arguments, schedule, sleep_s, seed))
    ratios = [b["throughput"] / a["throughput"] for a, b in zip(calm, slowed, strict=True)]
    points = [100 * (b["accuracy"] - a["accuracy"]) for a, b in zip(calm, slowed, strict=True)]
    result = {
        "schedule": schedule,
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "accuracy_points": statistics.fmean(points),
        "calm": calm,
        "slowed": slowed,
    }
    print(
        f"{schedule:>8}: others' throughput {result['throughput_ratio']:.1%} of calm "
        f"({statistics.median(run['throughput'] for run in calm):.2f} steps/s calm), accuracy "
        f"{result['accuracy_points']:+.2f} points "
        f"({statistics.fmean(run['accuracy'] for run in calm):.1%} calm); "
        f"the sleeper took {slowed[0]['last']['steps']} steps, accuracy {slowed[0]['last']['accuracy']:.1%}",
        flush=True,
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--sleep-s", type=float, default=1.0, help="that the last peer sleeps in each step")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each run")
    parser.add_argument("--repeats", type=int, default=3, help="seeds; a calm and a slowed run of each")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--keep", default="", help="folder that keeps the runs' traces")
    parser.add_argument(
        "--out", default=str(RESULTS), help="where to write; what is there of other schedules stays"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="partial", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments)
        return 0
    made = how() | {
        "peers": arguments.peers,
        "step_s": arguments.step_s,
        "sleep_s": arguments.sleep_s,
        "seconds": arguments.seconds,
    }
    path = Path(arguments.out)
    kept: list[dict[str, Any]] = json.loads(path.read_text())["schedules"] if path.exists() else []
    for schedule in arguments.schedules:
        kept = [one for one in kept if one["schedule"] != schedule] + [compare(arguments, schedule) | made]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"goal": GOAL, "schedules": kept}, indent=2) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
