"""Starting a run of N peers of one script."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ragtag.app.launch.events import Event, LaunchResult
from ragtag.app.launch.loop import Launch
from ragtag.app.launch.setup import LaunchError, OnError, Setup, check_launch
from ragtag.app.tracefile import trace_files
from ragtag.core import trace
from ragtag.core.faults import Faults


def launch(
    n: int,
    argv: Sequence[str],
    *,
    run_folder: Path | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    on_error: OnError = "continue",
    env: Mapping[str, str] | None = None,
    crew: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    run: trace.Run | None = None,
    grace_s: float = 5.0,
    host: str = "127.0.0.1",
    token: str | None = None,
    min_peers: int = 1,
    restarts: int = 0,
) -> LaunchResult:
    """Run ``python *argv`` as ``n`` peers of one crew and return once all have ended.

    argv: a script and its arguments, or ``-m``, a module and its arguments.
    run_folder: where the trace goes; it must not hold one already. ``None``: no trace.
    faults: those of processes (freeze, kill, slow) are done here, the others by the peers' drivers. Times
    count from the moment when all running peers are ready (``environment.Reached``); the drivers'
    own from when each began.
    on_error: what a peer that fails means to the others. env: added to the peers' environment.
    on_event: told of everything, in this thread; without it, nothing is printed.
    run: the record that opens the trace; name, seed, peers and start are filled in.
    grace_s: how long peers may take to end after SIGINT, and again after SIGTERM, before SIGKILL.
    host: the address of this machine on which peers listen; with loopback nobody comes from elsewhere.
    token: an invitation; the peers join that crew instead of being one of their own.
    min_peers: so many must finish for the result's exit code to be 0.
    restarts: how often, in all, a peer is started again that a signal or a fault has ended. It joins its crew
    as a newcomer; one that had not joined yet takes its first place.

    SIGINT, SIGTERM and SIGHUP end all peers within bounded time; a second one kills them at once.

    Raises:
        LaunchError: what was asked for is impossible.
        RuntimeError: not called from the main thread, which alone is told of signals.
        KeyboardInterrupt: a second interrupt came while peers were ending; all are killed.
    """
    faults = faults or Faults()
    check_launch(n, argv, faults, min_peers=min_peers, restarts=restarts)
    if run_folder is not None and list(trace_files(run_folder)):
        raise LaunchError(f"{run_folder} holds the trace of a run already; give another folder")
    setup = Setup(
        n,
        tuple(argv),
        crew or f"crew-{os.urandom(6).hex()}",
        time.time(),
        run_folder,
        seed,
        faults,
        on_error,
        dict(env or {}),
        grace_s,
        host,
        token,
        min_peers,
        restarts,
    )
    with ExitStack() as stack:
        return Launch(setup, on_event or _ignore, run, stack).run()


def _ignore(event: Event) -> None:
    """Without a listener nothing is printed."""
