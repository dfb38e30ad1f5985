"""Runs the parts of a recipe side by side, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

from ragtag.recipes.base import Progress

STALL_S = 3600.0
"""When no part ends for this long, something hangs."""


class Job(NamedTuple):
    """A call of a module's function with plain arguments; ``name`` is shown when it is done."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_jobs(jobs: Sequence[Job], processes: int, progress: Progress | None = None) -> list[Any]:
    """Run all jobs, in at most ``processes`` processes, and return their results in order.

    Raises:
        TimeoutError: no job ended for ``STALL_S``. Whatever a job raises.
    """
    tell = progress or (lambda done, total, what: None)
    if processes <= 1 or len(jobs) == 1:
        results = []
        for i, job in enumerate(jobs):
            results.append(job.function(*job.arguments))
            tell(i + 1, len(jobs), job.name)
        return results
    # spawn: a forked child would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)), context, initializer=_begin)
    try:
        futures = [pool.submit(job.function, *job.arguments) for job in jobs]
        _await(jobs, futures, tell)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _await(jobs: Sequence[Job], futures: Sequence[Future[Any]], tell: Progress) -> None:
    names = dict(zip(futures, (job.name for job in jobs), strict=True))
    open_: set[Future[Any]] = set(futures)
    done = 0
    while open_:
        ended, open_ = wait(open_, timeout=STALL_S, return_when=FIRST_COMPLETED)
        if not ended:
            raise TimeoutError(f"no part ended for {STALL_S:.0f} s; still open: {names[next(iter(open_))]}")
        for future in ended:
            future.result()
            done += 1
            tell(done, len(futures), names[future])


def _begin() -> None:
    """In each process: one thread of arithmetic, and Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a job imports torch
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
