"""Arguments and options of the commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

SEATS_MAX, DIRECT_MAX = 1024, 64
"""Those of ``core.types``. That module imports numpy, and help should come at once."""


class OnError(StrEnum):
    """What a peer that fails means to the others."""

    continue_ = "continue"
    stop = "stop"


def _list_faults(text: str) -> str:
    if text != "help":
        return text
    from ragtag.core.faultspec import SYNTAX

    typer.echo("Faults, separated by commas; times count from the moment when all peers have joined:")
    for how in SYNTAX.values():
        typer.echo(f"  {how}")
    raise typer.Exit


def _list_methods(text: str) -> str:
    if text != "help":
        return text
    from ragtag.protocols.channel.averagers import AVERAGERS
    from ragtag.schedules.names import CENTRES

    for heading, names in (("Averagers", AVERAGERS), ("Schedules of a central state", CENTRES)):
        typer.echo(f"{heading}:")
        for name, entry in names.items():
            typer.echo(f"  {name}" + (f", {name}=N: {entry.number}" if entry.number else ""))
    raise typer.Exit


# -- Of several commands

Peers = Annotated[
    int,
    typer.Option(
        "--peers",
        "-n",
        min=1,
        max=SEATS_MAX,
        metavar="N",
        help=f"How many peers; more than {DIRECT_MAX} average in groups.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run-folder",
        "-o",
        metavar="FOLDER",
        help="Where the trace goes.",
        file_okay=False,
        show_default="a new one under runs/",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and no more.")]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Names every random draw of the run.")]
FaultsText = Annotated[
    str,
    typer.Option(
        "--faults",
        metavar="TEXT",
        help="What goes wrong, as loss=0.1,kill=5@20; --faults help lists all.",
        callback=_list_faults,
    ),
]
Watch = Annotated[
    bool | None,
    typer.Option("--watch/--no-watch", help="Show the live table.", show_default="in a terminal"),
]

# -- Of `ragtag run`

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the script.")]
Module = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")]
WhenOneFails = Annotated[
    OnError, typer.Option("--on-error", help="When a peer fails, the others continue or stop.")
]

Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="HOST",
        help="This machine's address, for peers of others; else only this machine's.",
    ),
]


class On(StrEnum):
    """Where peers run, other than on this machine."""

    ray = "ray"


OnWhat = Annotated[
    On | None, typer.Option("--on", help="ray: as actors on a Ray cluster.", show_default="this machine")
]
CpusPerPeer = Annotated[
    float | None,
    typer.Option("--cpus-per-peer", min=0.0, metavar="N", help="On Ray.", show_default="1"),
]
GpusPerPeer = Annotated[
    float | None,
    typer.Option("--gpus-per-peer", min=0.0, metavar="N", help="On Ray.", show_default="0"),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--restarts",
        min=0,
        metavar="N",
        help="How often a lost peer is started again: in all; with --on ray, each.",
        show_default="0; on Ray 10",
    ),
]
MinPeers = Annotated[
    int,
    typer.Option("--min-peers", min=1, metavar="N", help="So many must finish for exit code 0."),
]
WorkingDir = Annotated[
    Path | None,
    typer.Option(
        "--working-dir",
        metavar="FOLDER",
        help="Ray brings its files to every node; SCRIPT is a path inside it.",
        show_default="the script has one path on all nodes",
    ),
]

# -- Of `ragtag invite` and `ragtag join`

TokenText = Annotated[
    str,
    typer.Argument(
        metavar="TOKEN",
        help="A file with what ragtag invite printed, - for standard input, a run's folder, or the token.",
    ),
]
ScriptToJoin = Annotated[
    str | None,
    typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module; none with --auxiliary."),
]
Auxiliary = Annotated[
    bool,
    typer.Option(
        "--auxiliary", help="Average for the crew and compute nothing: without a script, until the crew ends."
    ),
]
Client = Annotated[
    bool,
    typer.Option(
        "--client",
        help="Train, and average nothing for others: for a slow uplink, or where others get through badly.",
    ),
]
PeersHere = Annotated[
    int,
    typer.Option(
        "--peers", "-n", min=1, max=SEATS_MAX, metavar="N", help="How many peers of this machine join."
    ),
]
RunToJoin = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run on this machine; with --for: or the holder's token, as for ragtag join.",
    ),
]
PersonsOnly = Annotated[
    bool, typer.Option("--persons", help="The new crew takes persons only; this is its holder's token.")
]
ForWhom = Annotated[
    str | None, typer.Option("--for", metavar="NAME", help="A token for this person, in a crew of --persons.")
]
Days = Annotated[
    float | None,
    typer.Option(
        "--days", min=0.001, max=366.0, metavar="N", help="With --for: it ends after so many days (7)."
    ),
]
Whom = Annotated[
    str,
    typer.Argument(
        metavar="PERSON",
        help="A person's name, which voids all tokens so far; or a token, or a file with one, which voids "
        "that and earlier ones.",
    ),
]
HolderText = Annotated[
    str,
    typer.Argument(
        metavar="HOLDER", help="The holder's token, as TOKEN of ragtag join; or its run's folder."
    ),
]
ListenAt = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST[:PORT]",
        help="Where the first peer, on this machine, is to be reached.",
        show_default="this machine's address, a free port",
    ),
]
CrewName = Annotated[str | None, typer.Option("--crew", metavar="NAME", help="The new crew's name.")]
Minutes = Annotated[
    int | None,
    typer.Option("--minutes", min=1, metavar="N", help="Members let nobody in by it after so many minutes."),
]

# -- Of `ragtag simulate`

MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        help="An averager, or a schedule of a central state, as allreduce, moshpit=8 or softsync=2; "
        "--method help lists all.",
        callback=_list_methods,
    ),
]
Size = Annotated[
    str, typer.Option("--size", metavar="COUNT", help="Values that each peer holds, as 250000, 100k or 1M.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Rounds of averaging.")]
LossShare = Annotated[float | None, typer.Option("--loss", metavar="P", help="Share of datagrams lost.")]
Latency = Annotated[
    float | None, typer.Option("--latency", metavar="SECONDS", help="One-way delay in seconds.")
]
Compute = Annotated[
    float, typer.Option("--compute", min=0.0, metavar="SECONDS", help="Mean seconds of a local step.")
]
Check = Annotated[bool, typer.Option("--check", help="Hold invariants; heal the network at the end.")]

# -- Of `ragtag reproduce`

Quick = Annotated[bool, typer.Option("--quick", help="Fewer steps and seeds: minutes.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Other data: a tar archive of CIFAR-10 images (rps, topk, nopeek, kfac, staleness), a .txt "
        "(diloco, internet, topk, staleness), or a folder with what it takes.",
    ),
]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="Folder for results and figures.", file_okay=False),
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="Repetitions, for the bands.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes side by side.")]

# -- Of `ragtag report` and `ragtag watch`

Run = Annotated[Path, typer.Argument(help="The folder of a run, live or simulated.", metavar="RUN")]
OutPage = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="The page.", show_default="RUN/report.html"),
]
Open = Annotated[bool, typer.Option("--open", help="Open it in the browser.")]
