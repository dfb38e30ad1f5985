"""What an average of a model would take over a crew's links: the averagers' machines in virtual time.

No formula: ``app.experiment`` runs the machines that train live over lines of the measured rates, delays and
loss. A model of many values is stood for by fewer, on lines that are slower in the same measure: it takes as
long. What coding takes is added as it was measured here (``measure``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.app.experiment import ExperimentSetup, simulate
from ragtag.app.probe.links import Links
from ragtag.app.probe.measure import Tell
from ragtag.app.probe.view import bits_text
from ragtag.app.words import seconds
from ragtag.codecs.sparse.advice import Cost
from ragtag.core.wire import CHUNK_BYTES

VALUES = 1 << 17
"""Values that are simulated, at most."""
ROUNDS = 12
"""Of which the first half teaches deadlines and does not count."""
COMPUTE_S = 0.1
"""Between averages."""
FEW = 8
"""A round trip in virtual time takes as long as so many datagrams, at least."""
PAIRS = "moshpit=2"
METHODS = {
    "rps": "RPS()",
    "rps+repair": "RPS(repair=True)",
    "allreduce": "AllReduce()",
    "ring": "AllReduce(ring=True)",
    PAIRS: "Moshpit(group=2)",
}
"""What is tried, by its name for ``simulate``, and as a script writes it."""
WHOLE = 0.999
"""An average counts as one of all with so much of what all sent."""
BAND = 2.0
"""An estimate lies within this factor of what is then measured, or the difference is told."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """One setting.

    averager, codec: as a script writes them.
    seconds: from asking to the end, the middle one of the slowest peer's.
    coding_s: the part of it that is coding, as measured on this machine.
    averaged: the share of all peers' chunks that is in the averages.
    of_all: whether it averages all peers at once, and not in groups.
    """

    averager: str
    codec: str
    seconds: float
    coding_s: float
    averaged: float
    of_all: bool = True


def estimate(links: Links, method: str, message_bytes: int, coding_s: float = 0.0) -> tuple[float, float]:
    """Seconds of an average by this averager of vectors that take so many bytes, and the share averaged.

    Deterministic. Raises ExperimentError: there is no such averager.
    """
    chunks = max(1, -(-message_bytes // CHUNK_BYTES))
    shown = min(chunks, max(4 * len(links.peers) ** 2, VALUES * 4 // CHUNK_BYTES))
    slower = shown / chunks
    faults = links.faults()
    lines = tuple(replace(line, rate_bytes_per_s=line.rate_bytes_per_s * slower) for line in faults.lines)
    rate = faults.rate_bytes_per_s * slower
    few_s = FEW * CHUNK_BYTES / rate  # on slower lines single datagrams take longer than a round trip did
    faults = replace(faults, lines=lines, rate_bytes_per_s=rate, latency_s=max(faults.latency_s, few_s))
    setup = ExperimentSetup(
        peers=len(links.peers),
        values=shown * CHUNK_BYTES // 4,
        rounds=ROUNDS,
        method=method,
        faults=faults,
        compute_s=COMPUTE_S,
        compute_sigma=0.0,
    )
    rounds = simulate(setup).rounds[ROUNDS // 2 :]
    times_s = sorted(figures.slowest_s for figures in rounds)
    came = sum(figures.arrived for figures in rounds) / len(rounds)
    return times_s[len(times_s) // 2] + coding_s, came


def estimates(links: Links, dense: Cost, costs: Sequence[Cost], tell: Tell | None = None) -> list[Foreseen]:
    """Each averager with each codec that sends all values. dense: fp32's cost; costs: of ``measure``."""
    found: list[Foreseen] = []
    n = len(links.peers)
    methods = {name: written for name, written in METHODS.items() if name != PAIRS or n >= 4}
    codecs = (dense, *(cost for cost in costs if cost.dense))
    for codec in codecs:
        coding_s = codec.encode_s + codec.read_s(n)
        for method, written in methods.items():
            if tell is not None:
                tell(len(found), len(codecs) * len(methods), f"{written}, {codec.name}")
            took_s, came = estimate(links, method, codec.message_bytes, coding_s)
            found.append(Foreseen(written, codec.name, took_s, coding_s, came, method != PAIRS))
    return found


def best_of(found: Sequence[Foreseen]) -> Foreseen:
    """The fastest that averages all of all; the fastest of those with most, where none does."""
    of_all = [one for one in found if one.of_all]
    whole = [one for one in of_all if one.averaged >= WHOLE]
    most = max(one.averaged for one in of_all)
    return min(whole or [one for one in of_all if one.averaged >= most], key=lambda one: one.seconds)


def held(links: Links) -> tuple[float, float] | None:
    """Of what the crew tried: seconds as estimated, and as measured; ``None``: it tried nothing."""
    tried = links.tried
    if tried is None:
        return None
    return estimate(links, tried.method, 4 * tried.values)[0], tried.seconds


def as_plain(links: Links, found: Sequence[Foreseen]) -> dict[str, Any]:
    """As plain values."""
    one = held(links)
    return {
        "links": [{name: getattr(way, name) for name in way.__struct_fields__} for way in links.ways],
        "lines_bytes_per_s": {str(peer): links.rate(peer) for peer in links.peers},
        "averages": [asdict(one) for one in found],
        "best": asdict(best_of(found)),
        "tried": None if one is None else {"estimated_s": one[0], "measured_s": one[1]},
    }


def show(links: Links, found: Sequence[Foreseen], console: Console) -> None:
    """The links by pairs, what averages take over them, and which is best."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("from", "to", "rate", "round trip", "busy", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in links.ways:
        loss = f"{100 * way.loss:.2g} %" if way.loss else "-"
        rates = bits_text(way.rate_bytes_per_s), seconds(way.rtt_s), seconds(way.busy_rtt_s), loss
        table.add_row(str(way.source), str(way.dest), *rates)
    console.print(table)
    averages = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    averages.add_column("an average takes", no_wrap=True)
    codecs = list(dict.fromkeys(one.codec for one in found))
    for codec in codecs:
        averages.add_column(codec, justify="right", no_wrap=True)
    averages.add_column("averaged", justify="right", no_wrap=True)
    chosen = best_of(found)
    for written in dict.fromkeys(one.averager for one in found):
        row = [one for one in found if one.averager == written]
        told = [
            f"[bold green]{seconds(o.seconds)}[/bold green]" if o is chosen else seconds(o.seconds)
            for o in row
        ]
        averages.add_row(written, *told, f"{100 * row[0].averaged:.4g} %")
    console.print(averages)
    console.print(
        f"Best: [bold]averager=ragtag.{chosen.averager}, codec={chosen.codec!r}[/bold], "
        f"{seconds(chosen.seconds)} an average",
        highlight=False,
    )
    one = held(links)
    if one is not None:
        factor = max(one[0], one[1]) / min(one[0], one[1])
        style = "dim" if factor <= BAND else "yellow"
        more = "" if factor <= BAND else ": take the table with this factor"
        console.print(
            f"· of an average that the crew tried: {seconds(one[0])} estimated, {seconds(one[1])} measured "
            f"({factor:.2g} times apart){more}",
            style=style,
            highlight=False,
        )
    for note in (
        "rates are of one way at a time; averages are by the averagers' machines in virtual time over these "
        "links, where peers do not share processors",
        "bf16 and int8 round what is sent; Moshpit averages pairs in turn, and all only after several rounds",
    ):
        console.print(f"· {note}", style="dim", highlight=False)
