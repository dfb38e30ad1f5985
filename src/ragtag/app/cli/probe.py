"""``ragtag probe``: whether sending fewer bytes pays, on this machine and over a given link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragtag.app.cli import options
from ragtag.app.cli.common import plain_errors, print_json, progress

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
    typer.Option("--model", metavar="MODULE:FUNCTION", help="What makes the model; only its size counts."),
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
    Path | None, typer.Option("--run", metavar="FOLDER", help="Take the rate from this run's trace.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1000, metavar="N", help="Steps of the script.")]
Patience = Annotated[
    float, typer.Option("--patience", min=1.0, metavar="SECONDS", help="How long these steps may take.")
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
    steps: Steps = 8,
    patience: Patience = 300.0,
    as_json: options.Json = False,
) -> None:
    """Measure what selecting and encoding cost here, and on which links they pay.

    For each codec: what it sends, how long it takes on this machine, and its
    break-even: on a slower link it is faster than sending all of the gradient,
    on a faster one it is not, and is by-passed.
    """
    if sum(given is not None for given in (script, parameters, model)) != 1:
        raise ValueError("give one of: a SCRIPT, --parameters COUNT, --model MODULE:FUNCTION")
    if rate is not None and run is not None:
        raise ValueError("give --rate or --run, not both")
    from ragtag.app.probe import measure as measuring
    from ragtag.app.probe import source
    from ragtag.app.probe.view import Probed, show
    from ragtag.app.terminal.simulate_view import count
    from ragtag.codecs.sparse.density import Density

    density = Density(ratio)
    link, link_from = (None, "") if rate is None else (source.rate_of(rate), "as given")
    if run is not None:
        link, link_from = source.rate_of_run(run)
    if script is not None:
        vectors = source.vectors_of_script(script, args or [], ratio, steps, patience)
    else:
        n = source.size_of_model(model) if model is not None else count(parameters or "")
        vectors = measuring.synthetic(n, ratio)
    with progress("probing") as tell:
        dense, costs = measuring.measure(vectors, ratio, tell)
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
        print_json(found.to_json())
    else:
        show(found, Console())
