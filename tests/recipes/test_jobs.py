import multiprocessing
import os
import select
import subprocess
import sys

import pytest
import torch

from ragtag.recipes.jobs import Job, run_jobs


def _square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def _fail() -> None:
    raise ValueError("this job fails")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_order_and_progress_is_told(processes: int) -> None:
    told: list[tuple[int, int, str]] = []
    jobs = [Job(f"job {x}", _square, (x,)) for x in range(4)]
    results = run_jobs(jobs, processes, lambda *what: told.append(what))
    assert [square for square, _ in results] == [0, 1, 4, 9]
    assert [(done, total) for done, total, _ in told] == [(i + 1, 4) for i in range(4)]
    assert {name for _, _, name in told} == {job.name for job in jobs}
    assert all((pid == os.getpid()) == (processes == 1) for _, pid in results)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_computes_in_one_thread(processes: int) -> None:
    """Threads of processes that share cores spin for each other."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        jobs = [Job(f"job {x}", torch.get_num_threads, ()) for x in range(2)]
        assert run_jobs(jobs, processes) == [1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_raises_raises_here(processes: int) -> None:
    with pytest.raises(ValueError, match="this job fails"):
        run_jobs([Job("good", _square, (1,)), Job("bad", _fail, ())], processes)


def test_no_worker_is_left_at_the_end() -> None:
    """What they used counts as used here once they have ended."""
    run_jobs([Job(f"job {x}", _square, (x,)) for x in range(2)], 2)
    assert not multiprocessing.active_children()


def test_a_job_that_raises_ends_those_beside_it() -> None:
    """Else Python waits for them at its end."""
    script = (
        "import math, time\n"
        "from ragtag.recipes.jobs import Job, run_jobs\n"
        "if __name__ == '__main__':\n"
        "    run_jobs([Job('wait', time.sleep, (600.0,)), Job('bad', math.sqrt, (-1.0,))], 2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60.0)
    assert ended.returncode == 1 and b"ValueError" in ended.stderr


def test_workers_end_with_who_asked_though_it_is_killed() -> None:
    """They hold its output open: its end shows theirs."""
    script = (
        "import os, time\n"
        "from ragtag.recipes.jobs import Job, run_jobs\n"
        "if __name__ == '__main__':\n"
        "    waits = [Job('wait', time.sleep, (600.0,))] * 2\n"
        "    run_jobs([Job('tell', os.write, (1, b'here')), *waits], 2)\n"
    )
    asked = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert asked.stdout is not None
    line = asked.stdout.fileno()
    assert select.select([line], [], [], 60.0)[0] and os.read(line, 4) == b"here"
    asked.kill()
    asked.wait(60.0)
    assert select.select([line], [], [], 60.0)[0] and os.read(line, 1) == b""
    asked.stdout.close()
