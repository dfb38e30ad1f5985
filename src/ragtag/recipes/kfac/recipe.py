"""Reproduces distributed K-FAC: fewer steps than SGD, alone and in a crew that loses peers and datagrams.

"Convolutional Neural Network Training with Distributed K-FAC", Pauloski, Zhang, Huang, Xu, Foster, SC 2020
(arXiv 2007.00784): K-FAC ends a run of half as many epochs within half a point of SGD. "KAISA", Pauloski and
others, SC 2021: who preconditions which layer changes what travels, and no gradient. AdamW, Muon, SOAP and
Distributed Shampoo stand beside them, each method with as many settings tried: alone, and in a crew at equal
steps, equal bytes and equal time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from ragtag.optim.kfac.placement import VALUE_BYTES
from ragtag.recipes.base import Figure, Progress, Report, Row, Table, number, require_counts, row, worst
from ragtag.recipes.drawing import FAINT, PALETTE, band, canvas, style, svg
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.kfac.training import (
    ADAMW_NAME,
    BATCH,
    CALM,
    EXTRAS,
    FACTOR_EVERY,
    GRIDS,
    IMAGE_GRIDS,
    INVERSE_EVERY,
    KFAC_NAME,
    KILL_AND_FREEZE,
    MUON_NAME,
    PEERS,
    SGD_NAME,
    SHAMPOO_NAME,
    SOAP_NAME,
    STEP_S,
    TARGET,
    WORLDS,
    Settings,
    TrainedNet,
    in_crew,
    in_one_process,
    methods,
    small_net,
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
    MUON_NAME: Settings(MUON_NAME, 0.1, 0.01),
    KFAC_NAME: Settings(KFAC_NAME, 0.3, damping=0.1, kl_clip=0.01),
    SOAP_NAME: Settings(SOAP_NAME, 0.01),
    SHAMPOO_NAME: Settings(SHAMPOO_NAME, 0.1),
}
"""What the full form's sweep chose on digits (``benchmarks/results/reproduce_kfac.json``, which a test holds
it to). The quick form takes them."""
STEPS, BYTES, TIME = "steps", "bytes", "time"
EQUAL = (STEPS, BYTES, TIME)
"""What all methods in a crew have as much of as SGD in its whole run."""
PLACEMENTS: tuple[Placement, ...] = ("communication", 0.5, "memory")
PLACED_STEPS = 12
NUDGES = (1, 2, 3)
"""Trainings that differ in the last bits of where they begin: as far apart as they come is float error.
A kink of the loss may make it a thousand times as large."""
TRAVEL = 0.02
"""For bytes of headers, and of bases, which fewer peers need where gradients travel."""
ALIKE = 2.0
"""A placement may come so many times as far from another one as those do."""

CIFAR_STEPS = 600

SC20 = "Pauloski et al., SC 2020"
KAISA = "Pauloski et al., SC 2021"
GOAL = "goal"
NOTES = (
    f"One process has joint batches of {BATCH}.",
    "All methods have a learning rate that rises for five steps and falls to 0 at the end of their run "
    "(cosine): so a run of fewer steps is another run, and not the beginning of a longer one.",
    f"K-FAC has factors of samples' own losses (scaling='fisher') every {FACTOR_EVERY} steps, and "
    f"decompositions every {INVERSE_EVERY}.",
    "Not judged: AdamW, Muon, SOAP and Distributed Shampoo, which no figure of the paper is about; processor "
    "time, which is the machine's.",
)
IN_CREWS = (
    "A crew's peers have equal parts of a joint batch, average gradients in each step, and repair what is "
    "lost of them. What is lost of factors stays lost.",
    "Equal bytes: so many steps that a peer sends what one of SGD's sends in its whole run. Equal time: the "
    "same with virtual time, where a step takes half a second by SGD, by another method as much longer as "
    "its processor time alone says, and in either case what the rounds take over the lines.",
    "In a crew, what is compared is peer 0. The longest step is over peers that were neither killed nor "
    "frozen. What is killed or frozen is so while others train: nothing fails before the first step.",
)
NOT_THERE = (
    f"{' and '.join(EXTRAS)} are left out: the package pytorch_optimizer is not installed (pip install "
    "'ragtag[optimizers]')."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make.

    steps: SGD's; K-FAC has ``SHARE`` of them.
    methods: what is run, SGD and K-FAC at least.
    grids: the settings of each method that are tried.
    tuning_seeds: try all settings with these. None: ``TUNED`` counts.
    worlds: of crews.
    equal: run all methods in a crew at equal steps, bytes and time.
    placements: compare models by who preconditions.
    """

    seeds: tuple[int, ...]
    steps: int
    methods: tuple[str, ...]
    tuning_seeds: tuple[int, ...]
    worlds: tuple[str, ...]
    equal: bool = False
    placements: tuple[Placement, ...] = PLACEMENTS
    grids: Mapping[str, tuple[Settings, ...]] = field(default_factory=lambda: GRIDS)

    @staticmethod
    def of(*, quick: bool, digits: bool, seeds: int) -> Plan:
        """All runs; quick: settings as they were tuned before, and the two worlds that matter most.

        On CIFAR-10 SGD and K-FAC alone, in about an hour of two cores; quick: ten steps, once each.
        """
        drawn = tuple(range(seeds))
        if not digits:
            drawn, steps, tuning = (drawn[:1], 10, ()) if quick else (drawn, CIFAR_STEPS, TUNING_SEEDS)
            return Plan(drawn, steps, tuple(IMAGE_GRIDS), tuning, (), placements=(), grids=IMAGE_GRIDS)
        there = tuple(methods())
        if quick:
            return Plan(drawn, 100, there, (), (CALM, KILL_AND_FREEZE))
        return Plan(drawn, 100, there, TUNING_SEEDS, tuple(WORLDS), equal=True)

    @property
    def fewer(self) -> int:
        """K-FAC's steps."""
        return round(SHARE * self.steps)

    @property
    def settings_each(self) -> int:
        """How many settings of a method are tried; of each as many."""
        return len(self.grids[SGD_NAME])

    def length(self, method: str) -> int:
        """The steps at which a method is tuned."""
        return self.fewer if method == KFAC_NAME else self.steps


@dataclass(slots=True)
class Results:
    """What came out.

    tried: every setting's runs.
    tuned: what was chosen, by method.
    trained: runs alone, by method and steps.
    crews: by world.
    placed, nudged: the first placement and the others, and by nudge the first one's; each by seed.
    equal: in a calm crew, by method and by what all have as much of; by method and steps.
    """

    tried: list[TrainedNet]
    tuned: dict[str, Settings]
    trained: dict[tuple[str, int], list[TrainedNet]]
    crews: dict[str, list[TrainedNet]]
    placed: dict[Placement, list[TrainedNet]]
    nudged: dict[int, list[TrainedNet]]
    equal: dict[tuple[str, str], list[TrainedNet]] = field(default_factory=dict)


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
        notes=notes(plan),
        data={
            "tried": [asdict(one) for one in results.tried],
            "trained": [asdict(one) for runs in results.trained.values() for one in runs],
            "crews": {world: [asdict(one) for one in runs] for world, runs in results.crews.items()},
            "equal": [asdict(one) for runs in results.equal.values() for one in runs],
        },
    )
    report.write(out)
    return report


def ran(plan: Plan, arrays: Path | None, jobs: int, progress: Progress | None, out: Path) -> Results:
    """Tune, then train with what was chosen; last what depends on how much that took."""
    tuned, tried = {method: TUNED[method] for method in plan.methods}, list[TrainedNet]()
    if plan.tuning_seeds:
        asked = [(how, seed) for m in plan.methods for how in plan.grids[m] for seed in plan.tuning_seeds]
        calls = [
            Job(f"{h.method}, {h.text}, seed {s}", in_one_process, (h, s, plan.length(h.method), arrays))
            for h, s in asked
        ]
        tried = run_jobs(calls, jobs, progress, out)
        tuned = {m: best([one for one in tried if one.settings.method == m]) for m in plan.methods}
    kinds = [(how, steps) for how in tuned.values() for steps in (plan.steps, plan.fewer)]
    calls = [
        Job(f"{how.method}, {steps} steps, seed {seed}", in_one_process, (how, seed, steps, arrays))
        for how, steps in kinds
        for seed in plan.seeds
    ]
    kfac = tuned[KFAC_NAME]
    calls += [_crew(kfac, world, seed, plan.fewer) for world in plan.worlds for seed in plan.seeds]
    calls += [_placed(kfac, seed, placement, 0) for placement in plan.placements for seed in plan.seeds]
    nudges = NUDGES if plan.placements else ()
    calls += [_placed(kfac, seed, PLACEMENTS[0], nudge) for nudge in nudges for seed in plan.seeds]
    abreast = tuned.values() if plan.equal else ()
    calls += [_crew(how, CALM, seed, plan.steps) for how in abreast for seed in plan.seeds]
    left = iter(run_jobs(calls, jobs, progress, out))
    trained = {(how.method, steps): [next(left) for _ in plan.seeds] for how, steps in kinds}
    crews = {world: [next(left) for _ in plan.seeds] for world in plan.worlds}
    placed = {placement: [next(left) for _ in plan.seeds] for placement in plan.placements}
    nudged = {nudge: [next(left) for _ in plan.seeds] for nudge in nudges}
    equal = {(how.method, STEPS): [next(left) for _ in plan.seeds] for how in abreast}
    results = Results(tried, tuned, trained, crews, placed, nudged, equal)
    lengths = {
        (m, what): steps_for(what, m, results, plan) for m, _ in results.equal for what in (BYTES, TIME)
    }
    calls = [
        _crew(tuned[method], CALM, seed, steps)
        for (method, _), steps in lengths.items()
        for seed in plan.seeds
    ]
    left = iter(run_jobs(calls, jobs, progress, out))
    results.equal |= {at: [next(left) for _ in plan.seeds] for at in lengths}
    return results


def _placed(how: Settings, seed: int, placement: Placement, nudge: int) -> Job:
    named = f"crew, placement {placement}, seed {seed}" + f", nudged by {nudge}" * (nudge > 0)
    return Job(named, in_crew, (how, CALM, seed, PLACED_STEPS, placement, nudge))


def _crew(how: Settings, world: str, seed: int, steps: int) -> Job:
    return Job(
        f"{how.method} in a crew, {world}, {steps} steps, seed {seed}", in_crew, (how, world, seed, steps)
    )


def steps_for(what: str, method: str, results: Results, plan: Plan) -> int:
    """How many steps a method takes in a crew for the bytes, or the time, of SGD's whole run."""

    def each(of: str) -> float:
        runs = results.equal[of, STEPS]
        if what == BYTES:
            return fmean(run.bytes_sent / run.steps for run in runs)
        cpu_s, sgds_s = (
            fmean(run.step_cpu_s for run in results.trained[m, plan.steps]) for m in (of, SGD_NAME)
        )
        return fmean(run.step_s for run in runs) + (cpu_s / sgds_s - 1) * STEP_S

    return max(1, int(plan.steps * each(SGD_NAME) / each(method)))


def best(runs: Sequence[TrainedNet]) -> Settings:
    """The settings with the best mean accuracy over their seeds; of equals, with the lowest loss."""
    by: dict[Settings, list[TrainedNet]] = {}
    for run in runs:
        by.setdefault(run.settings, []).append(run)
    return max(by, key=lambda how: (_accuracy(by[how]), -fmean(run.loss for run in by[how])))


def _apart(runs: Sequence[TrainedNet], others: Sequence[TrainedNet]) -> list[float]:
    """How far apart models are, over the first one's norm, by seed."""
    pairs = [(np.array(a.values), np.array(b.values)) for a, b in zip(runs, others, strict=True)]
    return [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in pairs]


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
    group = "In a crew, whose factors are averaged and whose peers decompose"
    for world, runs in results.crews.items():
        calm = WORLDS[world].calm
        below = [a - run.accuracy for a, run in zip(sgd, runs, strict=False)]
        what = f"{world}: accuracy below one process's by SGD after all"
        found.append(_mean(what, below, POINT, "<=", f"{SC20}: half the epochs, .22 points", group))
        if world != calm and calm in results.crews:
            ratio = _reached(plan, runs) / _reached(plan, results.crews[calm])
            what = f"{world}: steps to {TARGET:.0%} over the calm crew's"
            found.append(row(what, ratio, 1.1, 0.0, GOAL, relation="<=", group=group))
        what, longest = f"{world}: longest step, in medians", worst(run.longest for run in runs)
        found.append(row(what, longest, 3.0, 0.0, GOAL, relation="<=", group=group))
    if not results.placed:
        return found
    group = f"Who preconditions: the models after {PLACED_STEPS} steps"
    first = results.placed[PLACEMENTS[0]]
    nudged = [
        max(each) for each in zip(*(_apart(first, runs) for runs in results.nudged.values()), strict=True)
    ]
    for placement in PLACEMENTS[1:]:
        apart = _apart(first, results.placed[placement])
        ratio = worst(own / float_error for own, float_error in zip(apart, nudged, strict=True))
        what = f"placement {placement}: apart, over trainings that differ in last bits"
        source = f"{KAISA}: the same within float error"
        found.append(row(what, ratio, ALIKE, 0.0, source, relation="<=", group=group))
    least = fmean(run.bytes_sent for run in first)
    most = fmean(run.bytes_sent for run in results.placed[PLACEMENTS[-1]])
    values = sum(value.numel() for value in small_net().parameters())
    travel = PLACED_STEPS * VALUE_BYTES * values * (PEERS - 1) / PEERS
    what, source = "bytes with placement memory, over communication's", f"{KAISA}: gradients travel"
    found.append(row(what, most / least, 1 + travel / least, TRAVEL, source, group=group))
    return found


def _reached(plan: Plan, runs: Sequence[TrainedNet]) -> float:
    """How many steps crews took to the target, in all; infinite where one did not get there."""
    return sum(run.reached if run.reached <= plan.fewer else math.inf for run in runs)


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
                _loss(runs),
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
        title = f"K-FAC in a crew of {PEERS} (where no other number is said), {plan.fewer} steps"
        found.append(Table(title, heads, tuple(in_crews)))
    if results.equal:
        found.append(
            Table(
                f"All methods in a calm crew of {PEERS}: accuracy for as many steps, bytes and seconds as "
                f"SGD has in {plan.steps} steps",
                ("method", "equal steps", "equal bytes", "steps", "equal time", "steps", "kB sent per step"),
                tuple(_equal(method, results) for method in results.tuned),
            )
        )
    if results.tried:
        settings = dict.fromkeys(one.settings for one in results.tried)
        sweep = []
        for how in settings:
            runs = [one for one in results.tried if one.settings == how]
            sweep.append((how.method, how.text, _range([r.accuracy for r in runs]), _loss(runs)))
        found.append(Table("The sweep", ("method", "settings", "accuracy", "loss"), tuple(sweep)))
    chosen = tuple((method, how.text) for method, how in results.tuned.items())
    of = f"the best of {plan.settings_each}" if plan.tuning_seeds else "tuned before"
    found.append(Table("Settings", ("method", of), chosen))
    return found


def notes(plan: Plan) -> list[str]:
    """What a reader has to know of these runs."""
    seeds = ", ".join(map(str, plan.tuning_seeds))
    tuned = (
        f"Each method has {plan.settings_each} settings, each tried at the length at which it is judged "
        f"(seeds: {seeds}); the best mean accuracy counts, then the lowest loss."
    )
    found = [*NOTES, *([tuned] if seeds else []), *(IN_CREWS if plan.worlds else ())]
    return found if set(EXTRAS) <= set(methods()) else [*found, NOT_THERE]


def curves_of(plan: Plan, results: Results) -> Figure:
    """Accuracy against steps and against processor time."""
    drawn = canvas(11.0, 4.2)
    by_step, by_time = drawn.subplots(1, 2, sharey=True)
    colours = dict(zip(GRIDS, (PALETTE[at] for at in (0, 2, 6, 3, 4, 5)), strict=True))
    for method in results.tuned:
        steps, colour = plan.length(method), colours[method]
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


def _equal(method: str, results: Results) -> tuple[str, ...]:
    runs = {what: results.equal[method, what] for what in EQUAL}
    accuracy = {what: _range([run.accuracy for run in of]) for what, of in runs.items()}
    sent = fmean(run.bytes_sent / run.steps for run in runs[STEPS])
    bytes_, time_ = (f"{runs[what][0].steps}" for what in (BYTES, TIME))
    return method, accuracy[STEPS], accuracy[BYTES], bytes_, accuracy[TIME], time_, f"{sent / 1e3:.0f}"


def _loss(runs: Sequence[TrainedNet]) -> str:
    return number(fmean(run.loss for run in runs), 3)


def _range(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def _accuracy(runs: Sequence[TrainedNet]) -> float:
    return fmean(run.accuracy for run in runs)


def _mean(what: str, values: Sequence[float], expected: float, sign: str, source: str, group: str) -> Row:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return row(what, fmean(values), expected, 0.0, source, relation=sign, error=error, group=group)
