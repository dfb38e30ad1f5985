"""A central state without a master, live: over drivers in one process, and as processes; one of them dies."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch

import ragtag
from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.types import Outcome
from ragtag.optim.compensate import compensated
from ragtag.schedules import Asynchronous, BackupWorkers, ProgressiveGrouping, SoftSync
from ragtag.schedules.centre import Centre as Rule
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.app.drivers import all_at_once, tiny, transports
from tests.app.processes import Place, notes, until
from tests.network.crew import PATIENCE_S, Crew

SLOW, N, STEPS = 2, 3, 4
"""Peer 2 of 3 takes so many steps, each as long as ``SLOWER`` of peer 0's."""
SLOWER, STEP_S, NEVER = 8, 0.01, threading.Event()


class Course:
    """How many steps peer 0 has taken, and whether the slow one is done."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps, self.done = 0, False

    def stepped(self) -> None:
        with self.changed:
            self.steps += 1
            self.changed.notify_all()

    def stand_by(self) -> None:
        with self.changed:
            until = self.steps + SLOWER
            assert self.changed.wait_for(lambda: self.steps >= until, PATIENCE_S)


RULES = [Asynchronous(), SoftSync(1), BackupWorkers(1), ProgressiveGrouping()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_slow_peer_holds_nobody_up(rule: Rule | ProgressiveGrouping) -> None:
    course, models = Course(), [tiny(seed=peer) for peer in range(N)]
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    losses: dict[int, list[float]] = {peer: [] for peer in range(N)}

    def train(transport: DriverTransport) -> list[Outcome]:
        model, me, seen = models[transport.me], transport.me, list[Outcome]()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = CrewOptimizer(sgd, transport, schedule=rule, model=model, on_outcome=seen.append)
        for _ in range(STEPS if me == SLOW else 5000):
            if me == SLOW:
                course.stand_by()
            NEVER.wait(STEP_S)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses[me].append(loss.item())
            if me == 0:
                course.stepped()
            if course.done and me != SLOW:
                break
        course.done |= me == SLOW
        return seen

    with Crew(N) as crew:
        came = all_at_once(transports(crew), train)
    assert all(isinstance(outcomes, list) for outcomes in came.values()), came
    assert len(came[0]) >= SLOWER * (STEPS - 1)
    assert len(came[SLOW]) == STEPS
    assert losses[0][-1] < 0.5 * losses[0][0]
    stale = [s for outcome in came[SLOW] for s in outcome.stale or ()]
    assert max(stale) >= SLOWER // 2  # as many versions went by while it computed
    assert not any(outcome.expired for outcome in came[SLOW])
    counted = [bool((outcome.heard >> SLOW & 1).any()) for outcome in came[SLOW][1:]]
    assert not any(counted) if isinstance(rule, BackupWorkers) else all(counted)
    groups = {group for outcomes in came.values() for outcome in outcomes for group in outcome.groups}
    assert ((SLOW,) in groups) == isinstance(rule, ProgressiveGrouping)


def test_stale_updates_are_compensated_with_the_learning_rate_as_it_is() -> None:
    """Two peers at one state, in turn: what the owners make of it is what the pure function says."""
    strength, rates = 0.5, (0.1, 0.05)
    models = [tiny(seed=1), tiny(seed=1)]
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) * 3

    def flat(model: torch.nn.Module) -> np.ndarray:
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()

    def train(transport: DriverTransport) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        model = models[transport.me]
        sgd = torch.optim.SGD(model.parameters(), lr=rates[0])
        method = ragtag.Centre(Asynchronous(), compensate=strength)
        optimizer = CrewOptimizer(sgd, transport, method=method, model=model)
        before = flat(model)
        # Until both have the state and see each other: an owner that takes the other for gone counts alone.
        # One that is ready goes on meanwhile, or the other would come to take it for gone.
        while len(ready) < 2:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            if optimizer.outcome is not None and optimizer.outcome.stale and len(transport.live) == 2:
                ready.add(transport.me)
        together.wait(PATIENCE_S)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        gradient = np.concatenate(
            [p.grad.numpy().ravel().copy() for p in model.parameters() if p.grad is not None]
        )
        for group in optimizer.param_groups:  # as a scheduler does
            group["lr"] = rates[1]
        turns[transport.me].wait(PATIENCE_S)
        optimizer.step()
        turns[1].set()
        return before, gradient, flat(model)

    turns, together = [threading.Event(), threading.Event()], threading.Barrier(2)
    ready: set[int] = set()
    turns[0].set()
    with Crew(2) as crew:
        came = all_at_once(transports(crew), train)
    assert all(isinstance(one, tuple) for one in came.values()), came
    start, gradient, after_one = came[0]
    share = rates[1] / 2
    np.testing.assert_allclose(after_one, start - share * gradient, rtol=1e-5, atol=1e-6)
    fixed = compensated(gradient, after_one, start, strength)
    assert np.abs(share * (fixed - gradient)).max() > 1e-5
    np.testing.assert_allclose(came[1][2], after_one - share * fixed, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_said_at_once() -> None:
    model = tiny()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrapped(n: int, **options: object) -> CrewOptimizer:
        transport = SoloTransport(1)
        transport.n = n
        return CrewOptimizer(sgd, transport, **options)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="n is 5, more than the 3 peers"):
        wrapped(3, schedule=SoftSync(5))
    with pytest.raises(ValueError, match="leaves none to wait for"):
        wrapped(3, method=ragtag.Centre(BackupWorkers(3)), every=4)
    with pytest.raises(ValueError, match='average="models"'):
        wrapped(3, schedule=Asynchronous(), average="gradients")
    with pytest.raises(ValueError, match="leave out averager="):
        wrapped(3, schedule=Asynchronous(), method=ragtag.RPS())
    with pytest.raises(ValueError, match="outer= needs an average of all"):
        wrapped(3, schedule=Asynchronous(), outer=ragtag.Outer())
    corrected = ragtag.Centre(Asynchronous(), compensate=0.04)
    with pytest.raises(ValueError, match="it must be 0 or more, and finite"):
        ragtag.Centre(Asynchronous(), compensate=-1.0)
    with pytest.raises(ValueError, match="drops stale updates"):
        ragtag.Centre(BackupWorkers(1), compensate=0.04)
    with pytest.raises(ValueError, match="of single gradients"):
        wrapped(3, method=corrected, every=8)
    with pytest.raises(ValueError, match="without momentum, with one learning rate"):
        CrewOptimizer(torch.optim.Adam(model.parameters()), SoloTransport(1), method=corrected)
    normed = torch.nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="give buffers=False"):
        CrewOptimizer(
            torch.optim.SGD(normed.parameters(), lr=0.1), SoloTransport(1), method=corrected, model=normed
        )
    with pytest.raises(ValueError, match="outer= needs an average of all"):
        wrapped(3, schedule=ProgressiveGrouping(), outer=ragtag.Outer())
    with pytest.raises(TypeError, match="says when peers average"):
        ragtag.Centre(ragtag.schedules.EveryStep())  # type: ignore[arg-type]
    alone = wrapped(1, schedule=SoftSync(5), model=model)
    model(torch.ones(2, 4)).sum().backward()
    alone.step()
    assert alone.outcome is not None


SCRIPT = """
import os, sys, time
import torch, ragtag
from ragtag.schedules import *
torch.set_num_threads(1)
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 128)  # 31 chunks: a block each
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, schedule=eval(os.environ["RULE"]), model=model)
    print("pid", os.getpid(), flush=True)
    steps = 0
    while not os.path.exists(os.environ["STOP"]):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().sum() / 128
        loss.backward()
        optimizer.step()
        crew.log_step(loss.item(), 2)
        steps += 1
        if steps % 25 == 0:
            print("steps", steps, "loss", loss.item(), "live", sorted(crew.live), flush=True)
        time.sleep(0.5 if crew.rank == 1 else 0.01)
"""


@pytest.fixture
def place(place: Place) -> Place:
    (place.folder / "train.py").write_text(SCRIPT)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["Asynchronous()", "BackupWorkers(1)", "ProgressiveGrouping()"])
def test_a_crew_goes_on_when_one_sleeps_and_one_is_killed(place: Place, rule: str) -> None:
    crew = place.command("crew", "run", "-n", "4", "-o", str(place.run), "train.py", RULE=rule)
    for peer in (0, 2, 3):
        crew.says("steps 25 ", peer)
    os.kill(crew.pid(3), signal.SIGKILL)
    until(lambda: notes(place.run, "central state rebuilt"), "rebuilt")
    for peer in (0, 2):
        crew.says("live [0, 1, 2]", peer)
        taken = int(crew.lines(peer)[-1].split()[1])
        crew.says(f"steps {taken + 100} ", peer)
    place.end()
    run = list(read_run(place.run).records())
    founded = notes(place.run, "central state founded")
    assert {note.peer for note in founded} <= {0, 1, 2, 3}
    paces = [record for record in run if isinstance(record, trace.Pace)]
    fast = sum(pace.steps for pace in paces if pace.peer == 0)
    slow = sum(pace.steps for pace in paces if pace.peer == 1)
    assert fast > 3 * slow
    assert any(sum(pace.stale[2:]) for pace in paces if pace.peer == 1), "nothing of the sleeper's was stale"
    last = [float(crew.lines(peer)[-1].split()[3]) for peer in (0, 2)]
    assert max(last) < 0.05
