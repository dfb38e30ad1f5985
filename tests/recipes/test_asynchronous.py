import math

import numpy as np
import pytest
import torch

from ragtag.core.faults import Crash, Faults, Slow
from ragtag.recipes.grouping.measure import METHODS
from ragtag.recipes.grouping.methods import Central, Cut, Gossip, Grouped, Paced
from ragtag.recipes.grouping.training import Crew, Look, Measured, Trial, Update, Work
from ragtag.recipes.tasks.digits import Net, Pool, train_size
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import SYNCHRONOUS, BackupWorkers
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound
from ragtag.schedules.grouping import ProgressiveGrouping, predicted
from ragtag.schedules.softsync import SoftSync


def work(n: int = 4, rounds: int = 30, delay: float = 0.0, **how) -> Work:
    how = {"net": None, "batch": 8, "faults": Faults(slow=(Slow(1, 1 + delay),)), **how}
    return Work(n=n, samples=n * how["batch"] * rounds, learning_rate=0.5, seed=1, **how)


# -- The net and the pool


@pytest.mark.parametrize("hidden", [(), (16,), (16, 8)])
def test_a_net_is_torchs_own(hidden) -> None:
    net = Net(hidden)
    model = net.initial(3)
    assert model.shape == (net.size,) and (model == net.initial(3)).all() and (model != net.initial(4)).any()
    layers, into = [], 64
    for i, out in enumerate((*hidden, 10)):
        linear = torch.nn.Linear(into, out)
        layers += [linear] if i == len(hidden) else [linear, torch.nn.ReLU()]
        into = out
    theirs = torch.nn.Sequential(*layers)
    torch.nn.utils.vector_to_parameters(model.clone(), theirs.parameters())
    from ragtag.recipes.tasks.digits import digits_data

    x, y, _, _ = digits_data()
    some = np.array([1, 5, 9, 5])
    weights = np.array([0.5, 1.0, -1.0, 2.0], np.float32)
    loss = torch.nn.functional.cross_entropy(theirs(x[some]), y[some], reduction="none")
    (loss * torch.from_numpy(weights)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in theirs.parameters()])
    assert torch.allclose(net.gradient(model, some, weights), expected, atol=1e-6)


def test_a_pool_gives_every_sample_once_an_epoch() -> None:
    pool = Pool(50, 7)
    taken = np.concatenate([pool.take(8) for _ in range(25)])
    for epoch in range(4):
        assert sorted(taken[50 * epoch : 50 * (epoch + 1)]) == list(range(50))
    again = Pool(50, 7)
    assert (np.concatenate([again.take(20) for _ in range(10)]) == taken).all()


# -- The crew


def test_synchronous_training_is_sgd_on_large_batches() -> None:
    crew = Crew(work(n=3, rounds=6, net=Net((16,)), jitter=0.2))
    trial = crew.run(Central(SYNCHRONOUS))
    net, pool = Net((16,)), Pool(train_size(), 1)
    model = net.initial(1)
    batches: list = []
    for _ in range(6):
        batches = [pool.take(8) for _ in range(3)]
        model = model - 0.5 * net.gradient(model, np.concatenate(batches), np.full(24, 1 / 24, np.float32))
    assert torch.allclose(crew.model, model, atol=1e-6)
    assert trial.used == 144 and trial.versions == 6 and trial.staleness == {0: 18} and trial.dropped == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_run_depends_on_nothing_but_its_seed(name) -> None:
    asked = work(n=16, rounds=8, delay=3.0, net=Net((8,)), jitter=0.1, looks=4)
    first, second = (Crew(asked).run(METHODS[name]()) for _ in range(2))
    assert first == second
    assert first.used >= asked.samples and len(first.looks) >= 3 and 0 < first.busy <= 1
    assert first.looks[-1].loss < first.looks[0].loss


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name) -> None:
    trial = Crew(work(n=16, rounds=60, delay=1.0, net=Net((32,)), jitter=0.05, looks=10)).run(METHODS[name]())
    assert trial.accuracy > 0.88
    assert trial.reached_s(0.8) < trial.took_s < math.inf == trial.reached_s(1.1)


def test_time_to_an_accuracy_needs_it_twice() -> None:
    looks = [Look(float(i), i, 1.0, a) for i, a in enumerate((0.1, 0.9, 0.5, 0.9, 0.95))]
    assert Trial("x", 0, looks=looks).reached_s(0.9) == 3.0


def test_what_steps_take_is_the_median_of_the_last() -> None:
    measured = Measured()
    for took_s in (9.0, 9.0, 1.0, 1.0, 30.0, 1.0, 1.0):
        measured.add(Update(2, np.zeros(1, np.int64), None, 0, 5.0, 5.0 + took_s))
    assert measured.step_s() == {2: 1.0}


@pytest.mark.parametrize("wrong", [{"n": 0}, {"batch": 0}, {"samples": 0}, {"looks": 0}])
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Work(**{"n": 2, "batch": 2, "samples": 2, "learning_rate": 0.1, "seed": 0, **wrong})


# -- The methods


def test_a_barrier_takes_the_slowest_peers_time_and_nobody_else_does() -> None:
    assert Crew(work(delay=3.0)).run(Central(SYNCHRONOUS)).took_s == pytest.approx(30 * 4.0)
    assert Crew(work(delay=3.0)).run(Central(Asynchronous())).took_s == pytest.approx(
        30 * predicted(4, 1, 3.0), rel=0.03
    )


def test_backup_workers_drop_the_straggler_and_ringmaster_what_is_old() -> None:
    backup = Crew(work(delay=3.0)).run(Central(BackupWorkers(1)))
    assert backup.took_s == pytest.approx(40.0, rel=0.05) and backup.dropped > 0
    assert set(backup.staleness) == {0}
    ringmaster = Crew(work(delay=9.0, rounds=60)).run(Central(Asynchronous(5)))
    assert max(ringmaster.staleness) < 5 and ringmaster.dropped > 0


@pytest.mark.parametrize("schedule", [BoundedStaleness(3), DynamicBound(2, 6)])
def test_nobody_is_further_ahead_than_its_bound(schedule) -> None:
    bound = 3 if isinstance(schedule, BoundedStaleness) else 6
    method = Paced(schedule)
    leads = []
    begin = Crew.begin

    class Watched(Crew):
        def begin(self, peer, samples=None, model=None) -> None:
            leads.append(method._clocks[peer] - min(method._clocks.values()))
            begin(self, peer, samples, model)

    trial = Watched(work(delay=2.0, rounds=40)).run(method)
    assert not trial.notes and max(leads) == bound
    assert trial.took_s > 40 * 2.5  # in the end all go at the slowest's pace


def test_a_bound_on_a_peer_that_died_ends_by_its_deadline() -> None:
    trial = Crew(work(faults=Faults(crashes=(Crash(1, 5.5),)))).run(Paced(BoundedStaleness(2)))
    assert trial.notes and "went on beyond its bound" in trial.notes[0][1]
    assert trial.used >= 4 * 8 * 30


def test_dropcompute_joins_with_what_it_has() -> None:
    trial = Crew(work(n=8, delay=7.0)).run(Cut(8))
    assert trial.notes[0][1].startswith("threshold")
    calm = Crew(work(n=8)).run(Cut(8))
    assert calm.took_s == pytest.approx(30.0, rel=0.02)
    after = trial.took_s - trial.notes[0][0]
    assert after < 1.35 * 30 and trial.notes[0][0] == pytest.approx(4 * 8.0)
    with pytest.raises(ValueError, match="do not part into 3"):
        Crew(work()).run(Cut(3))


def test_gossip_keeps_the_mean_model() -> None:
    asked = Work(n=6, batch=8, samples=600, learning_rate=0.0, seed=1, net=Net((8,)), jitter=0.2)
    crew = Crew(asked)
    method = Gossip()
    start = crew.model.clone()
    crew.run(method)
    assert torch.allclose(method._mean(), start, atol=1e-6)
    asked = Work(n=6, batch=8, samples=2400, learning_rate=0.3, seed=1, net=Net((8,)), jitter=0.2)
    crew, method = Crew(asked), Gossip()
    crew.run(method)
    apart = max(float((model - method._mean()).norm()) for model in method._models)
    assert 0 < apart < 0.5 * float((method._mean() - start).norm())


def test_softsync_steps_n_times_a_round() -> None:
    trial = Crew(work(n=12, rounds=200, jitter=0.1)).run(Central(SoftSync(4)))
    assert trial.versions == pytest.approx(800, abs=4)
    assert trial.staleness_mean == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("g", [1, 2, 4])
def test_fixed_groups_take_the_time_of_the_formula(g) -> None:
    took_s = Crew(work(n=8, rounds=100, delay=3.0)).run(Grouped(g)).took_s
    assert took_s / 100 == pytest.approx(predicted(g, 1, 3.0), rel=0.03)


def test_progressive_groups_leave_a_straggler_to_itself_and_go_on_without_the_dead() -> None:
    trial = Crew(work(n=8, rounds=100, delay=5.0, jitter=0.02)).run(Grouped(ProgressiveGrouping()))
    assert trial.notes[-1][1] == "2 groups: 7 + 1"
    assert trial.took_s < 1.05 * 100 * 8 / (7 + 1 / 6) * 1.05
    dead = Faults(crashes=(Crash(1, 20.5),))
    asked = work(n=4, rounds=600, faults=dead)
    trial = Crew(asked).run(Grouped(ProgressiveGrouping()))
    assert trial.took_s == pytest.approx(20 + 580 * 4 / 3, rel=0.01)
    asked = work(n=4, rounds=1200, faults=dead)
    assert any(
        "peer 1 is left out" in what for _, what in Crew(asked).run(Grouped(ProgressiveGrouping())).notes
    )


def test_synchronous_training_with_a_dead_peer_says_that_it_stands_still() -> None:
    with pytest.raises(RuntimeError, match="all peers stand still after 160 of 960 samples"):
        Crew(work(faults=Faults(crashes=(Crash(1, 5.5),)))).run(Central(SYNCHRONOUS))
