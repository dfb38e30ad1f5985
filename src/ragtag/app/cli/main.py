"""The ``ragtag`` command. What is heavy (numpy, torch) is imported by the command that needs it."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from ragtag import __version__
from ragtag.app.cli import leak as leaks
from ragtag.app.cli import options, start
from ragtag.app.cli.common import RUN_CODES, Command, examples, plain_errors, print_json, progress, settings
from ragtag.app.cli.probe import probe
from ragtag.app.cli.start import JoinCommand
from ragtag.recipes import PAPERS, RECIPES

Paper = Annotated[str, typer.Argument(metavar="PAPER", help="Its name, as above.")]

app = typer.Typer(
    name="ragtag",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
)
command = partial(app.command, cls=Command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ragtag {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("ragtag demo", "ragtag run -n 6 train.py", "ragtag simulate -n 16 --loss 0.1"))
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors, whole.")] = False,
) -> None:
    """Train one PyTorch model on a ragtag crowd of machines: some slow, some gone, some losing packets."""
    settings["debug"] = debug
    if debug:
        os.environ["RAGTAG_TRACEBACK"] = "1"  # of peers' scripts, too


command(epilog=examples("ragtag demo", "ragtag demo --json"))(start.demo)
command(
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "ragtag run -n 6 train.py --lr 0.1",
        "ragtag run -n 4 -m my_package.train",
        "ragtag run -n 6 --faults loss=0.1,freeze=3@10+4,kill=5@20 train.py",
        "ragtag run -n 6 --on-error stop --json train.py",
        "ragtag run -n 6 --restarts 3 --min-peers 4 train.py",
        codes=RUN_CODES,
    ),
)(start.run)
command(
    epilog=examples(
        "ragtag invite",
        "ragtag invite runs/train-20260101-120000",
        "ragtag invite --listen 192.0.2.7:4433",
        "ragtag invite --persons > holder.txt",
        "ragtag invite --for alice --days 7 holder.txt > alice.txt",
    )
)(start.invite)
command(
    epilog=examples("ragtag revoke alice holder.txt", "ragtag revoke alice.txt runs/train-20260101-120000")
)(start.revoke)
command(
    context_settings={"allow_interspersed_args": False},
    cls=JoinCommand,
    epilog=examples(
        "ragtag join token.txt train.py --lr 0.1",
        "ssh otter ragtag invite runs/train-20260101-120000 | ragtag join - train.py",
        "ragtag join -n 2 token.txt -m my_package.train",
        codes=RUN_CODES,
    ),
)(start.join)


@command(
    epilog=examples(
        "ragtag simulate -n 16 --loss 0.1 --latency 0.02",
        "ragtag simulate -n 64 --size 10k --rounds 100 --method allreduce",
        "ragtag simulate -n 8 --faults burst=0.01/0.3,freeze=3@1+2,kill=5@3 --check",
        "ragtag simulate --json | jq .disagreement",
    )
)
@plain_errors
def simulate(
    peers: options.Peers = 16,
    method: options.MethodName = "rps",
    size: options.Size = "100k",
    rounds: options.Rounds = 20,
    loss: options.LossShare = None,
    latency: options.Latency = None,
    faults: options.FaultsText = "",
    compute: options.Compute = 0.1,
    seed: options.Seed = 0,
    check: options.Check = False,
    run_folder: options.RunFolder = None,
    as_json: options.Json = False,
) -> None:
    """Average among simulated peers, in virtual time.

    Peers take random local steps and average. The table shows, for each round,
    how much arrived, how far the peers are apart (in units of a step's
    variance) and how long it took. One seed gives one run, always.
    """
    from ragtag.app.cli.common import new_run_folder
    from ragtag.app.experiment import ExperimentSetup
    from ragtag.app.terminal import simulate_view
    from ragtag.core.faultspec import parse_faults

    parts = [] if loss is None else [f"loss={loss:g}"]
    parts += [] if latency is None else [f"delay={latency:g}"]
    setup = ExperimentSetup(
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
        print_json(result.to_json())
    else:
        simulate_view.show(result, Console())


@command(
    help="Measure a paper's figures again, each beside what it reported, with its tolerance: pass or fail."
    "\n\n" + "\n".join(f"[bold]{name:<9}[/bold]  {what}" for name, what in PAPERS.items()),
    epilog=examples("ragtag reproduce rps --quick", "ragtag reproduce rps --seeds 5 --jobs 8 --json"),
)
@plain_errors
def reproduce(
    paper: Paper,
    quick: options.Quick = False,
    data: options.Data = None,
    out: options.OutFolder = None,
    seeds: options.Seeds = 3,
    jobs: options.Jobs = 2,
    as_json: options.Json = False,
) -> None:
    """The command: a recipe's report, and whether it passes."""
    import importlib

    from ragtag.app.cli.common import new_run_folder

    if paper not in RECIPES:
        raise ValueError(f"no recipe is called {paper!r}; there are: {', '.join(sorted(RECIPES))}")
    if data is not None and not data.exists():
        raise FileNotFoundError(f"there is no archive {data}")
    recipe = importlib.import_module(RECIPES[paper])
    with progress(f"reproducing {paper}") as tell:
        report = recipe.reproduce(
            quick=quick,
            data=data,
            out=out or new_run_folder(f"reproduce-{paper}"),
            seeds=seeds,
            jobs=jobs,
            progress=tell,
        )
    if as_json:
        print_json(report.to_json())
    else:
        report.print(Console())
    raise typer.Exit(0 if report.ok else 1)


command(
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "ragtag probe train.py",
        "ragtag probe --parameters 25M --rate 50Mbit",
        "ragtag probe --model my_package.models:build --peers 8 --run runs/demo-20260101-120000",
        "ragtag probe --parameters 25M --crew crew.token --peers 4",
        "ragtag probe --parameters 25M --ratio 0.01 --json",
    ),
)(probe)


@command(
    epilog=examples(
        "ragtag leak",
        "ragtag leak my_cut.py:build --json",
        "ragtag leak --attack inversion my_model.py:batch",
        "ragtag leak --attack hijacking my_cut.py:build",
    )
)
@plain_errors
def leak(
    cut: leaks.CutText = None,
    attack: leaks.AttackName = leaks.Attack.DECODER,
    weight: leaks.Weight = None,
    steps: leaks.Steps = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Measure what the codes at a cut, or a model's updates, tell of samples.

    Distance correlation, and decoders that are trained on leaked pairs of code
    and sample. FUNCTION gives the part of a net that stays with the data, samples
    that it was trained on, and samples held out. Without CUT, a small net is
    trained on digits, plain and with NoPeek. --attack tries another attacker.
    """
    if weight is not None and cut is not None and attack is not leaks.Attack.HIJACKING:
        raise leaks.CutError(
            "--weight is of NoPeek, and goes with --attack hijacking, or without CUT: what CUT gives is "
            "measured as it is"
        )
    weight = leaks.WEIGHT if weight is None else weight
    if attack is not leaks.Attack.DECODER:
        _rebuild(cut, attack, weight, steps, seed, as_json)
        return
    if steps is not None:
        raise leaks.CutError(
            "--steps goes with --attack hijacking or inversion; a decoder trains until it is done"
        )
    from ragtag.privacy.meters import leakage

    accuracy: dict[str, float] = {}
    with progress("measuring") as tell:
        if cut is not None:
            found = {cut: leakage(*leaks.cut_of(cut), seed=seed)}
        else:
            from ragtag.recipes.nopeek.training import DIGITS_EPOCHS, CutSetup, measure_cut

            found = {}
            for i, a1 in enumerate(dict.fromkeys((0.0, weight))):
                name = f"NoPeek, weight {a1:g}" if a1 else "plain"
                tell(i, 2, name)
                result = measure_cut(CutSetup(a1, seed, DIGITS_EPOCHS), None)
                found[name], accuracy[name] = result.leak, result.accuracy
    if as_json:
        print_json(leaks.to_json(found, accuracy))
    else:
        leaks.show_leaks(found, accuracy, Console())


def _rebuild(
    cut: str | None, attack: leaks.Attack, weight: float, steps: int | None, seed: int, as_json: bool
) -> None:
    """``ragtag leak`` by an attacker that rebuilds samples: of a hijacked client, or from updates."""
    from ragtag.privacy.hijacking import STEPS as HIJACKING_STEPS
    from ragtag.privacy.hijacking import Hijacking, hijacking
    from ragtag.privacy.inversion import STEPS as INVERSION_STEPS
    from ragtag.privacy.inversion import Inversion, inversion

    found: dict[str, Hijacking | Inversion] = {}
    with progress("attacking") as tell:
        if attack is leaks.Attack.INVERSION:
            if cut is None:
                raise leaks.CutError(
                    f"--attack inversion needs CUT, a function that gives {leaks.GIVES[attack]}"
                )
            found = {cut: inversion(*leaks.updates_of(cut), seed=seed, steps=steps or INVERSION_STEPS)}
        else:
            if cut is not None:
                front, private_x, public_x = leaks.hijacked_of(cut)
            else:
                from ragtag.recipes.nopeek.training import Samples, cut_net

                digits = Samples.of(None)
                private_x, public_x = digits.train_x, digits.held_x
                front, _ = cut_net(tuple(private_x.shape[1:]), seed)
            for i, a1 in enumerate(dict.fromkeys((0.0, weight))):
                name = f"NoPeek, weight {a1:g}" if a1 else "plain"
                tell(i, 2, name)
                found[name] = hijacking(
                    front, private_x, public_x, nopeek=a1, seed=seed, steps=steps or HIJACKING_STEPS
                )
    if as_json:
        print_json(leaks.rebuilt_json(attack, found))
    else:
        leaks.show_rebuilt(attack, found, Console())


@command(epilog=examples("ragtag report runs/demo-20260101-120000 --open", "ragtag report RUN --json"))
@plain_errors
def report(
    run: options.Run,
    out: options.OutPage = None,
    open_: options.Open = False,
    as_json: options.Json = False,
) -> None:
    """Make one self-contained page of a run: accuracy, arrival, round times, faults, missed peers."""
    from ragtag.app.report import build_report, report_json

    if as_json and (open_ or out is not None):
        raise ValueError("--json prints the figures and makes no page: give it, or --out and --open")
    if as_json:
        print_json(report_json(run))
        return
    page = build_report(run, out)
    typer.echo(str(page))
    if open_:
        typer.launch(page.resolve().as_uri())


@command(epilog=examples("ragtag watch runs/demo-20260101-120000"))
@plain_errors
def watch(run: options.Run) -> None:
    """Follow a run in the terminal until it is over; Ctrl-C leaves the run alone."""
    from ragtag.app.terminal.dashboard import watch as follow

    if follow(run).abandoned:
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    app(prog_name="ragtag")


if __name__ == "__main__":
    main()
