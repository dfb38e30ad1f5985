"""Prints what the demo came to."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ragtag.app.demo.plan import Plan
from ragtag.app.demo.result import DemoResult, Times


def show(plan: Plan, result: DemoResult, console: Console) -> None:
    """Print accuracies beside each other, round times, what was promised, and where the report lies."""
    console.print()
    console.print(_table(plan, result))
    console.print("\n" + _sentence(result))
    for name, ok in result.checks.items():
        console.print(f"  [green]yes[/]  {name}" if ok else f"  [red]no[/]   {name}")
    console.print(f"\nReport: {result.report}", soft_wrap=True)


def _table(plan: Plan, result: DemoResult) -> Table:
    table = Table(title="Accuracy on 597 test digits", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("run")
    for name in ("own models", "their mean", "samples"):
        table.add_column(name, justify="right")
    survivors = f"{len(plan.survivors)} survivors of {plan.peers}: {plan.story}"
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
        f"Averaging alone: {figures(times.averaging)}; "
        f"{times.arrived:.1%} of what the others sent was averaged."
    )
