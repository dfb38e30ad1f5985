"""``ragtag demo`` and ``ragtag run``: peers as processes on this machine."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ragtag.app.commands import options
from ragtag.app.commands.common import plain_errors, print_json


@plain_errors
def demo(
    seed: options.Seed = 0,
    run_folder: options.RunFolder = None,
    watch: options.Watch = None,
    as_json: options.Json = False,
) -> None:
    """Train a small model on six peers while packets get lost, one peer freezes and one dies."""
    from dataclasses import asdict

    from ragtag.app.demo import Plan, run_demo
    from ragtag.app.folders import new_run_folder

    console = Console(stderr=as_json)
    result = run_demo(
        plan=Plan(seed=seed),
        folder=run_folder or new_run_folder("demo"),
        console=console,
        live=console.is_terminal if watch is None else watch,
    )
    if as_json:
        print_json({"ok": result.ok, **asdict(result)})
    raise typer.Exit(0 if result.ok else 1)


@plain_errors
def run(
    script: options.Script,
    args: options.ScriptArgs = None,
    peers: options.Peers = 2,
    module: options.Module = False,
    on_error: options.WhenOneFails = options.OnError.continue_,
    faults: options.FaultsText = "",
    seed: options.Seed = 0,
    run_folder: options.RunFolder = None,
    watch: options.Watch = None,
    as_json: options.Json = False,
) -> None:
    """Start N peers of a script on this machine.

    The script joins its crew with [bold]ragtag.join()[/bold]. Each line that a
    peer prints comes with its number; an error that several peers share is
    shown once.
    """
    from ragtag.app.launch import check_launch, launch
    from ragtag.app.run_view import RunView, result_json, summary, watching
    from ragtag.core.faultspec import parse_faults

    argv = [*(["-m"] if module else []), script, *(args or [])]
    parsed = parse_faults(faults)
    check_launch(peers, argv, parsed)  # before a folder is made
    out = Console(stderr=as_json, highlight=False)
    err = out if out.is_terminal else Console(stderr=True, highlight=False)
    folder = _folder(run_folder, script if module else Path(script).stem)
    live = out.is_terminal if watch is None else watch
    view = RunView(out, err, watched=live, on_error=on_error.value)
    with watching(folder, out, script) if live else nullcontext():
        result = launch(
            peers,
            argv,
            run_folder=folder,
            seed=seed,
            faults=parsed,
            on_error=on_error.value,
            on_event=view.show,
        )
    if as_json:
        print_json(result_json(result))
    else:
        err.print(summary(result))
        err.print(f"trace in {escape(str(folder))}; [cyan]ragtag report {escape(str(folder))}[/cyan]")
    raise typer.Exit(result.exit_code)


def _folder(given: Path | None, name: str) -> Path:
    from ragtag.app.folders import new_run_folder

    if given is None:
        return new_run_folder(name)
    given.mkdir(parents=True, exist_ok=True)
    return given
