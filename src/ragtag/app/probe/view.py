"""What the person who typed ``ragtag probe`` sees."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.app.words import bytes_text, seconds, to_three_figures
from ragtag.codecs.sparse.advice import Choice, Cost, choose_for, fastest

RATES = (("50 Mbit/s", 6.25e6), ("1 Gbit/s", 1.25e8), ("10 Gbit/s", 1.25e9))
"""Shown where no link has been measured."""
EVERY = (1, 10, 50)
"""How many local steps lie between averages, of which the cost of a step is told."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What was probed.

    rate_bytes_per_s: of the crew's link, where it is known.
    rate_from: where that figure comes from.
    """

    size: int
    origin: str
    ratio: float
    k: int
    peers: int
    compiled: bool
    dense: Cost
    costs: list[Cost]
    rate_bytes_per_s: float | None = None
    rate_from: str = ""

    def choice(self, cost: Cost, rate_bytes_per_s: float) -> Choice:
        """Dense fp32, or this."""
        return choose_for(self.dense, cost, self.peers, rate_bytes_per_s)

    def best(self, rate_bytes_per_s: float) -> Cost:
        """The fastest at this rate."""
        return fastest(self.dense, self.costs, self.peers, rate_bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """As plain values; a rate without limit is ``None``."""
        rate = self.rate_bytes_per_s
        rows = []
        for cost in self.costs:
            even = self.choice(cost, rate or 1.0).break_even_bytes_per_s
            told: dict[str, Any] = asdict(cost)
            told |= {
                "sent_bytes": cost.sent_bytes(self.peers),
                "break_even_bytes_per_s": None if even == float("inf") else even,
            }
            if rate is not None:
                choice = self.choice(cost, rate)
                told |= {"round_s": choice.sparse_s, "beats_dense": choice.sparse, "gain": choice.gain}
            rows.append(told)
        return {
            "parameters": self.size,
            "vector": self.origin,
            "ratio": self.ratio,
            "k": self.k,
            "peers": self.peers,
            "numba": self.compiled,
            "dense_bytes": self.dense.sent_bytes(self.peers),
            "codecs": rows,
            "rate_bytes_per_s": rate,
            "rate_from": self.rate_from or None,
            "dense_round_s": None if rate is None else self.dense.sent_bytes(self.peers) / rate,
            "sent_at_rate": None if rate is None else self.best(rate).name,
        }


def show(found: Probed, console: Console) -> None:
    """A table of codecs, then what would be sent."""
    rate = found.rate_bytes_per_s
    title = f"{count(found.size)} parameters, 1 in {found.size / found.k:.0f} sent, {found.peers} peers"
    table = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    for name in ("message", "select", "code", "break-even"):
        table.add_column(name, justify="right", no_wrap=True)
    if rate is not None:
        table.add_column(bits_text(rate), justify="right", no_wrap=True)  # a word more is wider than 80
    best = None if rate is None else found.best(rate)
    table.add_row("fp32", bytes_text(found.dense.message_bytes), *["-"] * 3, *_round(found, None, best))
    ordered = sorted(found.costs, key=lambda c: -found.choice(c, 1.0).break_even_bytes_per_s)
    for dense in (True, False):
        for cost in ordered:
            if cost.dense == dense:
                table.add_row(*_cells(found, cost), *_round(found, cost, best))
        table.add_section()
    console.print(table)
    _advise(found, console)
    for note in (
        f"gradients {found.origin}; best times of some runs on this machine",
        "code: encoding, and decoding what a round brings, beyond what fp32 takes",
        "break-even: on a slower link it is faster than fp32, on a faster one by-passed",
        "this is the time of a round: a crew that sends less may need more rounds",
    ):
        console.print(f"· {note}", style="dim", highlight=False)
    if not found.compiled:
        console.print(
            "· numba is not installed: selecting and coding take several times as long as with "
            "pip install 'ragtag\\[fast]'",
            style="yellow",
        )


def _cells(found: Probed, cost: Cost) -> tuple[str, ...]:
    even = found.choice(cost, 1.0).break_even_bytes_per_s
    select = "-" if cost.dense else seconds(cost.select_s)
    code_s = cost.encode_s + cost.read_s(found.peers)
    return (cost.name, bytes_text(cost.message_bytes), select, seconds(code_s), bits_text(even))


def _round(found: Probed, cost: Cost | None, best: Cost | None) -> tuple[str, ...]:
    """A round's time at the crew's rate: the fastest stands out, what is by-passed stands back."""
    if best is None or found.rate_bytes_per_s is None:
        return ()
    if cost is None:
        told = seconds(found.dense.sent_bytes(found.peers) / found.rate_bytes_per_s)
        return (f"[bold green]{told}[/bold green]" if best is found.dense else told,)
    choice = found.choice(cost, found.rate_bytes_per_s)
    told = seconds(choice.sparse_s)
    if cost is best:
        return (f"[bold green]{told}[/bold green]",)
    return (told if choice.sparse else f"[dim]{told}[/dim]",)


def _advise(found: Probed, console: Console) -> None:
    if found.rate_bytes_per_s is not None:
        rates = [(bits_text(found.rate_bytes_per_s), found.rate_bytes_per_s)]
    else:
        rates = list(RATES)
    for name, rate in rates:
        best = found.best(rate)
        if best is found.dense:
            told = "[bold]fp32[/bold], dense: nothing here is faster"
        else:
            choice = found.choice(best, rate)
            told = (
                f"[bold]{best.name}[/bold], {seconds(choice.sparse_s)} a round instead of "
                f"{seconds(choice.dense_s)} ({choice.gain:.3g} times)"
            )
        console.print(f"At {name}: {told}", highlight=False)
        added = ", ".join(f"every={k} {seconds(found.choice(best, rate).dense_s / k)}" for k in EVERY)
        console.print(f"  fp32 adds to each step: {added}", style="dim", highlight=False)
    if found.rate_bytes_per_s is not None:
        console.print(f"· the rate: {found.rate_from}", style="dim", highlight=False)
    else:
        console.print("· give --rate 50Mbit, or --run FOLDER for what a crew has measured", style="dim")


def count(n: int) -> str:
    """A number of values."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= factor:
            return f"{n / factor:.4g}{unit}"
    return str(n)


def bits_text(rate_bytes_per_s: float) -> str:
    """A link's rate."""
    if rate_bytes_per_s == float("inf"):
        return "any link"
    if rate_bytes_per_s <= 0:
        return "never"
    rate = to_three_figures(8 * rate_bytes_per_s)
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= factor:
            return f"{rate / factor:.3g} {unit}"
    return f"{rate:.0f} bit/s"
