"""Reproduces DeDLOC: large-batch training by whoever is there, and roles from measured rates.

"Distributed Deep Learning in Open Collaborations", Diskin et al., NeurIPS 2021 (arXiv 2106.10207). Section
3.1: with a target batch a crew's steps are those of large-batch training, whoever comes and goes. Section
3.2: roles by a linear program are at least as fast as a parameter server, all-reduce and hivemind's rule.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.dedloc.compare import Outcomes, all_rows, all_tables, roles_figure, training_figure
from ragtag.recipes.dedloc.mixes import MIXES, paper_mix, random_mixes
from ragtag.recipes.dedloc.training import (
    CALM,
    CHANGING,
    FAULTY,
    GATHERS,
    LOCKSTEP,
    LOST,
    CrewSetup,
    crew_run,
    large_batch,
)
from ragtag.recipes.jobs import Job, run_jobs

BAND_SEED = 100
"""The first seed of one process with the large batch."""
ALONE = 5
"""So many of these."""
NOTES = (
    "Crews train in virtual time; peers are users' optimizers, and each sample is used once. Losses and "
    "times are seen at peer 0, which neither dies nor freezes. The model has a chunk for each peer to own.",
    "A window is within the band where a crew's loss, a mean over ten steps and its seeds, is no further "
    "out than the lowest and the highest of one process's seeds and their standard deviation. That does not "
    "tell steps of half as many samples apart: so a calm crew is held, too, to one process on the very "
    "samples that its peers counted in each step.",
    "A crew in lockstep averages gradients in each step: every peer computes the same part of the large "
    "batch, and the slowest is waited for. A peer that died is not replaced, so its steps have fewer samples "
    "from then on.",
    "Goodput is of all samples in means, over what all peers would have computed in the time; beside it "
    "stands the same over what peers could compute while they lived and ran.",
    f"In the faulty world {LOST:.0%} of datagrams are lost, peers die one after the other, and others freeze "
    "for three steps' time. Where members change, one in sixteen (of eight, one) dies every ten steps and as "
    "many come: each takes the crew's state over in its first average. All together are 64 at most: 52 at a "
    "time, or 8 of 11.",
    "Plans are never slower than the rules, from which they begin: the linear program is judged by itself, "
    "and plans beside all choices of who computes.",
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts to run.

    alone: seeds of one process. seeds: of crews.
    mixes: random ones; those of at most ``brute_up_to`` peers are held against brute force.
    """

    crew: CrewSetup
    alone: int
    seeds: int
    mixes: int
    brute_up_to: int

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Parts:
        """All parts; quick: 8 peers in place of 64, one seed of crews and few mixes."""
        if quick:
            return Parts(CrewSetup(8, 1024, 16, steps=40, change=10), ALONE, 1, 20, 6)
        return Parts(CrewSetup(64, 4096, 16, steps=40, change=5), ALONE, seeds, 200, 8)


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 3,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Train and compute everything, compare, and write ``index.html``, ``results.json`` and figures.

    quick: 8 peers in place of 64; one seed of crews, few random mixes.
    seeds: of crews.
    jobs: processes side by side.
    progress: called as parts end.

    Raises:
        ValueError: ``seeds`` or ``jobs`` below 1; ``data`` is given.
        ImportError: scipy is not installed.
    """
    require_counts(seeds, jobs)
    if data is not None:
        raise ValueError("reproduce dedloc takes no data: it draws its samples; leave --data out")
    parts = Parts.of(quick=quick, seeds=seeds)
    found = run_parts(parts, jobs, progress, out)
    report = Report(
        name="dedloc",
        title="DeDLOC: collaborative training (Diskin et al., NeurIPS 2021)",
        settings={
            "peers": parts.crew.peers,
            "target": parts.crew.target,
            "batch": parts.crew.batch,
            "steps": parts.crew.steps,
            "seeds": f"{parts.seeds} of crews, {parts.alone} of one process",
            "random mixes": parts.mixes,
            "quick": quick,
        },
        rows=all_rows(found),
        tables=all_tables(found),
        figures=[training_figure(found), roles_figure(found)],
        notes=list(NOTES),
        data=asdict(found) | {"crews": [asdict(run) for runs in found.crews.values() for run in runs]},
    )
    report.write(out)
    return report


def run_parts(parts: Parts, jobs: int, progress: Progress | None, out: Path) -> Outcomes:
    """Run all parts. Roles are the first: they fail at once where scipy is not installed."""
    kinds = [(rule, world) for rule in (GATHERS, LOCKSTEP) for world in (CALM, FAULTY)]
    kinds.append((GATHERS, CHANGING))
    crew, seeds = parts.crew, range(parts.seeds)
    calls = [Job(f"mix: {name}", paper_mix, (name,)) for name in MIXES]
    calls.append(Job("random mixes", random_mixes, (parts.mixes, parts.brute_up_to)))
    calls += [
        Job(f"{rule}, {world}, seed {seed}", crew_run, (crew, rule, world, seed))
        for rule, world in kinds
        for seed in seeds
    ]
    calls += [
        Job(f"one process, seed {seed}", large_batch, (crew, BAND_SEED + seed)) for seed in range(parts.alone)
    ]
    left = iter(run_jobs(calls, jobs, progress, out))
    mixes = [next(left) for _ in MIXES]
    at_random = next(left)
    crews = {kind: [next(left) for _ in seeds] for kind in kinds}
    return Outcomes(list(left), crews, mixes, at_random, parts.brute_up_to)
