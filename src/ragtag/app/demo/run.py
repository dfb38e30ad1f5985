"""Runs the whole demo, puts its runs beside each other, and prints what came out."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ragtag.app.demo.peer import weights_file
from ragtag.app.demo.processes import DemoError, DemoPlan, DemoRun, Processes
from ragtag.app.demo.task import evaluate, load_digits, make_model
from ragtag.app.report import build_report
from ragtag.app.tracefile import CREW_FILE, TraceWriter, last_leaves, read_run
from ragtag.app.words import seconds
from ragtag.core import trace
from ragtag.core.faults import Faults


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, over ``n`` times."""

    n: int
    median_s: float
    p95_s: float
    longest_s: float

    @classmethod
    def of(cls, took_s: Sequence[float]) -> Times:
        """Figures of these durations."""
        times = np.array(took_s)
        return cls(len(took_s), float(np.median(times)), float(np.quantile(times, 0.95)), float(times.max()))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """How long rounds took: whole, from the end of one average to the end of the next (local steps and
    averaging), and averaging alone.

    A stopped process takes no rounds, so each peer's own times leave out the round in which it was stopped.
    """

    whole: Times
    averaging: Times
    arrived: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo came to; accuracies in 0 to 1, on the test samples.

    survivors, calm: mean over the peers' own models.
    survivors_mean, calm_mean: of the mean of their models.
    around: by "freeze" and "kill": how many rounds each survivor took, at least, before and after it.
    alike: whether the survivors hold the same model after their end, bit for bit.
    story: what went wrong, in words.
    """

    survivors: float
    survivors_lowest: float
    survivors_mean: float
    calm: float
    calm_mean: float
    alone: float
    all_data: float
    samples: dict[str, int]
    round_times: RoundTimes
    calm_round_times: RoundTimes
    around: dict[str, tuple[int, int]]
    training_s: dict[str, float]
    alike: bool
    story: str
    report: Path
    folder: Path
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all that was promised holds."""
        return all(self.checks.values())

    def to_json(self) -> dict[str, Any]:
        """As one JSON document."""
        return {**asdict(self), "report": str(self.report), "folder": str(self.folder), "ok": self.ok}


def demo_round_times(folder: Path, peers: Sequence[int]) -> RoundTimes:
    """Round times over the given peers' traces, and the share of what others sent that was averaged."""
    rounds, faults = _seen(folder, peers)
    whole: list[float] = []
    averaging: list[float] = []
    arrived: list[float] = []
    for peer, ended in rounds.items():
        stopped = [(f.t, _over_t(f, math.inf)) for f in faults if f.name == "freeze" and f.peer == peer]
        for before, one in zip([None, *ended], ended, strict=False):
            began_t = 0.0 if before is None else before.t
            if any(from_t < one.t and began_t < until_t for from_t, until_t in stopped):
                continue
            averaging.append(one.total_s)
            arrived.append(one.arrived)
            if before is not None:
                whole.append(one.t - before.t)
    if not whole:
        raise DemoError(f"no rounds were traced in {folder}")
    return RoundTimes(Times.of(whole), Times.of(averaging), float(np.mean(arrived)))


def rounds_around(folder: Path, peers: Sequence[int]) -> dict[str, tuple[int, int]]:
    """How many rounds each of these peers took, at least, before a process was frozen or killed, and after.

    A fault that came before the training or after it shows nothing, whatever else holds.
    """
    rounds, faults = _seen(folder, peers)
    return {
        fault.name: (
            min(sum(one.t < fault.t for one in ended) for ended in rounds.values()),
            min(sum(one.t > _over_t(fault, fault.t) for one in ended) for ended in rounds.values()),
        )
        for fault in faults
    }


def _seen(folder: Path, peers: Sequence[int]) -> tuple[dict[int, list[trace.Round]], list[trace.Fault]]:
    """The rounds in which these peers averaged the model, by peer, and what befell processes of the run."""
    rounds: dict[int, list[trace.Round]] = {peer: [] for peer in peers}
    faults: list[trace.Fault] = []
    for record in read_run(folder).records():
        if isinstance(record, trace.Fault) and record.name in ("freeze", "kill"):
            faults.append(record)
        elif isinstance(record, trace.Round) and record.peer in rounds and record.channel in (0, "model"):
            rounds[record.peer].append(record)
    return rounds, faults


def _over_t(fault: trace.Fault, without: float) -> float:
    """When a fault was over; ``without``: where that is not traced."""
    return without if fault.until_t is None else fault.until_t


def ended_alike(folder: Path, peers: Sequence[int]) -> bool:
    """Whether these peers have ended with one model, as their traces say."""
    leaves = last_leaves(folder)
    ended = {leaves[peer].digest if peer in leaves else "" for peer in peers}
    return len(ended) == 1 and "" not in ended


POINTS_MAX = 1.0
"""How far the survivors may end below the calm run, in points of accuracy."""
ROUNDS_AROUND_MIN = 10
"""So many rounds come before each fault of a process and after it."""
P95_MAX, LONGEST_MAX = 2.0, 5.0
"""How long rounds may take, in medians."""
OF_CALM_MAX = 1.5
"""How long the median round may take with faults, in the calm run's. Seconds would judge the machine."""


def judge(
    plan: DemoPlan, folder: Path, main: DemoRun, calm: DemoRun, alone: DemoRun, all_data: DemoRun
) -> DemoResult:
    """What the runs came to, and whether all that was promised holds.

    folder: of the whole demo.
    """
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
        round_times=demo_round_times(main.folder, plan.survivors),
        calm_round_times=demo_round_times(calm.folder, everybody),
        around=rounds_around(main.folder, plan.survivors),
        training_s={run.name: run.trained_s for run in runs},
        story=plan.story(calm.trained_s),
        alike=ended_alike(main.folder, plan.survivors),
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
        "the survivors end with the same model": result.alike,
        f"the freeze and the death at least {ROUNDS_AROUND_MIN} rounds from start and end": all(
            min(result.around.get(name, (0, 0))) >= ROUNDS_AROUND_MIN for name in ("freeze", "kill")
        ),
        f"the median round within {OF_CALM_MAX:g} calm ones": whole.median_s
        <= OF_CALM_MAX * result.calm_round_times.whole.median_s,
    }


def _of_mean(plan: DemoPlan, run: DemoRun, peers: Sequence[int]) -> float:
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


def show(plan: DemoPlan, result: DemoResult, console: Console) -> None:
    """Print accuracies beside each other, round times, what was promised, and where the report lies."""
    console.print()
    console.print(_table(plan, result))
    console.print("\n" + _sentence(result))
    for name, ok in result.checks.items():
        console.print(f"  [green]yes[/]  {name}" if ok else f"  [red]no[/]   {name}")
    console.print(f"\nReport: {result.report}", soft_wrap=True)


def _table(plan: DemoPlan, result: DemoResult) -> Table:
    table = Table(title="Accuracy on 597 test digits", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("run")
    for name in ("own models", "their mean", "samples"):
        table.add_column(name, justify="right")
    survivors = f"{len(plan.survivors)} survivors of {plan.peers}: {result.story}"
    calm = f"{plan.peers} peers, the same without faults"
    rows = (
        (survivors, result.survivors, result.survivors_mean, "crew"),
        (calm, result.calm, result.calm_mean, "calm"),
        ("one peer alone on its shard", result.alone, None, "alone"),
        ("one process on all the data", result.all_data, None, "all-data"),
    )
    for name, own, mean, key in rows:
        shown = "" if mean is None else f"{mean:.1%}"
        table.add_row(name, f"{own:.1%}", shown, f"{result.samples[key]:,}")
    return table


def _sentence(result: DemoResult) -> str:
    """Round times in words, with the three figures marked."""
    times = result.round_times

    def figures(of: Times) -> str:
        p95, longest = of.p95_s / of.median_s, of.longest_s / of.median_s
        return (
            f"median [bold]{of.median_s * 1e3:.0f} ms[/], "
            f"95th percentile [bold]{of.p95_s * 1e3:.0f} ms[/] ({p95:.1f} medians), "
            f"longest [bold]{of.longest_s * 1e3:.0f} ms[/] ({longest:.1f} medians)"
        )

    return (
        f"Rounds of the survivors, faults included ({times.whole.n:,}): {figures(times.whole)}.\n"
        f"The calm run's: {figures(result.calm_round_times.whole)}.\n"
        f"Averaging alone: {figures(times.averaging)}; "
        f"{times.arrived:.1%} of what the others sent was averaged.\n"
        f"All runs together trained for {seconds(sum(result.training_s.values()))}."
    )


def run_demo(
    *,
    plan: DemoPlan | None = None,
    folder: Path | None = None,
    console: Console | None = None,
    live: bool = True,
) -> DemoResult:
    """Run the whole demo and print what came out.

    folder: where the traces and the report go (by default a new one under the system's temporary folder).
    live: show the peers while they train. It must be called from the main thread.

    Raises:
        DemoError: a peer that should live has failed.
        DataMissing: scikit-learn is not installed.
    """
    plan = plan or DemoPlan()
    console = console or Console()
    load_digits(plan.seed)  # fail before anything is started
    folder = folder or Path(tempfile.mkdtemp(prefix="ragtag-demo-"))
    demo = Processes(plan, folder, console, live)
    calm = demo.crew("calm", Faults(), "without faults, to compare with")
    alone = demo.single("alone", plan.rounds, "one peer alone on its shard", alone_with=0)
    rounds = -(-calm.samples() // (plan.every * alone.batch()))
    everything = demo.single("all-data", rounds, "one process on all the data, as many samples")
    main = demo.crew("crew", plan.faults(calm.trained_s), plan.story(calm.trained_s))
    result = judge(plan, folder, main, calm, alone, everything)
    show(plan, result, console)
    return result
