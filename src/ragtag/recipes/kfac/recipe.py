"""Reproduces distributed K-FAC: fewer steps than SGD, alone and in a crew that loses peers and datagrams.

"Convolutional Neural Network Training with Distributed K-FAC", Pauloski, Zhang, Huang, Xu, Foster, SC 2020
(arXiv 2007.00784): K-FAC ends a run of half as many epochs within half a point of SGD. "KAISA", Pauloski and
others, SC 2021: who preconditions which layer changes what travels, and no gradient. Muon and AdamW stand
beside them, each method with as many settings tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from ragtag.recipes.base import Figure, Progress, Report, Row, Table, number, require_counts, row
from ragtag.recipes.drawing import FAINT, PALETTE, band, canvas, style, svg
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.kfac.training import (
    ADAMW_NAME,
    BATCH,
    CALM,
    FACTOR_EVERY,
    GRIDS,
    INVERSE_EVERY,
    KFAC_NAME,
    KILL_AND_FREEZE,
    MUON_NAME,
    PEERS,
    SGD_NAME,
    TARGET,
    WORLDS,
    Settings,
    TrainedNet,
    in_crew,
    in_one_process,
)
from ragtag.recipes.tasks.cifar import unpacked
from ragtag.training.kfac import Placement

SHARE = 0.6
"""K-FAC's steps over SGD's."""
POINT = 0.005
OVERHEAD = 1.5
"""The goal for a step's processor time over SGD's. It is a table's: another machine has other figures."""
TUNING_SEEDS = (100, 101)
TUNED = {
    SGD_NAME: Settings(SGD_NAME, 0.3),
    ADAMW_NAME: Settings(ADAMW_NAME, 0.02),
    MUON_NAME: Settings(MUON_NAME, 0.3, 0.02),
    KFAC_NAME: Settings(KFAC_NAME, 0.3, damping=0.1, kl_clip=0.01),
}
"""What the full form's sweep chose on digits (``benchmarks/results/reproduce_kfac.json``, which a test holds
it to). The quick form and CIFAR-10 take them."""
PLACEMENTS: tuple[Placement, ...] = ("communication", 0.5, "memory")
PLACED_STEPS = 12

SC20 = "Pauloski et al., SC 2020"
KAISA = "Pauloski et al., SC 2021"
GOAL = "goal"
NOTES = (
    f"One process has joint batches of {BATCH}. A crew's peers have an eighth each, average gradients in "
    "each step, and repair what is lost of them. What is lost of factors stays lost.",
    "All methods have a learning rate that rises for five steps and falls to 0 at the end of their run "
    "(cosine): so a run of fewer steps is another run, and not the beginning of a longer one.",
    f"Each method has six settings, tried with seeds {', '.join(map(str, TUNING_SEEDS))} at the length at "
    "which it is judged; the best mean accuracy counts, then the lowest loss.",
    f"K-FAC has factors of samples' own losses (scaling='fisher') every {FACTOR_EVERY} steps, and "
    f"decompositions every {INVERSE_EVERY}.",
    "In a crew, what is compared is peer 0. The longest step is over peers that were neither killed nor "
    "frozen. What is killed or frozen is so while others train: nothing fails before the first step.",
    "Not judged: AdamW and Muon, which no figure of the paper is about; processor time, which is the "
    "machine's.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make.

    steps: SGD's; K-FAC has ``SHARE`` of them.
    tune: try all settings. Else ``TUNED`` counts.
    worlds: of crews.
    """

    seeds: tuple[int, ...]
    steps: int
    tune: bool
    worlds: tuple[str, ...]

    @staticmethod
    def of(*, quick: bool, digits: bool, seeds: int) -> Plan:
        """All runs; quick: settings as they were tuned before, and the two worlds that matter most."""
        if not digits:
            few: tuple[str, ...] = () if quick else (CALM, KILL_AND_FREEZE)
            return Plan(tuple(range(1 if quick else seeds)), 60 if quick else 600, tune=False, worlds=few)
        worlds = (CALM, KILL_AND_FREEZE) if quick else tuple(WORLDS)
        return Plan(tuple(range(seeds)), 100, tune=not quick, worlds=worlds)

    @property
    def fewer(self) -> int:
        """K-FAC's steps."""
        return round(SHARE * self.steps)

    def length(self, method: str) -> int:
        """The steps at which a method is tuned."""
        return self.fewer if method == KFAC_NAME else self.steps


@dataclass(slots=True)
class Results:
    """What came out.

    tried: every setting's runs.
    tuned: what was chosen, by method.
    trained: runs alone, by method and steps.
    crews: by world; by placement.
    """

    tried: list[TrainedNet]
    tuned: dict[str, Settings]
    trained: dict[tuple[str, int], list[TrainedNet]]
    crews: dict[str, list[TrainedNet]]
    placed: dict[Placement, TrainedNet]


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 3,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Train everything, compare, and write ``index.html``, ``results.json`` and a figure to ``out``.

    quick: settings as they were tuned before; fewer worlds.
    data: a tar archive of CIFAR-10 images in place of scikit-learn's digits, and a ResNet of 8 layers.
    jobs: processes side by side.
    progress: called as runs end.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is not such an archive.
    """
    require_counts(seeds, jobs)
    plan = Plan.of(quick=quick, digits=data is None, seeds=seeds)
    with unpacked(data, out) as arrays:
        results = ran(plan, arrays, jobs, progress, out)
    report = Report(
        name="kfac",
        title="Distributed K-FAC (Pauloski et al. 2020, 2021)",
        settings={
            "task": "digits" if data is None else "CIFAR-10",
            "peers": PEERS,
            "batch": BATCH,
            "steps": f"{plan.steps}, K-FAC {plan.fewer}",
            "seeds": len(plan.seeds),
            "quick": quick,
        },
        rows=rows(plan, results),
        tables=tables(plan, results),
        figures=[curves_of(plan, results)],
        notes=list(NOTES),
        data={
            "tried": [asdict(one) for one in results.tried],
            "trained": [asdict(one) for runs in results.trained.values() for one in runs],
            "crews": {world: [asdict(one) for one in runs] for world, runs in results.crews.items()},
        },
    )
    report.write(out)
    return report


def ran(plan: Plan, arrays: Path | None, jobs: int, progress: Progress | None, out: Path) -> Results:
    """Tune, then train with what was chosen."""
    tuned, tried = TUNED, list[TrainedNet]()
    if plan.tune:
        asked = [(how, seed) for grid in GRIDS.values() for how in grid for seed in TUNING_SEEDS]
        calls = [
            Job(f"{h.method}, {h.text}, seed {s}", in_one_process, (h, s, plan.length(h.method), arrays))
            for h, s in asked
        ]
        tried = run_jobs(calls, jobs, progress, out)
        tuned = {method: best([one for one in tried if one.settings.method == method]) for method in GRIDS}
    kinds = [(how, steps) for how in tuned.values() for steps in (plan.steps, plan.fewer)]
    calls = [
        Job(f"{how.method}, {steps} steps, seed {seed}", in_one_process, (how, seed, steps, arrays))
        for how, steps in kinds
        for seed in plan.seeds
    ]
    kfac = tuned[KFAC_NAME]
    calls += [
        Job(
            f"crew, {world}, seed {seed}",
            in_crew,
            (kfac, world, seed, plan.fewer, "communication", False, arrays),
        )
        for world in plan.worlds
        for seed in plan.seeds
    ]
    calls += [
        Job(f"crew, placement {placement}", in_crew, (kfac, CALM, 0, PLACED_STEPS, placement, True, arrays))
        for placement in PLACEMENTS
    ]
    left = iter(run_jobs(calls, jobs, progress, out))
    trained = {(how.method, steps): [next(left) for _ in plan.seeds] for how, steps in kinds}
    crews = {world: [next(left) for _ in plan.seeds] for world in plan.worlds}
    return Results(tried, dict(tuned), trained, crews, {placement: next(left) for placement in PLACEMENTS})


def best(runs: Sequence[TrainedNet]) -> Settings:
    """The settings with the best mean accuracy over their seeds; of equals, with the lowest loss."""
    by: dict[Settings, list[TrainedNet]] = {}
    for run in runs:
        by.setdefault(run.settings, []).append(run)
    return max(by, key=lambda how: (_accuracy(by[how]), -fmean(run.loss for run in by[how])))


def rows(plan: Plan, results: Results) -> list[Row]:
    """What is judged."""
    found: list[Row] = []
    sgd = [one.accuracy for one in results.trained[SGD_NAME, plan.steps]]
    kfac = [one.accuracy for one in results.trained[KFAC_NAME, plan.fewer]]
    group = f"K-FAC after {SHARE:.0%} of SGD's steps"
    below = [a - b for a, b in zip(sgd, kfac, strict=True)]
    what = "accuracy below SGD's after all"
    found.append(_mean(what, below, POINT, "<=", f"{SC20}: half the epochs, .22 points", group))
    short = [one.accuracy for one in results.trained[SGD_NAME, plan.fewer]]
    gain = [b - a for a, b in zip(short, kfac, strict=True)]
    found.append(_mean("accuracy above SGD's after as many", gain, 0.0, ">=", "steps have to matter", group))
    group = "In a crew of eight, whose factors are averaged and whose peers decompose"
    base = sum(run.reached for run in results.crews.get(CALM, ()))
    for world, runs in results.crews.items():
        if world != CALM and base:
            ratio = sum(run.reached for run in runs) / base
            what = f"{world}: steps to {TARGET:.0%} over the calm crew's"
            found.append(row(what, ratio, 1.1, 0.0, GOAL, relation="<=", group=group))
        what, longest = f"{world}: longest step, in medians", max(run.longest for run in runs)
        found.append(row(what, longest, 3.0, 0.0, GOAL, relation="<=", group=group))
    group = f"Who preconditions: the models after {PLACED_STEPS} steps"
    values = np.array(results.placed[PLACEMENTS[0]].values)
    for placement in PLACEMENTS[1:]:
        there = np.array(results.placed[placement].values)
        apart = float(np.linalg.norm(there - values) / np.linalg.norm(values))
        source = f"{KAISA}: the same within float error"
        found.append(row(f"placement {placement}: apart", apart, 0.0, 1e-4, source, group=group))
    least = results.placed[PLACEMENTS[0]].bytes_sent
    most = results.placed[PLACEMENTS[-1]].bytes_sent
    what = "bytes with placement memory, over communication's"
    found.append(row(what, most / least, 1.0, 0.0, f"{KAISA}: gradients travel", relation=">=", group=group))
    return found


def tables(plan: Plan, results: Results) -> list[Table]:
    """All methods; what was tuned; the goals that are not judged."""
    lines = []
    sgd_cpu_s = fmean(one.step_cpu_s for one in results.trained[SGD_NAME, plan.steps])
    for (method, steps), runs in results.trained.items():
        cpu_s = fmean(one.step_cpu_s for one in runs)
        lines.append(
            (
                method,
                f"{steps}",
                _range([run.accuracy for run in runs]),
                number(fmean(run.loss for run in runs), 3),
                f"{1e3 * cpu_s:.1f}",
                f"{cpu_s / sgd_cpu_s:.1f}",
            )
        )
    columns = ("method", "steps", "accuracy", "loss", "CPU ms per step", "over SGD's")
    found = [Table(f"One process: mean and range over {len(plan.seeds)} seeds", columns, tuple(lines))]
    kfac_cpu_s = fmean(one.step_cpu_s for one in results.trained[KFAC_NAME, plan.fewer])
    ratio = kfac_cpu_s / sgd_cpu_s
    verdict = "met" if ratio <= OVERHEAD else "MISSED"
    goal = (("a step's processor time over SGD's", f"{OVERHEAD}", f"{ratio:.2f}", verdict),)
    found.append(Table("Goals of this machine", ("what", "at most", "measured", ""), goal))
    if results.crews:
        in_crews = [
            (
                world,
                _range([run.accuracy for run in runs]),
                f"{fmean(run.reached for run in runs):.1f}",
                f"{max(run.longest for run in runs):.2f}",
                f"{fmean(run.bytes_sent for run in runs) / 1e6:.1f}",
                f"{max(run.oldest for run in runs)}",
            )
            for world, runs in results.crews.items()
        ]
        reached = f"steps to {TARGET:.0%}"
        heads = ("world", "accuracy", reached, "longest step, medians", "MB sent per peer", "oldest basis")
        found.append(Table(f"K-FAC in a crew of {PEERS}, {plan.fewer} steps", heads, tuple(in_crews)))
    chosen = tuple((method, how.text) for method, how in results.tuned.items())
    found.append(Table("Settings", ("method", "the best of six" if plan.tune else "tuned before"), chosen))
    return found


def curves_of(plan: Plan, results: Results) -> Figure:
    """Accuracy against steps and against processor time."""
    drawn = canvas(11.0, 4.2)
    by_step, by_time = drawn.subplots(1, 2, sharey=True)
    for (method, steps), colour in zip(
        [(m, plan.length(m)) for m in GRIDS], (PALETTE[0], PALETTE[2], PALETTE[6], PALETTE[3]), strict=True
    ):
        runs = results.trained[method, steps]
        curves = [[100 * value for value in run.curve] for run in runs]
        at = [steps * (i + 1) / len(curves[0]) for i in range(len(curves[0]))]
        how = {"color": colour, "linewidth": 1.5, "label": f"{method}, {steps} steps"}
        band(by_step, at, curves, **how)
        cpu_s = fmean(run.step_cpu_s for run in runs)
        band(by_time, [step * cpu_s for step in at], curves, **how)
    style(by_step, "By steps", "steps", "accuracy on samples held out, %")
    style(by_time, "By processor time", "seconds of one core")
    by_step.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    over = f"mean and range over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    return Figure("training", f"One process, joint batches of {BATCH}; {over}.", svg(drawn))


def _range(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def _accuracy(runs: Sequence[TrainedNet]) -> float:
    return fmean(run.accuracy for run in runs)


def _mean(what: str, values: Sequence[float], expected: float, sign: str, source: str, group: str) -> Row:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return row(what, fmean(values), expected, 0.0, source, relation=sign, error=error, group=group)
