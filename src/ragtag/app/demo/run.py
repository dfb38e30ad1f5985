"""Runs the whole demo."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from ragtag.app.demo.judge import judge
from ragtag.app.demo.plan import Plan
from ragtag.app.demo.processes import Processes
from ragtag.app.demo.result import DemoResult
from ragtag.app.demo.show import show
from ragtag.app.demo.task import load_digits
from ragtag.core.faults import Faults


def run_demo(
    *, plan: Plan | None = None, folder: Path | None = None, console: Console | None = None, live: bool = True
) -> DemoResult:
    """Run the whole demo and print what came out.

    folder: where the traces and the report go (by default a new one under the system's temporary folder).
    live: show the peers while they train. It must be called from the main thread.

    Raises:
        DemoError: a peer that should live has failed.
        DataMissing: scikit-learn is not installed.
    """
    plan = plan or Plan()
    console = console or Console()
    load_digits(plan.seed)  # fail before anything is started
    folder = folder or Path(tempfile.mkdtemp(prefix="ragtag-demo-"))
    demo = Processes(plan, folder, console, live)
    calm = demo.crew("calm", Faults(), "without faults, to compare with")
    alone = demo.single("alone", plan.rounds, "one peer alone on its shard", alone_with=0)
    rounds = -(-calm.samples() // (plan.every * alone.batch()))
    everything = demo.single("all-data", rounds, "one process on all the data, as many samples")
    main = demo.crew("crew", plan.faults(calm.trained_s), plan.story)
    result = judge(plan, folder, main, calm, alone, everything)
    show(plan, result, console)
    return result
