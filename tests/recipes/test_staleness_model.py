import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.recipes.asynchronous_task import Net, Pool, digits_data, train_size
from ragtag.recipes.staleness_model import LEARNING_RATES, Coherence, Delays, Optimiser, Study, gradients, run

THEIRS = {
    "SGD": lambda w: torch.optim.SGD(w, 0.01),
    "Momentum": lambda w: torch.optim.SGD(w, 0.01, momentum=0.9),
    "Adagrad": lambda w: torch.optim.Adagrad(w, 0.01),
    "Adam": lambda w: torch.optim.Adam(w, 0.001),
    "RMSProp": lambda w: torch.optim.RMSprop(w, 0.001),
}


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_an_optimiser_is_torchs_own_and_each_workers_state_its_own(name) -> None:
    rng = torch.Generator().manual_seed(1)
    models = torch.randn(3, 5, generator=rng)
    theirs = [torch.nn.Parameter(row.clone()) for row in models]
    each = [THEIRS[name]([w]) for w in theirs]
    ours = Optimiser(name, LEARNING_RATES[name], models)
    for _ in range(6):
        g = torch.randn(3, 5, generator=rng)
        models = models + ours.update(g)
        for w, step, row in zip(theirs, each, g, strict=True):
            w.grad = row.clone()
            step.step()
    assert torch.allclose(models, torch.stack([w.detach() for w in theirs]), atol=1e-6)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 12), st.integers(0, 2**32))
def test_every_update_reaches_every_copy_once_and_when_it_was_drawn(workers, s, steps, seed) -> None:
    # The update of worker p in step t is a one at place (t, p): what a copy holds says what has come.
    delays = Delays(torch.zeros(steps * workers), workers, s, seed)
    due = np.full((workers, steps * workers), -1)  # at the start of which step
    for t in range(steps + s + 1):
        updates = torch.zeros(workers, steps * workers)
        if t < steps:
            updates[:, t * workers : (t + 1) * workers] = torch.eye(workers)
        delays.send(updates)
        if t < steps:
            assert delays.drawn.min() >= 0 and delays.drawn.max() <= s
            due[:, t * workers : (t + 1) * workers] = t + 1 + delays.drawn
        # Now is the start of step t + 1.
        expected = (due >= 0) & (due <= t + 1)
        assert (delays.copies.numpy() == expected).all()
    assert (delays.copies == 1).all()


def test_delays_are_uniform_and_independent_per_pair() -> None:
    delays = Delays(torch.zeros(1), 4, 4, 7)
    drawn = []
    for _ in range(2000):
        delays.send(torch.zeros(4, 1))
        drawn.append(delays.drawn.ravel())
    table = np.array(drawn)
    shares = np.stack([(table == r).mean(0) for r in range(5)])
    assert np.abs(shares - 0.2).max() < 0.04
    apart = np.corrcoef(table.T) - np.eye(16)
    assert np.abs(apart).max() < 0.1


def test_without_delay_all_copies_move_by_the_sum() -> None:
    net, workers = Net((16,)), 3
    delays = Delays(net.initial(5), workers, 0, 5)
    optimiser = Optimiser("SGD", 0.01, delays.copies)
    pools = [Pool(train_size(), p) for p in range(workers)]
    x, y, _, _ = digits_data()
    model = net.initial(5)
    for _ in range(8):
        at = [pool.take(32) for pool in pools]
        rows = torch.from_numpy(np.stack(at))
        delays.send(optimiser.update(gradients(net, delays.copies, x[rows], y[rows])))
        model = model - 0.01 * net.gradient(model, np.concatenate(at), np.full(96, 1 / 32, np.float32))
    for copy in delays.copies:
        assert torch.allclose(copy, model, atol=1e-5)


def test_coherence_is_the_least_of_the_last_s_steps() -> None:
    rng = torch.Generator().manual_seed(3)
    gradients = [torch.randn(6, generator=rng) for _ in range(10)]
    seen = Coherence(4)
    assert math.isnan(seen.add(gradients[0]))
    for t in range(1, 10):
        expected = min(
            float(gradients[t] @ gradients[k] / gradients[k].square().sum()) for k in range(max(0, t - 4), t)
        )
        assert seen.add(gradients[t]) == pytest.approx(expected, rel=1e-5)


def test_a_run_stops_at_its_target_and_depends_on_its_seed_alone() -> None:
    study = Study(1, "Adam", 4, 2, 0, 0.001, width=16, target=0.6, coherence=True, batches_max=2000)
    found = run(study)
    assert str(found) == str(run(study))  # as text: NaN is not equal to itself
    assert 0 < found.batches < 2000 and found.accuracies[-1][1] >= 0.6
    assert len(found.losses) == len(found.coherence) == found.batches // 4
    assert run(Study(1, "Adam", 4, 2, 1, 0.001, width=16, target=0.6)).accuracies != found.accuracies


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no optimiser is called 'Lion'"):
        Optimiser("Lion", 0.1, torch.zeros(1, 1))
    for workers, s in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="at least 1, and 0 or more"):
            Delays(torch.zeros(1), workers, s, 0)
