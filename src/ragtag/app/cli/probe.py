"""``ragtag probe``: whether sending fewer bytes pays, on this machine and over a given link."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ragtag.app.cli import options
from ragtag.app.cli.common import plain_errors, print_json, progress

if TYPE_CHECKING:
    from ragtag.app.probe.links import Links

CREW_S = 900.0
"""For so long at most a crew's links are measured, with the wait for its peers."""

Script = Annotated[
    Path | None, typer.Argument(metavar="SCRIPT", help="A training script; its first steps are run, alone.")
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the script.")]
Parameters = Annotated[
    str | None,
    typer.Option("--parameters", metavar="COUNT", help="Size of the model, as 25M; no script is run."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="What makes the model, also FILE.py:FUNCTION; only its size counts.",
    ),
]
Ratio = Annotated[float, typer.Option("--ratio", metavar="SHARE", help="Share of the entries that is sent.")]
Crew = Annotated[
    int, typer.Option("--peers", "-n", min=2, max=64, metavar="N", help="How many peers, 2 to 64.")
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="RATE", help="A peer's link, as 50Mbit, 1Gbit or 6.25MB (per second)."),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="FOLDER", help="Take links, or else a rate, from what this run left."),
]
OfCrew = Annotated[
    str | None,
    typer.Option(
        "--crew", metavar="TOKEN", help="Join this crew now, and measure its links; each machine does so."
    ),
]
STEPS, PATIENCE_S = 8, 300.0
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, max=1000, metavar="N", help="Steps of the script.", show_default=f"{STEPS}"
    ),
]
Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="SECONDS",
        help="How long these steps may take.",
        show_default=f"{PATIENCE_S:g}",
    ),
]


@plain_errors
def probe(
    script: Script = None,
    args: ScriptArgs = None,
    parameters: Parameters = None,
    model: Model = None,
    ratio: Ratio = 0.001,
    peers: Crew = 4,
    rate: Rate = None,
    run: Run = None,
    crew: OfCrew = None,
    steps: Steps = None,
    patience: Patience = None,
    as_json: options.Json = False,
) -> None:
    """Measure what selecting and encoding cost here, and on which links they pay.

    For each codec: what it sends, how long it takes on this machine, and its
    break-even: on a slower link it is faster than sending all of the gradient,
    on a faster one it is not, and is by-passed.

    With [bold]--crew TOKEN[/bold] on each machine of a crew, its links are measured
    first, pair by pair; then what an average of this model takes over them is
    told for each averager and codec, and which is best. In two steps:
    [bold]ragtag run -n 4 -m ragtag.app.probe.crew[/bold], then [bold]--run FOLDER[/bold].
    """
    if sum(given is not None for given in (script, parameters, model)) != 1:
        raise ValueError("give one of: a SCRIPT, --parameters COUNT, --model MODULE:FUNCTION")
    if script is None and (steps, patience) != (None, None):
        raise ValueError("--steps and --patience are of a SCRIPT, and none is run: leave them out")
    if sum(given is not None for given in (rate, run, crew)) > 1:
        raise ValueError("give one of --rate, --run and --crew")
    from ragtag.app.probe import estimate, source
    from ragtag.app.probe import measure as measuring
    from ragtag.app.probe.links import read_links
    from ragtag.app.probe.view import Probed, show
    from ragtag.codecs.sparse.density import Density

    density = Density(ratio)
    link, link_from = (None, "") if rate is None else (source.rate_of(rate), "as given")
    size = None if script is not None else _size(parameters, model)  # before anything is measured
    links = None if run is None else read_links(run)
    if crew is not None:
        links = _measured(crew, peers)
    if links is not None:
        peers, link = len(links.peers), min(map(links.rate, links.peers))
        link_from = "of the crew's slowest line, as measured"
    elif run is not None:
        link, link_from = source.rate_of_run(run)
    if script is not None:
        vectors = source.vectors_of_script(script, args or [], ratio, steps or STEPS, patience or PATIENCE_S)
    else:
        assert size is not None
        vectors = measuring.synthetic(size, ratio)
    with progress("probing") as tell:
        dense, costs = measuring.measure(vectors, ratio, tell)
    averages = []
    if links is not None:
        with progress("averaging in virtual time") as tell:
            averages = estimate.estimates(links, dense, costs, tell)
    found = Probed(
        size=vectors.size,
        origin=vectors.origin,
        ratio=ratio,
        k=density.k(vectors.size, 0),
        peers=peers,
        compiled=measuring.compiled(),
        dense=dense,
        costs=costs,
        rate_bytes_per_s=link,
        rate_from=link_from,
    )
    if as_json:
        more = {} if links is None else {"crew": estimate.as_plain(links, averages)}
        print_json(found.to_json() | more)
        return
    show(found, Console())
    if links is not None:
        estimate.show(links, averages, Console())


def _size(parameters: str | None, model: str | None) -> int:
    from ragtag.app.probe.source import size_of_model
    from ragtag.app.terminal.simulate_view import count

    return size_of_model(model) if model is not None else count(parameters or "")


def _measured(token: str, peers: int) -> Links:
    """Join a crew by its token, with one peer that measures its links once so many peers are there.

    Raises:
        ProbeError: it could not join, or was measured nothing; what it said stands on standard error.
        ValueError: what was given for a token is none.
    """
    from ragtag.app.cli.start import given_token, is_folder
    from ragtag.app.probe.links import read_links
    from ragtag.app.probe.source import ProbeError

    of_run = is_folder(token)
    text = None if of_run else given_token(token).encode()  # here, as the process below knows no file's name
    with tempfile.TemporaryDirectory(prefix="ragtag-probe-") as folder:
        join = [sys.executable, "-m", "ragtag", "join", token if of_run else "-", "--run-folder", folder]
        try:
            ended = subprocess.run(
                [*join, "--no-watch", "-m", "ragtag.app.probe.crew", "--peers", str(peers)],
                input=text,
                stdout=subprocess.DEVNULL,
                timeout=CREW_S,
            )
        except subprocess.TimeoutExpired:
            raise ProbeError(f"the crew's links were not measured within {CREW_S:g} s") from None
        links = read_links(Path(folder)) if ended.returncode == 0 else None
    if links is None:
        raise ProbeError(
            "the crew's links could not be measured (why stands above); every machine of the crew runs this "
            "command with the same token"
        )
    return links
