"""Runs the parts of a recipe side by side, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ragtag.recipes.base import Progress
from ragtag.recipes.cache import ResultCache

STALL_S = 3600.0
"""A part has hung if none ends for this long."""


class Job(NamedTuple):
    """A call of a module's function with plain arguments. name: shown when it is done."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_jobs(
    jobs: Sequence[Job], processes: int, progress: Progress | None = None, out: Path | None = None
) -> list[Any]:
    """Run all jobs, in at most ``processes`` processes, and return their results in order.

    out: the recipe's folder. Results are stored there as they come, until its report is written, and results
        from before are not computed again (``ResultCache``).

    Raises:
        TimeoutError: no job ended for ``STALL_S``. Whatever a job raises.
    """
    tell = progress or (lambda done, total, what: None)
    cache = ResultCache.of(out) if out is not None else None
    results: dict[int, Any] = {}
    for i, job in enumerate(jobs):
        there, result = cache.find(job.function, job.arguments) if cache else (False, None)
        if there:
            results[i] = result
    if results:
        tell(len(results), len(jobs), "parts kept from before")
    left = [i for i in range(len(jobs)) if i not in results]

    def done(i: int, result: Any) -> None:
        results[i] = result
        if cache:
            cache.store(jobs[i].function, jobs[i].arguments, result)
        tell(len(results), len(jobs), jobs[i].name)

    if processes <= 1 or len(left) <= 1:
        with _one_thread():
            for i in left:
                done(i, jobs[i].function(*jobs[i].arguments))
    else:
        _run_side_by_side(jobs, left, processes, done)
    return [results[i] for i in range(len(jobs))]


def _run_side_by_side(
    jobs: Sequence[Job], left: Sequence[int], processes: int, done: Callable[[int, Any], None]
) -> None:
    # spawn: a forked child would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(left)), context, initializer=_begin)
    try:
        open_ = {pool.submit(jobs[i].function, *jobs[i].arguments): i for i in left}
        while open_:
            ended, _ = wait(open_, timeout=STALL_S, return_when=FIRST_COMPLETED)
            if not ended:
                name = jobs[next(iter(open_.values()))].name
                raise TimeoutError(f"no part ended for {STALL_S:.0f} s; still open: {name}")
            for future in ended:
                done(open_.pop(future), future.result())
    except BaseException:
        for process in list(pool._processes.values()):  # else Python would wait for them at its end
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()  # what they used counts as used here once they have ended


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as a process of the pool does: two that share a core spin for each other."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 1
    try:
        if torch:
            torch.set_num_threads(1)
        yield
    finally:
        if torch:
            torch.set_num_threads(before)


def _end_with_parent() -> None:
    """End this process with its parent: a parent that is killed does not stop its pool."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _begin() -> None:
    """In each process: compute in one thread, and end at once by Ctrl-C or when the parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a job imports torch
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
