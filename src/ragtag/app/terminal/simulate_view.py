"""What ``ragtag simulate`` prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragtag.app.experiment import ExperimentError, ExperimentResult, ExperimentSetup, RoundFigures, simulate
from ragtag.app.words import counted
from ragtag.core.faultspec import format_faults

ROWS_MAX = 20
VALUES_MAX = 1 << 30
_COLUMNS = ("round", "peers", "arrived", "contributors", "disagreement", "median ms", "slowest ms", "at s")
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def count(text: str) -> int:
    """A number of values, as ``250000``, ``100k`` or ``1.5M``.

    Raises:
        ExperimentError: it is none, or too large.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([kKmMgG]?)", text.strip())
    number = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if found is None or number != int(number) or not 1 <= number <= VALUES_MAX:
        raise ExperimentError(f"a size of {text!r}; write how many values, as 250000, 100k or 1M")
    return int(number)


def command(setup: ExperimentSetup) -> str:
    """What to type to run this again."""
    words = ["ragtag", "simulate", "-n", str(setup.peers), "--method", setup.method]
    words += ["--size", str(setup.values), "--rounds", str(setup.rounds)]
    words += ["--compute", f"{setup.compute_s:g}", "--seed", str(setup.seed)]
    if faults := format_faults(setup.faults):
        words += ["--faults", faults]
    return shlex.join(words + (["--check"] if setup.check else []))


def run(setup: ExperimentSetup, run_folder: Path) -> ExperimentResult:
    """Simulate, with a progress bar on standard error in a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("round", total=setup.rounds)

        def on_round(figures: RoundFigures) -> None:
            bar.update(task, completed=figures.round + 1)

        return simulate(setup, run_folder, on_round, command(setup))


def show(result: ExperimentResult, console: Console) -> None:
    """A table of rounds, then the whole run in a few lines."""
    setup = result.setup
    median_s, p95_s, longest_s = result.round_s
    table = _table(result)
    least = Measurement.get(console, console.options.update(max_width=1 << 16), table).maximum
    width, console.width = console.width, max(least, console.width)  # a narrower terminal breaks the lines
    console.print(table)
    console.width = width
    console.print(
        f"arrived {result.arrived:.2%}, steady disagreement {result.disagreement:.4f} of a step's variance"
    )
    console.print(
        f"round time median {median_s * 1e3:.1f} ms, 95th percentile {p95_s * 1e3:.1f} ms, "
        f"longest {longest_s * 1e3:.1f} ms"
    )
    console.print(
        f"{len(result.live)} of {counted(setup.peers, 'peer')} alive, "
        f"{result.bytes_sent / 1e6:,.1f} MB sent, {counted(result.datagrams_lost, 'datagram')} lost"
    )
    console.print(
        f"{result.virtual_s:.2f} s of virtual time in {result.wall_s:.2f} s, {result.events:,} events, "
        f"digest {result.digest[:12]}"
    )
    for line in [*_in_groups(result), *_at_the_centre(result)]:
        console.print(line)
    if result.healed_round is not None:
        came = (
            "the values of all came to all by" if result.alone is not None else "all live peers heard all in"
        )
        console.print(f"invariants held; healed, {came} round {result.healed_round}")
    if result.run_folder is not None:
        folder = escape(str(result.run_folder))
        console.print(f"trace in {folder}; [cyan]ragtag report {folder}[/cyan]")


def _in_groups(result: ExperimentResult) -> list[str]:
    """Of averaging in groups: how often a peer met nobody, and what that does to what arrived."""
    if result.alone is None:
        return []
    if not result.alone:
        return ["no round was spent alone"]
    why = "a peer that comes later to a group than nine in ten did is not waited for"
    return [f"{result.alone:.1%} of rounds were spent alone, and nothing arrived in them: {why}"]


def _at_the_centre(result: ExperimentResult) -> list[str]:
    """Of a central state: which peers' updates came in, and how old they were."""
    lines = []
    if result.turns is not None:
        lines.append(f"turns by peer {', '.join(map(str, result.turns))}")
    if result.staleness is not None:
        mean, p95, most = result.staleness
        lines.append(f"updates were {mean:.2f} versions old, 95th percentile {p95:.0f}, at most {most}")
    if result.groups:
        lines.append(f"groups at the end {' + '.join(' '.join(map(str, one)) for one in result.groups)}")
    return lines


def _table(result: ExperimentResult) -> Table:
    setup = result.setup
    title = f"{setup.method}, {counted(setup.peers, 'peer')}, {counted(setup.values, 'value')}"
    if faults := format_faults(setup.faults):
        title += f", {faults}"
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    shown = _some(result.rounds)
    for before, figures in zip([None, *shown], shown, strict=False):
        if before is not None and figures.round > before.round + 1:
            table.add_row(*["..."] * len(_COLUMNS), style="dim")
        table.add_row(
            str(figures.round),
            str(figures.peers),
            f"{figures.arrived:.1%}",
            f"{figures.contributors:.1f}",
            f"{figures.disagreement:.4f}",
            f"{figures.total_s * 1e3:.1f}",
            f"{figures.slowest_s * 1e3:.1f}",
            f"{figures.ended_s:.2f}",
        )
    return table


def _some(rounds: tuple[RoundFigures, ...]) -> list[RoundFigures]:
    """All rounds, or the first and last ones where there are too many."""
    if len(rounds) <= ROWS_MAX:
        return list(rounds)
    half = ROWS_MAX // 2
    return [*rounds[:half], *rounds[-half:]]
