"""The report's words and tables, as HTML text. Everything that comes from a trace is escaped here."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from html import escape

from ragtag.app.report.data import (
    FREEZES,
    LOST,
    MEMBERSHIP,
    Comparisons,
    Item,
    Selections,
    Summary,
    Verdicts,
)
from ragtag.app.report.drawing import Mark
from ragtag.app.report.figures import round_times
from ragtag.app.report.html import NONE, cell, table
from ragtag.app.words import (
    UNTOLD,
    Final,
    bytes_text,
    clock,
    counted,
    in_words,
    models_in_words,
    percent,
    seconds,
    these_peers,
)
from ragtag.core import trace

TIMES = "\N{MULTIPLICATION SIGN}"
_BAD = frozenset({"declared dead", "lost its seat", "no member any more", "put out"})
_GOOD = frozenset({"back", "healed"})
_SELECTED = tuple(
    (name, "num")
    for name in (
        *("peer", "rounds", "sent whole", "density", "bytes saved", "energy captured", "residual"),
        *("delivered", "given back", "came late", "never came"),
    )
)
LINKS_SHOWN = 24
EPOCHS_SHOWN = 24
HELD_BY = {
    "keys": "a handshake",
    "socket": "a full socket",
    "receiver": "room at the receiver",
    "window": "the path's window",
    "rate": "the path's rate",
    "driver": "other messages",
}
"""By what a trace says keeps messages from leaving (``network.link.flow.Hold``), what a reader is told."""
_LINK = (
    ("Way", ""),
    *((name, "n") for name in ("Rate", "Shortest", "Round trip", "Datagrams", "Of", "Lost", "Late")),
    ("Waited for", ""),
)
_COMPARED = tuple(
    (name, "num")
    for name in (
        *("peer", "compared", "not all alike", "own differed", "given", "taken"),
        *("largest distance", "last distance", "alike since"),
    )
)


_JUDGED = tuple(
    (name, "num") for name in ("peer", "values judged", "cut", "distance", "weights capped", "owners")
)


_GATHERED = (
    *((name, "num") for name in ("peer", "target", "steps", "computed", "counted", "pending")),
    *((name, "num") for name in ("beyond the target", "goodput")),
    ("dropped", ""),
)


_SPENT = (
    ("peer", "num"),
    ("samples of", ""),
    *((name, "num") for name in ("epsilon", "delta", "steps", "noise", "rate")),
)


def header(summary: Summary) -> str:
    """What was run, and what it came to."""
    run = summary.run
    helpers = sum(p.auxiliary for p in summary.peers.values())
    facts = [counted(len(summary.peers) - helpers, "peer")]
    clients = [p.number for p in summary.peers.values() if p.client]
    if clients:
        facts[0] += f" ({_peers(clients)} {'is a client' if len(clients) == 1 else 'are clients'})"
    if helpers:
        facts[0] += f" and {counted(helpers, 'auxiliary', 'auxiliaries')}"
    if run is not None:
        method = [f"method {run.method}"] if run.method else []
        facts = [f"{run.world} run", *method, *facts, f"seed {run.seed}"]
        if run.started_unix_s > 0:
            when = datetime.datetime.fromtimestamp(min(run.started_unix_s, 2e11), datetime.UTC)
            facts.append(f"started {when:%Y-%m-%d %H:%M} UTC")
    virtual = " of virtual time" if run is not None and run.world == "simulated" else ""
    facts.append(f"lasted {clock(summary.extent.lasted_s)}{virtual}")
    title = run.name if run is not None else "A run without its run record"
    state = (
        "" if summary.finished else '<p class="bad">This run has not ended as planned (or goes on still).</p>'
    )
    said = models_in_words(
        {p.number: Final(p.digest, p.last_round) for p in summary.peers.values() if p.left}
    )
    models = f"<p class='sub'>{escape(said[:1].upper() + said[1:])}.</p>" if said else ""
    about = f"<h1>{escape(title)}</h1><p class='sub'>{escape(' · '.join(facts))}</p>"
    return about + models + state + _tiles(summary)


def _tiles(summary: Summary) -> str:
    own = [p.accuracy for p in summary.survivors if p.accuracy is not None]
    mean_eval, times = summary.mean_eval, round_times(summary)
    frozen = sorted({f.peer for f in summary.faults if f.name in FREEZES})
    tiles = []
    if own:
        spread = f"lowest {percent(min(own))}, highest {percent(max(own))}"
        tiles.append(("Accuracy, survivors' own models", percent(sum(own) / len(own)), f"mean; {spread}"))
    if mean_eval is not None and mean_eval.accuracy is not None:
        tiles.append(("Accuracy, mean model", percent(mean_eval.accuracy), f"at {clock(mean_eval.t)}"))
    arrived = summary.arrival.mean()
    if arrived is not None:
        lowest = percent(summary.arrival.smallest)
        tiles.append(("Arrival rate", percent(arrived), f"of what the others sent; worst round {lowest}"))
    if times["median"] is not None:
        ratios = [
            f"{name} {seconds(times[name])}"
            + (f" ({_ratio(times[f'{name}_over_median'])} median)" if times["median"] else "")
            for name in ("p95", "max")
        ]
        if frozen:
            ratios.append("with the rounds in which a peer was frozen")
        tiles.append(("Round time, median", seconds(times["median"]), "; ".join(ratios)))
    lost = f"{_peers(summary.lost)}; " if summary.lost else ""
    detail = f"{lost}frozen for a while: {_peers(frozen)}"
    tiles.append(("Peers lost", str(len(summary.lost) or "none"), detail))
    least, most = (sum(used.missed[at] for used in summary.epochs.values()) for at in (0, 1))
    if most:
        every = sum(samples for _, samples in summary.epochs)
        told = f"of {every:,} in {counted(len(summary.epochs), 'epoch')}; nobody is known to have used them"
        tiles.append(("Samples missed", _span((least, most)), told))
    if summary.errors:
        tiles.append(("Errors", str(summary.errors), "listed below"))
    cells = (
        f'<div class="tile"><div class="k">{escape(k)}</div><div class="v">{escape(v)}</div>'
        f'<div class="d">{escape(d)}</div></div>'
        for k, v, d in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _peers(numbers: Sequence[int]) -> str:
    """Which peers, in words."""
    return these_peers(numbers) if numbers else "none"


def _ratio(value: float) -> str:
    return f"{value:,.0f}{TIMES}" if value >= 10 else f"{value:.2g}{TIMES}"


def damage(summary: Summary) -> str:
    """What could not be read."""
    if not summary.damage:
        return ""
    lines = "".join(f"<li>{escape(text)}</li>" for text in summary.damage)
    return f'<section><h2>Remarks on the trace</h2><div class="card warn"><ul>{lines}</ul></div></section>'


def results(summary: Summary) -> str:
    """Figures beside what was expected."""
    if not summary.results:
        return ""
    rows = []
    for r in summary.results:
        unit = f" {r.unit}" if r.unit else ""
        expected = NONE if r.expected is None else f"{r.expected:.4g}{unit}"
        if r.expected is not None and r.tolerance is not None:
            expected += f" ± {r.tolerance:.3g}"
        verdict = {True: "pass", False: "FAIL", None: NONE}[r.passed]
        style = {True: "good", False: "bad", None: ""}[r.passed]
        value = "not finite" if r.value is None else f"{r.value:.4g}{unit}"
        rows.append(
            cell(r.name) + cell(value, "n") + cell(expected, "n") + cell(verdict, style) + cell(r.detail)
        )
    heads = [("Figure", ""), ("Measured", "n"), ("Expected", "n"), ("Verdict", ""), ("", "")]
    return f"<section><h2>Results</h2>{table(heads, rows, 'tight')}</section>"


def faults(summary: Summary, marks: Sequence[Mark]) -> str:
    """The faults, numbered as in the charts where words do not fit."""
    if not marks:
        return ""
    rows = []
    for mark in marks:
        until = NONE if mark.style == "kill" else clock(mark.t1)
        rows.append(cell(mark.number, "n") + cell(clock(mark.t0), "n") + cell(until, "n") + cell(mark.short))
    heads = [("", "n"), ("From", "n"), ("Until", "n"), ("What", "")]
    more = (
        f'<p class="cap">{summary.faults_left_out} more are not listed.</p>'
        if summary.faults_left_out
        else ""
    )
    return f"<section><h2>Faults</h2>{table(heads, rows, 'tight')}{more}</section>"


def peers(summary: Summary) -> str:
    """The table of peers; a column in which no peer has anything is left out."""
    every = list(summary.peers.values())
    medians = [p.round_s.quantile(0.5) for p in every]
    columns: list[tuple[str, list[str | None]]] = [
        ("Rounds", [f"{p.rounds:,}" for p in every]),
        ("Median round", [None if median is None else seconds(median) for median in medians]),
        ("Arrived", [percent(p.arrived / p.rounds) if p.rounds else None for p in every]),
        ("Missed by others", [f"{p.missed:,}" for p in every]),
        ("Steps", [f"{p.steps:,}" if p.steps else None for p in every]),
        ("Samples", [f"{p.samples:,}" if p.samples else None for p in every]),
        ("Sent", [bytes_text(p.bytes_sent) for p in every]),
        ("Received", [bytes_text(p.bytes_received) for p in every]),
        ("Relayed", [f"{p.relayed:,}" if p.relayed else None for p in every]),
        ("Test loss", [None if p.loss is None else f"{p.loss:.3g}" for p in every]),
        ("Accuracy", [None if p.accuracy is None else percent(p.accuracy) for p in every]),
    ]
    columns = [column for column in columns if any(value is not None for value in column[1])]
    rows = []
    for at, p in enumerate(every):
        state = f"{p.state} (client)" if p.client else p.state
        who = cell(p.number, "n") + cell(state, f"nw {'bad' if p.state in LOST else ''}")
        rows.append(who + "".join(cell(values[at], "n") for _, values in columns))
    heads = [("Peer", "n"), ("State", ""), *((name, "n") for name, _ in columns)]
    away = any(p.last_t is None and p.told and not p.auxiliary for p in summary.peers.values())
    cap = "Peers without figures joined from elsewhere: their traces are there."
    where = f"<p class='cap'>{cap}</p>" if away else ""
    return f"<section><h2>Peers</h2>{table(heads, rows)}{where}</section>"


def links(summary: Summary) -> str:
    """The section: of each peer's ways to the others those that took longest; nothing in virtual time."""
    if not summary.links:
        return ""
    shown = sorted(summary.links, key=_burden, reverse=True)[:LINKS_SHOWN]
    shown.sort(key=lambda link: (link.peer, link.other))
    ways = len(summary.links) + summary.links_left_out
    those = f" Shown are the {len(shown)} on which messages waited longest, of {ways:,}."
    those = those if ways > len(shown) else ""
    said = [p.sealed for p in summary.peers.values() if p.sealed is not None]
    how = "sealed" if all(said) else "in clear" if not any(said) else "partly sealed"
    refused: Counter[str] = Counter()
    for peer in summary.peers.values():
        refused.update(peer.refused)
    strange = ", ".join(f"{why} {count:,}" for why, count in refused.most_common())
    turned = f" Refused: {strange}." if strange else ""
    streamed = sum(link.protocol == "tcp" for link in summary.links)
    over = (
        f" Over TCP went {streamed} of these ways at the end, as nothing came back by UDP."
        if streamed
        else ""
    )
    caption = (
        f"What peers sent each other was {how}.{turned}{over} Of each way: what the path delivered, as rate "
        "control has measured it; round trips, the shortest and with what busy peers keep; datagrams of "
        "1,152 bytes, or packets of larger ones, how large these may be there, and how many were lost; "
        f"messages that were late before they left; what kept messages waiting for longest.{those}"
    )
    rows = [_way(link) for link in shown]
    return f'<section><h2>Links</h2><p class="cap">{escape(caption)}</p>{table(_LINK, rows)}</section>'


def _burden(link: trace.Link) -> tuple[float, int]:
    return sum(link.held_s.values()), link.sent


def _way(link: trace.Link) -> str:
    held = max(link.held_s.items(), key=lambda item: item[1], default=None)
    cells = (
        f"{link.peer} \N{RIGHTWARDS ARROW} {link.other}"
        + (", over TCP" if link.protocol == "tcp" else "")
        + (f", through peer {link.through}" if link.through >= 0 else ""),
        bytes_text(link.rate_bytes_per_s) + "/s" if link.rate_bytes_per_s else None,
        seconds(link.min_rtt_s) if link.min_rtt_s else None,
        seconds(link.rtt_s) if link.rtt_s else None,
        f"{link.sent:,}",
        bytes_text(link.datagram_bytes) if link.datagram_bytes else None,
        percent(link.lost / link.sent) if link.sent else None,
        f"{link.late:,}" if link.late else None,
        None if held is None else f"{HELD_BY.get(held[0], held[0])}, {seconds(held[1])}",
    )  # fmt: skip
    return "".join(cell(text, kind or "nw") for text, (_, kind) in zip(cells, _LINK, strict=True))


def selections(summary: Summary) -> str:
    """The section; nothing where everything was sent."""
    if not summary.sparse:
        return ""
    rows = [_selected(peer, sums) for peer, sums in sorted(summary.sparse.items())]
    caption = (
        "Rounds in which all was sent, since a selection would have taken longer. Of a message in a round, "
        "dense against sent; fragments delivered into the round's sum, given back to be sent again, "
        "rows that came a round late, blocks of which some never came."
    )
    return f'<section><h2>Selections</h2><p class="cap">{caption}</p>{table(_SELECTED, rows)}</section>'


def _selected(peer: int, sums: Selections) -> str:
    last = sums.last
    cells = (
        peer, f"{sums.rounds:,}", f"{sums.whole:,}", None if last is None else f"{last.density:.3%}",
        bytes_text(sums.saved_bytes), percent(sums.captured / max(1, sums.rounds)),
        None if last is None else f"{last.residual_norm:.3g}", f"{sums.committed:,}", f"{sums.restored:,}",
        f"{sums.late:,}", f"{sums.given_up:,}",
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells)


def replicas(summary: Summary) -> str:
    """The section; nothing where no replicas were compared."""
    if not summary.replicas:
        return ""
    rows = [_compared(peer, looks) for peer, looks in sorted(summary.replicas.items())]
    caption = (
        "Peers that average gradients compare their models now and then. Of all parts that were looked at, "
        "the share that not all had alike, and that this peer had not as most had; parts given to and taken "
        "from others; by how much a part's parameters changed when it was taken, relative to their norm."
    )
    return f'<section><h2>Replicas</h2><p class="cap">{caption}</p>{table(_COMPARED, rows)}</section>'


def _compared(peer: int, looks: Comparisons) -> str:
    alike = "they differ" if looks.alike_since is None else clock(looks.alike_since)
    cells = (
        peer, f"{looks.count:,}", percent(looks.apart / max(1, looks.units)),
        percent(looks.own / max(1, looks.units)), f"{looks.given:,}", f"{looks.taken:,}",
        _norm(looks.largest), _norm(looks.last), alike,
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells)


def gathered(summary: Summary) -> str:
    """The section; nothing where no step had a target batch."""
    if not summary.gathered:
        return ""
    rows = [
        _gathered(of)
        for _, of in sorted(summary.gathered.items(), key=lambda item: (item[0][0], str(item[0][1])))
    ]
    caption = (
        "Steps with a target batch: what became of the samples that each peer computed gradients of. "
        "Counted: in the mean of a step. Dropped: in none, for the reason named. Beyond the target: what "
        "steps had more than it, in the mean. Goodput: counted, over what the peer could have computed in "
        "the same time without waits, averages and losses."
    )
    return f'<section><h2>Target batch</h2><p class="cap">{caption}</p>{table(_GATHERED, rows)}</section>'


def _gathered(of: trace.Target) -> str:
    dropped = ", ".join(f"{number:,.0f} {why}" for why, number in sorted(of.dropped.items()) if number > 0)
    cells = (
        of.peer, f"{of.target:,.0f}", f"{of.steps:,}", f"{of.computed:,.0f}", f"{of.counted:,.0f}",
        f"{of.pending:,.0f}", percent(of.overshoot), percent(of.goodput),
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells) + cell(dropped or NONE, "")


def leaderboard(summary: Summary) -> str:
    """The section; nothing where the crew takes no persons."""
    told = summary.leaderboard
    if told is None or not told.persons:
        return ""
    every = max(1, sum(told.samples))
    rows = [
        cell(person, "")
        + cell(f"{samples:,}", "n")
        + cell(percent(samples / every), "n")
        + cell(f"{n:,}", "n")
        for person, samples, n in zip(told.persons, told.samples, told.processes, strict=False)
    ]
    caption = (
        "Samples that each person has contributed. They are what the person's own peers say of themselves: "
        f"peer {told.peer} has heard it and added it up, last at {clock(told.t)}, and nobody can check it. "
        "A peer tells its samples every ten seconds: those since are left out where it ended without a "
        "word, or was put out."
    )
    heads = [("Person", ""), ("Samples", "n"), ("Share", "n"), ("Processes", "n")]
    return f'<section><h2>Persons</h2><p class="cap">{caption}</p>{table(heads, rows)}</section>'


def epochs(summary: Summary) -> str:
    """The section: of the epochs those in which most was missed or used twice; nothing without a split."""
    if not summary.epochs:
        return ""
    ordered = sorted(
        summary.epochs.items(), key=lambda item: (item[1].missed[1], item[1].twice[1], item[0]), reverse=True
    )
    rows = [
        cell(f"{epoch:,}", "n")
        + cell(f"{samples:,}", "n")
        + cell(_span(used.missed), "n" + " bad" * (used.missed[1] > 0))
        + cell(_span(used.twice), "n")
        for (epoch, samples), used in sorted(ordered[:EPOCHS_SHOWN])
    ]
    caption = (
        "Samples of a split that nobody is known to have used, since a peer died that had claimed them, and "
        "that several peers used, which did not hear each other. Where peers know different things: the "
        "least and the most that they tell."
    )
    if len(ordered) > EPOCHS_SHOWN:
        caption += f" Shown are those {EPOCHS_SHOWN} of {len(ordered):,} with most of these."
    if summary.epochs_left_out:
        caption += f" {summary.epochs_left_out:,} records of more epochs are not counted."
    heads = [(name, "n") for name in ("Epoch", "Samples", "Missed", "Used twice")]
    return f'<section><h2>Epochs</h2><p class="cap">{caption}</p>{table(heads, rows)}</section>'


def _span(told: tuple[int, int]) -> str:
    least, most = told
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def private(summary: Summary) -> str:
    """The section; nothing where no steps were private."""
    if not summary.spent:
        return ""
    rows = [_spent(of) for _, of in sorted(summary.spent.items())]
    caption = (
        "What differentially private steps have spent of each peer's own samples, in all runs that its "
        "ledger knows of. Steps: those that drew a batch, whatever became of it. Noise: over the norm to "
        "which each sample's gradient is clipped. Rate: its chance to be in a batch. Losses and accuracies "
        "on this page have no noise."
    )
    return (
        f'<section><h2>Differential privacy</h2><p class="cap">{caption}</p>{table(_SPENT, rows)}</section>'
    )


def _spent(of: trace.Privacy) -> str:
    figures = f"{of.epsilon:.4g}", f"{of.delta:.2g}", f"{of.steps:,}", f"{of.noise_multiplier:g}"
    cells = "".join(cell(text, "num") for text in (*figures, percent(of.rate)))
    return cell(of.peer, "num") + cell(of.holder, "") + cells


def guards(summary: Summary) -> str:
    """The section; nothing where no shares were guarded."""
    if not summary.verdicts and not summary.unjudged:
        return ""
    rows = [_verdict(peer, of) for peer, of in sorted(summary.verdicts.items())]
    caption = (
        "What owners of blocks made of each peer's shares. Cut: the part that was left out or clipped away; "
        "where the rule leaves out a fixed number of values, honest peers lose as many as others spare them. "
        "Distance: from the result, over the middle peer's; a peer that lies is far away, "
        "and so is one whose data are unlike the others'. "
        f"Chunks without an average, since too few shares came: {summary.unjudged:,}."
    )
    return f'<section><h2>Guard</h2><p class="cap">{caption}</p>{table(_JUDGED, rows)}</section>'


def _verdict(peer: int, of: Verdicts) -> str:
    values = max(1.0, of.values)
    cells = (
        peer, f"{of.values:,.0f}", percent(of.cut / values), f"{of.far / values:.3g}", f"{of.capped:,}",
        f"{len(of.owners):,}",
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells)


def _norm(distance: float) -> str:
    return f"{distance:.2g}" if distance else "0"


def coming(summary: Summary) -> str:
    """The section; empty where nobody came, went, or was taken for dead."""
    items = [item for item in summary.items if item.what in MEMBERSHIP and not item.error]
    back = {item.about for item in items if item.what == "back"}
    items = [item for item in items if item.what != "healed" or item.about not in back]  # the same twice
    if not items:
        return ""
    rows = [
        cell(clock(item.t), "n") + cell(_seat(item), "nw") + cell(in_words(item.what), f"nw {_style(item)}")
        + cell(item.detail) + cell(_seen(item))
        for item in items
    ]  # fmt: skip
    heads = [("Time", "n"), ("Peer", ""), ("What", ""), ("Its process", ""), ("Seen by", "")]
    return f"<section><h2>Coming and going</h2>{_healed(items)}{table(heads, rows, 'tight')}</section>"


def _healed(items: list[Item]) -> str:
    """In words, that peers that did not hear each other for a while are one crew again."""
    back = [item for item in items if item.what in _GOOD]
    if not back:
        return ""
    seats = sorted({item.about for item in back if item.about >= 0})
    who = these_peers(seats).capitalize() if seats else "Some peers"
    one = len(seats) == 1
    was, are = ("was", "is") if one else ("were", "are")
    text = f"{who} did not answer for a while, {was} taken for dead, and {are} back"
    return f"<p class='good'>{escape(text)} (last at {clock(max(item.t for item in back))}).</p>"


def _style(item: Item) -> str:
    return "bad" if item.what in _BAD else "good" if item.what in _GOOD else ""


def _seat(item: Item) -> str:
    return str(item.about) if item.about >= 0 else "none"


def _seen(item: Item) -> str:
    by = sorted(peer for peer in item.by if peer >= 0)
    return ", ".join(map(str, by[:12])) + (f" and {len(by) - 12} more" if len(by) > 12 else "")


def events(summary: Summary) -> str:
    """Notes and errors, and losses that were not finite."""
    rows = [_event(item) for item in summary.items if item.error or item.what not in MEMBERSHIP | UNTOLD]
    for p in summary.peers.values():
        if p.batch_losses_bad and p.bad_since_t is not None:
            what = f"{p.batch_losses_bad:,} training losses were not finite, the first here"
            rows.append(cell(clock(p.bad_since_t), "n") + cell(f"peer {p.number}", "nw") + cell(what, "bad"))
    if not rows:
        return '<section><h2>Notes and errors</h2><p class="none">None.</p></section>'
    heads = [("Time", "n"), ("About", ""), ("What", "")]
    more = (
        f'<p class="cap">{summary.items_left_out:,} more are not listed.</p>'
        if summary.items_left_out
        else ""
    )
    return f"<section><h2>Notes and errors</h2>{table(heads, rows, 'tight')}{more}</section>"


def _event(item: Item) -> str:
    about = f"peer {item.about}" if item.about >= 0 else "the crew"
    by = sorted(peer for peer in item.by if peer >= 0 and peer != item.about)
    seen = ""
    if by and not item.error:
        seen = f" (seen by {these_peers(by) if len(by) <= 12 else counted(len(by), 'peer')})"
    if item.error:
        what = escape(item.what)
        detail = f"<pre>{escape(item.detail)}</pre>" if item.detail else ""
        text = f'<td><details><summary class="bad">error: {what}</summary>{detail}</details></td>'
    else:
        text = f"<td>{escape(in_words(item.what, item.detail, ', '))}{seen}</td>"
    return cell(clock(item.t), "n") + cell(about, "nw") + text


def configuration(summary: Summary, folder: str) -> str:
    """All settings, and how to run it again."""
    run = summary.run
    if run is None:
        return ""
    rows = [cell(key, "nw") + cell(value) for key, value in run.config.items()]
    settings = table([("Setting", ""), ("Value", "")], rows, "tight") if rows else ""
    again = (
        f'<div class="card"><pre>{escape(run.command)}</pre></div>'
        if run.command
        else f'<p class="cap">The trace names no command; its seed is {run.seed}; settings below.</p>'
    )
    return (
        f"<section><h2>To run it again</h2>{again}</section>"
        f'<section><h2>Configuration</h2><p class="cap">Trace version {run.version}, from the folder'
        f" {escape(folder)}.</p>{settings}</section>"
    )
