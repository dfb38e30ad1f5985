"""A crew of a Ray program's own actors, on a real cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragtag.app.tracefile import trace_files
from tests.app.on_ray.cluster import Raylets, raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(2) as made:
        yield made


def trainer() -> Any:
    """An actor as a Ray user would write it; made here, so that Ray brings it to the workers by value."""
    import ray

    @ray.remote(num_cpus=0.25, max_restarts=2, max_concurrency=2)
    class Trainer:
        def __init__(self) -> None:
            self.stopped = False
            self.live = self.steps = 0

        def train(self, crew: Any = None) -> tuple[int, float]:
            import time

            import torch

            import ragtag

            torch.set_num_threads(1)
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 1)
            joined = crew.join(deadline_s=90) if crew is not None else ragtag.join(deadline_s=90)
            with joined as crew:
                optimizer = crew.optimizer(
                    torch.optim.SGD(model.parameters(), lr=0.05), averager=ragtag.RPS()
                )
                until_s = time.time() + 150
                while not self.stopped and time.time() < until_s:
                    inputs = torch.randn(16, 8)
                    (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.steps, self.live = self.steps + 1, len(crew.live)
                    time.sleep(0.02)
                return crew.size, float((model.weight - 1).abs().max())

        def look(self) -> tuple[int, int, int]:
            return os.getpid(), self.steps, self.live

        def stop(self) -> None:
            self.stopped = True

    return Trainer


def wait_until_all_live(actors: list[Any], n: int) -> None:
    import ray

    until_s = time.monotonic() + PATIENCE_S
    while True:
        seen = ray.get([actor.look.remote() for actor in actors], timeout=PATIENCE_S)
        if all(steps > 5 and live == n for _, steps, live in seen):
            return
        assert time.monotonic() < until_s, seen
        time.sleep(0.2)  # between looks, not for anything to be over


@pytest.mark.parametrize("passed", ["as an argument", "in the environment"])
def test_actors_find_each_other_and_one_that_is_killed_takes_part_again(
    cluster: Raylets, passed: str, tmp_path: Path
) -> None:
    import ray

    import ragtag.ray

    n = 3
    crew = ragtag.ray.crew(n)
    handed = crew if passed == "as an argument" else None
    env = {"RAGTAG_RUN": str(tmp_path)} | ({} if handed else crew.env())
    actors = [trainer().options(runtime_env={"env_vars": env}).remote() for _ in range(n)]
    training = [actor.train.remote(handed) for actor in actors]
    wait_until_all_live(actors, n)
    ray.kill(actors[1], no_restart=False)
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            ray.get(training[1], timeout=PATIENCE_S)
        except ray.exceptions.RayActorError:
            break
    while True:
        assert time.monotonic() < until_s
        try:
            ray.get(actors[1].look.remote(), timeout=PATIENCE_S)
            break
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.2)  # between looks
    training[1] = actors[1].train.remote(handed)
    wait_until_all_live(actors, n)
    ray.get([actor.stop.remote() for actor in actors], timeout=PATIENCE_S)
    ends = ray.get(training, timeout=PATIENCE_S)
    assert [size for size, _ in ends] == [n] * n
    assert all(error < 0.5 for _, error in ends)
    assert len(list(trace_files(tmp_path))) >= n
    for actor in actors:
        ray.kill(actor)


def test_a_crew_that_is_no_more_is_named(cluster: Raylets, monkeypatch: pytest.MonkeyPatch) -> None:
    import ragtag

    monkeypatch.setenv("RAGTAG_RAY", "nowhere/ragtag-0/3")
    with pytest.raises(ragtag.JoinError, match="there is no such crew"):
        ragtag.join()


def test_a_number_of_peers_out_of_range(cluster: Raylets) -> None:
    import ragtag.ray

    with pytest.raises(ValueError, match="0 peers: a crew has 1 to"):
        ragtag.ray.crew(0)
