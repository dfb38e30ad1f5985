"""Training without a common pace: a user's loop on the library's machines, in virtual time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ragtag.core.faults import Crash, Faults, Partition, Slow, Window
from ragtag.recipes.grouping.compensation import train_compensated
from ragtag.recipes.grouping.gossip import Gossip
from ragtag.recipes.grouping.measure import time_of_groups
from ragtag.recipes.grouping.methods import (
    BACKUP,
    DROP,
    METHODS,
    PARTIAL,
    PROGRESSIVE,
    RINGMASTER,
    cut,
    grouped,
    micro_s,
    scheduled,
)
from ragtag.recipes.grouping.training import LATENCY_S, Look, Trial, Work, train
from ragtag.recipes.tasks.digits import Net, Pool, digits_data
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.grouping import predicted
from ragtag.schedules.softsync import SoftSync


def work(n: int = 4, rounds: int = 30, delay: float = 0.0, **how) -> Work:
    faults = Faults(latency_s=LATENCY_S, slow=(Slow(1, 1 + delay),))
    how = {"net": None, "batch": 8, "faults": faults, **how}
    return Work(n=n, samples=n * how["batch"] * rounds, learning_rate=0.5, seed=1, **how)


def ideal_s(asked: Work) -> float:
    """How long it takes if nobody waits and nobody is delayed."""
    return asked.samples / (asked.n * asked.batch)


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


@pytest.mark.parametrize("name", METHODS)
def test_a_run_depends_on_nothing_but_its_seed(name) -> None:
    asked = work(n=8, rounds=6, delay=3.0, net=Net((8,)), jitter=0.1, looks=4)
    first, second = (train(name, asked, METHODS[name]()) for _ in range(2))
    assert first == second
    assert first.used >= asked.samples and len(first.looks) >= 3 and 0 < first.busy <= 1


def test_crews_learn() -> None:
    asked = work(n=8, rounds=100, delay=1.0, net=Net((32,)), jitter=0.05, looks=10)
    for trial in (train(PROGRESSIVE, asked, METHODS[PROGRESSIVE]()), Gossip(asked).run()):
        assert trial.accuracy > 0.88
        assert trial.reached_s(0.8) < trial.took_s < math.inf == trial.reached_s(1.1)


def test_time_to_an_accuracy_needs_it_twice() -> None:
    looks = [Look(float(i), i, 1.0, a) for i, a in enumerate((0.1, 0.9, 0.5, 0.9, 0.95))]
    assert Trial("x", 0, looks=looks).reached_s(0.9) == 3.0


@pytest.mark.parametrize("wrong", [{"n": 0}, {"batch": 0}, {"samples": 0}, {"looks": 0}])
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Work(**{"n": 2, "batch": 2, "samples": 2, "learning_rate": 0.1, "seed": 0, **wrong})


# -- The methods


def test_a_barrier_takes_the_slowest_peers_time_and_nobody_else_does() -> None:
    asked = work(delay=3.0)
    assert train("", asked, grouped(1)).settled_s == pytest.approx(4 * ideal_s(asked), rel=0.05)
    nobody = train("", asked, scheduled(Asynchronous())).took_s
    assert nobody == pytest.approx(ideal_s(asked) * predicted(4, 1, 3.0), rel=0.05)


@pytest.mark.parametrize("name", [BACKUP, RINGMASTER])
def test_backup_workers_and_ringmaster_leave_the_straggler_out(name: str) -> None:
    asked = work(n=16, rounds=60, delay=5.0)
    trial = train(name, asked, METHODS[name]())
    assert trial.settled_s == pytest.approx(ideal_s(asked) * 16 / 15, rel=0.03)
    assert trial.left_out == pytest.approx(1 / 6 / (15 + 1 / 6), rel=0.25)
    assert max(trial.staleness) < (1 if name == BACKUP else 32)


@pytest.mark.parametrize("cut_off", [False, True])
def test_what_partial_averages_leave_out_is_seen(cut_off: bool) -> None:
    """Its own time tells nothing of it: nobody waits for one whose updates come to nobody."""
    cuts = (Partition(frozenset({1}), Window(10.0, 1e6)),) if cut_off else ()
    faults = Faults(latency_s=LATENCY_S, slow=(Slow(1, 4.0),), partitions=cuts)
    asked = work(n=8, rounds=40, faults=faults)
    trial = train(PARTIAL, asked, METHODS[PARTIAL]())
    assert trial.settled_s == pytest.approx(ideal_s(asked) * 8 / (7 + 1 / 4), rel=0.06)
    assert trial.kept_alone == pytest.approx(0.75 / 4 / (7 + 1 / 4) if cut_off else 0, abs=0.002)


@pytest.mark.parametrize("delay", [1.0, 7.0])
def test_dropcompute_joins_with_what_it_has(delay: float) -> None:
    """One that is slower by far would be left behind without a threshold, too, in about as long."""
    asked = work(n=8, rounds=30, delay=delay)
    trial = train(DROP, asked, cut(8))
    assert trial.settled_s == pytest.approx(ideal_s(asked) * 8 / (7 + 1 / (1 + delay)), rel=0.05)
    assert trial.left_out == 0


def test_micro_batches_take_their_part_of_a_batch_each() -> None:
    asked = work(n=8, delay=7.0)
    table = micro_s(asked, 8)
    assert table.shape == (4, 8, 8)
    np.testing.assert_allclose(table[:, 1], 8 * table[:, 0])
    with pytest.raises(ValueError, match="do not part into 3"):
        train("", work(), cut(3))


def test_gossip_keeps_the_mean_model() -> None:
    asked = Work(n=6, batch=8, samples=600, learning_rate=0.0, seed=1, net=Net((8,)), jitter=0.2)
    crew = Gossip(asked)
    start = crew.mean()
    crew.run()
    assert torch.allclose(crew.mean(), start, atol=1e-6)
    crew = Gossip(replace(asked, samples=2400, learning_rate=0.3))
    crew.run()
    apart = max(float((model - crew.mean()).norm()) for model in crew.models)
    assert 0 < apart < 0.5 * float((crew.mean() - start).norm())


def test_gossip_waits_for_nobody() -> None:
    asked = work(delay=3.0)
    assert Gossip(asked).run().took_s == pytest.approx(ideal_s(asked) * predicted(4, 1, 3.0), rel=0.03)


def test_softsync_is_as_stale_as_it_says() -> None:
    trial = train("", work(n=12, rounds=60, jitter=0.1), scheduled(SoftSync(4)))
    assert trial.staleness_mean == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("g", [1, 4])
def test_fixed_groups_take_the_time_of_the_formula(g) -> None:
    assert time_of_groups(g, 3.0, 1, 30) == pytest.approx(predicted(g, 1, 3.0), rel=0.05)


def test_progressive_groups_leave_a_straggler_to_itself_and_go_on_without_the_dead() -> None:
    asked = work(n=8, rounds=60, delay=5.0, jitter=0.02)
    trial = train(PROGRESSIVE, asked, METHODS[PROGRESSIVE]())
    told = [detail for _, what, detail in trial.notes if what == "groups"]
    assert told[-1].startswith("2 groups: 0 2 3 4 5 6 7 (")
    assert trial.settled_s < 1.05 * ideal_s(asked) * 8 / (7 + 1 / 6)
    asked = work(rounds=60, faults=Faults(latency_s=LATENCY_S, crashes=(Crash(1, 20.5),)))
    trial = train(PROGRESSIVE, asked, METHODS[PROGRESSIVE]())
    assert trial.took_s == pytest.approx(20 + 40 * 4 / 3, rel=0.05)


def test_the_strength_of_compensation_reaches_the_central_state() -> None:
    model = "1 hidden layer"
    without, compensated = (train_compensated((model, 1.5, s), 0, 1) for s in (0.0, 3.0))
    assert compensated.took_s == without.took_s
    assert compensated.looks != without.looks
    assert compensated.staleness_mean == pytest.approx(15, rel=0.1)
