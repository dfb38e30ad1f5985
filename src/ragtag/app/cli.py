"""The ``ragtag`` command. What is heavy (numpy, torch) is imported by the command that needs it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from ragtag import __version__
from ragtag.app.disk import explain

P = ParamSpec("P")

_EXIT_CODES = """[bold]Exit codes[/bold]
0    all is well
1    a peer failed, a number missed its tolerance, or an error
2    wrong usage
130  interrupted"""

app = typer.Typer(
    name="ragtag",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
)


class OnError(StrEnum):
    """What a peer that fails means to the others."""

    continue_ = "continue"
    stop = "stop"


_settings = {"debug": False}


def _examples(*lines: str) -> str:
    """An epilog: one example a line, and what the exit codes mean."""
    shown = [f"[dim]$[/dim] [cyan]{escape(line)}[/cyan]" for line in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown]) + f"\n\n{_EXIT_CODES}"


def _plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Errors become one line on standard error and an exit code; ``--debug`` shows the traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except BrokenPipeError:
            sys.stdout = None  # who read us has gone; nothing more to flush
            raise typer.Exit(1) from None
        except Exception as error:
            if _settings["debug"]:
                raise
            expected = isinstance(error, ValueError | OSError)
            text = explain(error) if isinstance(error, OSError) else str(error)
            said = " ".join(text.split()) or type(error).__name__
            hint = "" if expected else f" ({type(error).__name__}; ragtag --debug shows where)"
            _fail(said + hint, 2 if expected else 1)

    return wrapped


def _fail(text: str, code: int) -> None:
    Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(text)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code) from None


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=1, allow_nan=False, default=str))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ragtag {__version__}")
        raise typer.Exit


def _list_faults(text: str) -> str:
    if text != "help":
        return text
    from ragtag.core.faultspec import SYNTAX

    typer.echo("Faults, separated by commas; times count from the moment when all peers have joined:")
    for how in SYNTAX.values():
        typer.echo(f"  {how}")
    raise typer.Exit


@app.callback(epilog=_examples("ragtag demo", "ragtag run -n 6 train.py", "ragtag simulate -n 16 --loss 0.1"))
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Train one PyTorch model on a ragtag crowd of machines: some slow, some gone, some losing packets."""
    _settings["debug"] = debug


RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run-folder",
        "-o",
        metavar="FOLDER",
        help="Where the trace goes.",
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
        help="What goes wrong, as loss=0.1,freeze=3@10+4,kill=5@20; --faults help lists all.",
        callback=_list_faults,
    ),
]


@app.command(epilog=_examples("ragtag demo", "ragtag demo --json"))
@_plain_errors
def demo(
    seed: Seed = 0,
    run_folder: RunFolder = None,
    watch: Annotated[bool | None, typer.Option("--watch/--no-watch", help="Show the live table.")] = None,
    as_json: Json = False,
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
        _print_json({"ok": result.ok, **asdict(result)})
    raise typer.Exit(0 if result.ok else 1)


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog=_examples(
        "ragtag run -n 6 train.py --lr 0.1",
        "ragtag run -n 4 -m my_package.train",
        "ragtag run -n 6 --faults loss=0.1,freeze=3@10+4,kill=5@20 train.py",
        "ragtag run -n 6 --on-error stop --json train.py",
    ),
)
@_plain_errors
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on to the script.")
    ] = None,
    peers: Annotated[
        int, typer.Option("--peers", "-n", min=1, max=64, metavar="N", help="How many to start, 1 to 64.")
    ] = 2,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="When a peer fails, the others continue or stop.")
    ] = OnError.continue_,
    faults: FaultsText = "",
    seed: Seed = 0,
    run_folder: RunFolder = None,
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--no-watch", help="Show the live table.", show_default="in a terminal"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start N peers of a script on this machine.

    The script joins its crew with [bold]ragtag.join()[/bold]. Each line that a
    peer prints comes with its number; an error that several peers share is
    shown once.
    """
    from contextlib import nullcontext

    from ragtag.app.folders import new_run_folder
    from ragtag.app.launch import check_launch, launch
    from ragtag.app.run_view import RunView, result_json, summary, watching
    from ragtag.core.faultspec import parse_faults

    argv = [*(["-m"] if module else []), script, *(args or [])]
    parsed = parse_faults(faults)
    check_launch(peers, argv, parsed)  # before a folder is made
    out = Console(stderr=as_json, highlight=False)
    err = out if out.is_terminal else Console(stderr=True, highlight=False)
    if run_folder is None:
        run_folder = new_run_folder(script if module else Path(script).stem)
    else:
        run_folder.mkdir(parents=True, exist_ok=True)
    live = out.is_terminal if watch is None else watch
    view = RunView(out, err, watched=live, on_error=on_error.value)
    with watching(run_folder, out, script) if live else nullcontext():
        result = launch(
            peers,
            argv,
            run_folder=run_folder,
            seed=seed,
            faults=parsed,
            on_error=on_error.value,
            on_event=view.show,
        )
    if as_json:
        _print_json(result_json(result))
    else:
        err.print(summary(result))
        err.print(f"trace in {escape(str(run_folder))}; [cyan]ragtag report {escape(str(run_folder))}[/cyan]")
    raise typer.Exit(result.exit_code)


@app.command(
    epilog=_examples(
        "ragtag simulate -n 16 --loss 0.1 --latency 0.02",
        "ragtag simulate -n 64 --size 10k --rounds 100 --method allreduce",
        "ragtag simulate -n 8 --faults burst=0.01/0.3,freeze=3@1+2,kill=5@3 --check",
        "ragtag simulate --json | jq .disagreement",
    )
)
@_plain_errors
def simulate(
    peers: Annotated[
        int, typer.Option("--peers", "-n", min=1, max=64, metavar="N", help="How many, 1 to 64.")
    ] = 16,
    method: Annotated[
        str, typer.Option("--method", help="rps, rps+repair, allreduce or ring.", metavar="NAME")
    ] = "rps",
    size: Annotated[
        str,
        typer.Option("--size", metavar="COUNT", help="Values that each peer holds, as 250000, 100k or 1M."),
    ] = "100k",
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Rounds of averaging.")] = 20,
    loss: Annotated[
        float | None, typer.Option("--loss", metavar="P", help="Share of datagrams lost.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option("--latency", metavar="SECONDS", help="One-way delay in seconds.")
    ] = None,
    faults: FaultsText = "",
    compute: Annotated[
        float, typer.Option("--compute", min=0.0, metavar="SECONDS", help="Mean seconds of a local step.")
    ] = 0.1,
    seed: Seed = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Hold invariants; heal the network at the end.")
    ] = False,
    run_folder: RunFolder = None,
    as_json: Json = False,
) -> None:
    """Average among simulated peers, in virtual time.

    Peers take random local steps and average. The table shows, for each round,
    how much arrived, how far the peers are apart (in units of a step's
    variance) and how long it took. One seed gives one run, always.
    """
    from ragtag.app import simulate_view
    from ragtag.app.experiment import Setup
    from ragtag.app.folders import new_run_folder
    from ragtag.core.faultspec import parse_faults

    parts = [] if loss is None else [f"loss={loss:g}"]
    parts += [] if latency is None else [f"delay={latency:g}"]
    setup = Setup(
        peers=peers,
        values=simulate_view.count(size),
        rounds=rounds,
        method=method,
        faults=parse_faults(",".join([*parts, *([faults] if faults else [])])),
        compute_s=compute,
        seed=seed,
        check=check,
    )
    result = simulate_view.run(setup, run_folder or new_run_folder(f"simulate-{method}"))
    if as_json:
        _print_json(result.to_json())
    else:
        simulate_view.show(result, Console())


@app.command(
    epilog=_examples("ragtag reproduce rps --quick", "ragtag reproduce rps --seeds 5 --jobs 8 --json")
)
@_plain_errors
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="Which paper: rps.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and seeds: minutes.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE", help="A tar archive of CIFAR-10 images, in place of handwritten digits."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for results and figures.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="N", help="Repetitions, for the bands.")
    ] = 3,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes side by side.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Measure a paper's figures again, each beside what it reported, with its tolerance: pass or fail."""
    import importlib

    from ragtag.app.folders import new_run_folder
    from ragtag.recipes import RECIPES

    if paper not in RECIPES:
        raise ValueError(f"no recipe is called {paper!r}; there are: {', '.join(sorted(RECIPES))}")
    if data is not None and not data.exists():
        raise FileNotFoundError(f"there is no archive {data}")
    recipe = importlib.import_module(RECIPES[paper])
    with _progress(f"reproducing {paper}") as tell:
        report = recipe.reproduce(
            quick=quick,
            data=data,
            out=out or new_run_folder(f"reproduce-{paper}"),
            seeds=seeds,
            jobs=jobs,
            progress=tell,
        )
    if as_json:
        _print_json(report.to_json())
    else:
        report.print(Console())
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog=_examples("ragtag report runs/demo-20260101-120000 --open", "ragtag report RUN --json"))
@_plain_errors
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or simulated.", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page.", show_default="RUN/report.html"),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Make one self-contained page of a run: accuracy, arrival, round times, faults, who was missed when."""
    from ragtag.app.report import build_report, report_json

    if as_json:
        _print_json(report_json(run))
        return
    page = build_report(run, out)
    typer.echo(str(page))
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command(epilog=_examples("ragtag watch runs/demo-20260101-120000"))
@_plain_errors
def watch(
    run: Annotated[Path, typer.Argument(help="The folder that a run writes.", metavar="RUN")],
) -> None:
    """Follow a run in the terminal until it is over; Ctrl-C leaves the run alone."""
    from ragtag.app.dashboard import watch as follow

    if follow(run).abandoned:
        raise typer.Exit(1)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, in a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {escape(what)}")

        yield tell


def main() -> None:
    """The console script."""
    app(prog_name="ragtag")


if __name__ == "__main__":
    main()
