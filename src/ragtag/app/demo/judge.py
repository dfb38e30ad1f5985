"""Puts the demo's runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ragtag.app.demo.peer import weights_file
from ragtag.app.demo.plan import Plan
from ragtag.app.demo.processes import DemoRun
from ragtag.app.demo.result import DemoResult, round_times
from ragtag.app.demo.task import evaluate, load_digits, make_model
from ragtag.app.report import build_report
from ragtag.app.tracefile import CREW_FILE, TraceWriter
from ragtag.core import trace

POINTS_MAX = 1.0
"""How far the survivors may end below the calm run, in points of accuracy."""
P95_MAX, LONGEST_MAX = 2.0, 5.0
"""How long rounds may take, in medians."""
TRAINING_MAX_S = 90.0
"""How long all runs together may train."""


def judge(
    plan: Plan, folder: Path, main: DemoRun, calm: DemoRun, alone: DemoRun, all_data: DemoRun
) -> DemoResult:
    """What the runs came to, and whether all that was promised holds. folder: of the whole demo."""
    everybody = tuple(range(plan.peers))
    survivors, calm_own = main.accuracy(plan.survivors), calm.accuracy(everybody)
    survivors_mean = _of_mean(plan, main, plan.survivors)
    _append_mean(main, survivors_mean)
    runs = (calm, alone, all_data, main)
    result = DemoResult(
        survivors=float(np.mean(survivors)),
        survivors_lowest=min(survivors),
        survivors_mean=survivors_mean,
        calm=float(np.mean(calm_own)),
        calm_mean=_of_mean(plan, calm, everybody),
        alone=alone.accuracy((0,))[0],
        all_data=all_data.accuracy((0,))[0],
        samples={run.name: run.samples() for run in (main, calm, alone, all_data)},
        round_times=round_times(main.folder, plan.survivors),
        calm_round_times=round_times(calm.folder, everybody),
        training_s={run.name: run.trained_s for run in runs},
        report=build_report(main.folder),
        folder=folder,
    )
    result.checks.update(checks(result))
    return result


def checks(result: DemoResult) -> dict[str, bool]:
    """What is promised, and whether it holds."""
    whole = result.round_times.whole
    return {
        f"survivors within {POINTS_MAX:g} point of the calm run": result.survivors
        >= result.calm - POINTS_MAX / 100,
        f"95 % of rounds within {P95_MAX:g} medians": whole.p95_s <= P95_MAX * whole.median_s,
        f"the longest within {LONGEST_MAX:g} medians": whole.longest_s <= LONGEST_MAX * whole.median_s,
        f"training within {TRAINING_MAX_S:g} s": sum(result.training_s.values()) <= TRAINING_MAX_S,
    }


def _of_mean(plan: Plan, run: DemoRun, peers: Sequence[int]) -> float:
    """The accuracy of the mean of the peers' models."""
    flat = np.mean([np.load(weights_file(run.folder, p), allow_pickle=False) for p in peers], axis=0)
    model = make_model(plan.seed)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(flat.astype(np.float32)), model.parameters())
    return evaluate(model, load_digits(plan.seed))[1]


def _append_mean(run: DemoRun, accuracy: float) -> None:
    """Put the mean model's accuracy at the end of the run's trace, for its report."""
    last = max(ended.rounds for ended in run.ended.values())
    with TraceWriter(run.folder / CREW_FILE) as writer:
        writer.write(trace.Eval(t=run.wall_s, peer=-1, model="mean", step=last, accuracy=accuracy))
