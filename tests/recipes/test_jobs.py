import os

import pytest

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
def test_a_job_that_raises_raises_here(processes: int) -> None:
    with pytest.raises(ValueError, match="this job fails"):
        run_jobs([Job("good", _square, (1,)), Job("bad", _fail, ())], processes)
