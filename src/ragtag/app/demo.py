"""The demo: six peers train through loss, a freeze and a death, beside the runs to compare them with."""

from __future__ import annotations

import math
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ragtag.app.dashboard import watch
from ragtag.app.demo_peer import Ended, result_file, weights_file
from ragtag.app.demo_task import evaluate, load_digits, make_model
from ragtag.app.launch import launch
from ragtag.app.launch_events import Ended as PeerEnded
from ragtag.app.launch_events import Event, Line
from ragtag.app.report import build_report
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.faults import Crash, Faults, Freeze, Loss

POINTS_MAX = 1.0
"""How far the survivors may end below the calm run, in points of accuracy."""
P95_MAX, LONGEST_MAX = 2.0, 5.0
"""How long rounds may take, in medians."""


class DemoError(RuntimeError):
    """A run of the demo did not end as it should; the message says which, and where its output lies."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo does. The faults come at these parts of the time that the calm run took to train."""

    peers: int = 6
    rounds: int = 130
    every: int = 8
    seed: int = 0
    loss: float = 0.1
    frozen: int = 2
    frozen_at: float = 0.3
    frozen_for_s: float = 4.0
    killed: int = 4
    killed_at: float = 0.75

    def faults(self, calm_s: float) -> Faults:
        """All that goes wrong, where the calm run trained for ``calm_s``."""
        thawed_s = self.frozen_at * calm_s + self.frozen_for_s
        return Faults(
            loss=Loss(self.loss),
            freezes=(Freeze(self.frozen, self.frozen_at * calm_s, self.frozen_for_s),),
            crashes=(Crash(self.killed, max(self.killed_at * calm_s, thawed_s + 2.0)),),
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        """The peers that are not killed."""
        return tuple(peer for peer in range(self.peers) if peer != self.killed)


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

    A stopped process takes no rounds, so the one in which a peer itself was stopped is left out of its own.
    """

    whole: Times
    averaging: Times
    arrived: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo came to; accuracies in 0 to 1, on the test samples.

    survivors, calm: mean over the peers' own models; survivors_mean, calm_mean: of the mean of their models.
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
    training_s: dict[str, float]
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


@dataclass(slots=True)
class _Run:
    """One run of the demo: its folder, and what its peers left there."""

    name: str
    folder: Path
    ended: dict[int, Ended]
    wall_s: float

    def accuracy(self, peers: Sequence[int]) -> list[float]:
        return [self.ended[peer].accuracy for peer in peers]

    @property
    def trained_s(self) -> float:
        """How long the slowest process trained."""
        return max(ended.trained_s for ended in self.ended.values())

    def samples(self) -> int:
        return sum(ended.samples for ended in self.ended.values())


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
    demo = _Demo(plan, folder, console, live)
    calm = demo.crew("calm", Faults(), "without faults, to compare with")
    alone = demo.single("alone", plan.rounds, "one peer alone on its shard", alone_with=0)
    rounds = -(-calm.samples() // (plan.every * alone_batch(alone)))
    everything = demo.single("all-data", rounds, "one process on all the data, as many samples")
    main = demo.crew("crew", plan.faults(calm.trained_s), _story(plan))
    result = demo.judge(main, calm, alone, everything)
    demo.show(result)
    return result


def alone_batch(run: _Run) -> int:
    """Mean samples per step of a run of one process."""
    (ended,) = run.ended.values()
    return max(1, round(ended.samples / ended.steps))


def _story(plan: Plan) -> str:
    return (
        f"{plan.loss:.0%} of datagrams dropped, peer {plan.frozen} frozen for {plan.frozen_for_s:g} s, "
        f"peer {plan.killed} killed"
    )


class _Demo:
    """The runs of the demo, one after the other."""

    def __init__(self, plan: Plan, folder: Path, console: Console, live: bool) -> None:
        self._plan, self._folder, self._console, self._live = plan, folder, console, live
        self._seconds: dict[str, float] = {}

    def crew(self, name: str, faults: Faults, story: str) -> _Run:
        """Run all peers."""
        plan = self._plan
        must_end = plan.survivors if faults.crashes else tuple(range(plan.peers))
        return self._run(name, plan.peers, plan.rounds, faults, story, must_end, [])

    def single(self, name: str, rounds: int, story: str, alone_with: int | None = None) -> _Run:
        """Run one process."""
        more = [] if alone_with is None else ["--alone-with", str(alone_with), "--of", str(self._plan.peers)]
        return self._run(name, 1, rounds, Faults(), story, (0,), more)

    def _run(
        self,
        name: str,
        n: int,
        rounds: int,
        faults: Faults,
        story: str,
        must_end: Sequence[int],
        more: list[str],
    ) -> _Run:
        plan = self._plan
        folder = self._folder / name
        folder.mkdir(parents=True)
        argv = ["-m", "ragtag.app.demo_peer", "--out", str(folder), "--seed", str(plan.seed)]
        argv += ["--rounds", str(rounds), "--every", str(plan.every), *more]
        said: list[str] = []
        record = trace.Run(
            t=0.0,
            world="live",
            name=f"demo: {story}",
            seed=plan.seed,
            peers=n,
            method="rps",
            config={"rounds": str(rounds), "local steps": str(plan.every), "faults": story},
            steps_planned=rounds * plan.every,
            command="ragtag demo",
        )

        def on_event(event: Event) -> None:
            if isinstance(event, Line) and len(said) < 200:
                said.append(f"[{event.peer}] {event.text}")
            if isinstance(event, PeerEnded) and event.failed and event.error and not event.shown:
                said.append(f"[{event.peer}] {event.error}")

        self._console.print(f"[bold]{name}[/]: {story}")
        over = threading.Event()
        viewer = self._viewer(folder, over, story) if n > 1 else None
        try:
            result = launch(
                n,
                argv,
                run_folder=folder,
                seed=plan.seed,
                faults=faults,
                env={
                    "OMP_NUM_THREADS": "1"
                },  # the same in all runs; a net this small gains nothing from more
                on_event=on_event,
                run=record,
            )
        finally:
            over.set()
            if viewer is not None:
                viewer.join(5.0)
        if result.signal:
            raise KeyboardInterrupt
        missing = [peer for peer in must_end if not result_file(folder, peer).exists()]
        if missing:
            raise DemoError(
                f"{name}: peer {', '.join(map(str, missing))} did not end as it should:\n"
                + "\n".join(said[-40:])
            )
        ended = {
            peer: msgspec.json.decode(result_file(folder, peer).read_bytes(), type=Ended) for peer in must_end
        }
        run = _Run(name, folder, ended, result.wall_s)
        self._seconds[name] = run.trained_s
        return run

    def _viewer(self, folder: Path, over: threading.Event, story: str) -> threading.Thread | None:
        if not self._live:
            return None
        thread = threading.Thread(
            target=watch,
            args=(folder, over.is_set),
            kwargs={"console": self._console, "title": story},
            daemon=True,
        )
        thread.start()
        return thread

    def judge(self, main: _Run, calm: _Run, alone: _Run, everything: _Run) -> DemoResult:
        """Put the runs beside each other."""
        plan = self._plan
        everybody = tuple(range(plan.peers))
        survivors = main.accuracy(plan.survivors)
        calm_own = calm.accuracy(everybody)
        survivors_mean = self._of_mean(main, plan.survivors)
        self._append_results(main, survivors_mean)
        times = _round_times(main.folder, plan.survivors)
        mean, calm_mean = float(np.mean(survivors)), float(np.mean(calm_own))
        whole, training_s = times.whole, sum(self._seconds.values())
        return DemoResult(
            survivors=mean,
            survivors_lowest=min(survivors),
            survivors_mean=survivors_mean,
            calm=calm_mean,
            calm_mean=self._of_mean(calm, everybody),
            alone=alone.accuracy((0,))[0],
            all_data=everything.accuracy((0,))[0],
            samples={run.name: run.samples() for run in (main, calm, alone, everything)},
            round_times=times,
            calm_round_times=_round_times(calm.folder, everybody),
            training_s=dict(self._seconds),
            report=build_report(main.folder),
            folder=self._folder,
            checks={
                f"survivors within {POINTS_MAX:g} point of the calm run": mean
                >= calm_mean - POINTS_MAX / 100,
                f"95 % of rounds within {P95_MAX:g} medians": whole.p95_s <= P95_MAX * whole.median_s,
                f"the longest within {LONGEST_MAX:g} medians": whole.longest_s
                <= LONGEST_MAX * whole.median_s,
                "training within 90 s": training_s <= 90.0,
            },
        )

    def _of_mean(self, run: _Run, peers: Sequence[int]) -> float:
        """The accuracy of the mean of the peers' models."""
        flat = np.mean([np.load(weights_file(run.folder, p), allow_pickle=False) for p in peers], axis=0)
        model = make_model(self._plan.seed)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(flat.astype(np.float32)), model.parameters())
        return evaluate(model, load_digits(self._plan.seed))[1]

    def _append_results(self, run: _Run, accuracy_of_mean: float) -> None:
        from ragtag.app.tracefile import CREW_FILE, TraceWriter

        last = max(ended.rounds for ended in run.ended.values())
        writer = TraceWriter(run.folder / CREW_FILE)
        writer.write(trace.Eval(t=run.wall_s, peer=-1, model="mean", step=last, accuracy=accuracy_of_mean))
        writer.close()

    def show(self, result: DemoResult) -> None:
        """Print what came out."""
        plan = self._plan
        table = Table(
            title="Accuracy on 597 test digits", title_justify="left", show_edge=False, pad_edge=False
        )
        for name, justify in (
            ("run", "left"),
            ("own models", "right"),
            ("their mean", "right"),
            ("samples", "right"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        n = len(plan.survivors)
        rows = (
            (
                f"{n} survivors of {plan.peers}: {_story(plan)}",
                result.survivors,
                result.survivors_mean,
                "crew",
            ),
            (f"{plan.peers} peers, the same without faults", result.calm, result.calm_mean, "calm"),
            ("one peer alone on its shard", result.alone, None, "alone"),
            ("one process on all the data", result.all_data, None, "all-data"),
        )
        for name, own, mean, key in rows:
            shown = "" if mean is None else f"{mean:.1%}"
            table.add_row(name, f"{own:.1%}", shown, f"{result.samples[key]:,}")
        self._console.print()
        self._console.print(table)
        self._console.print("\n" + _sentence(result), soft_wrap=True)
        for name, ok in result.checks.items():
            self._console.print(f"  [green]yes[/]  {name}" if ok else f"  [red]no[/]   {name}")
        self._console.print(f"\nReport: {result.report}", soft_wrap=True)


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
        f"Averaging alone: {figures(times.averaging)}; {times.arrived:.1%} of the chunks were averaged."
    )


def _round_times(folder: Path, peers: Sequence[int]) -> RoundTimes:
    """Round times over the given peers' traces, and the share of chunks that were averaged."""
    ended: dict[int, float] = {}
    stopped: dict[int, list[tuple[float, float]]] = {}
    whole: list[float] = []
    averaging: list[float] = []
    arrived: list[float] = []
    for record in read_run(folder).records():
        if isinstance(record, trace.Fault) and record.name == "freeze":
            until = math.inf if record.until_t is None else record.until_t
            stopped.setdefault(record.peer, []).append((record.t, until))
        if not isinstance(record, trace.Round) or record.peer not in peers or record.channel != 0:
            continue
        before, ended[record.peer] = ended.get(record.peer), record.t
        if any(
            from_t < record.t and (before or 0.0) < until for from_t, until in stopped.get(record.peer, [])
        ):
            continue
        averaging.append(record.total_s)
        arrived.append(record.arrived)
        if before is not None:
            whole.append(record.t - before)
    if not whole:
        raise DemoError(f"no rounds were traced in {folder}")
    return RoundTimes(Times.of(whole), Times.of(averaging), float(np.mean(arrived)))


if __name__ == "__main__":
    began_s = time.monotonic()
    result = run_demo()
    print(f"{time.monotonic() - began_s:.0f} s in all")
    sys.exit(0 if result.ok else 1)
