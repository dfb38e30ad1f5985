"""``ragtag simulate``: peers in virtual time."""

from __future__ import annotations

from rich.console import Console

from ragtag.app.cli import options
from ragtag.app.cli.common import plain_errors, print_json


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
    from ragtag.app.experiment import Setup
    from ragtag.app.terminal import simulate_view
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
        print_json(result.to_json())
    else:
        simulate_view.show(result, Console())
