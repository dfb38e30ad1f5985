import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.recipes.staleness.model import Coherence, Delays, Found, Optimiser, Study, run, train
from ragtag.recipes.staleness.tasks import LEARNING_RATES, Classifier
from ragtag.recipes.tasks.digits import Pool, digits_data

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
    task, workers = Classifier(1, 16), 3
    delays = Delays(task.initial(5), workers, 0, 5)
    optimiser = Optimiser("SGD", 0.01, delays.copies)
    pools = [Pool(task.samples, p) for p in range(workers)]
    model = task.initial(5)
    for _ in range(8):
        at = [pool.take(32) for pool in pools]
        rows = torch.from_numpy(np.stack(at))
        rng = np.random.default_rng(0)
        delays.send(optimiser.update(task.gradients(delays.copies, rows, rng)))
        model = model - 0.01 * task.net.gradient(model, np.concatenate(at), np.full(96, 1 / 32, np.float32))
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


def trained(seed: int, **how) -> Found:
    study = Study("DNN 1", "Adam", 4, 2, seed, 0.001, batches_max=2000, **how)
    return train(Classifier(1, 16, target=0.6), study)


def test_a_run_stops_at_its_target_and_depends_on_its_seed_alone() -> None:
    found = trained(0, coherence=True)
    assert str(found) == str(trained(0, coherence=True))  # as text: NaN is not equal to itself
    assert 0 < found.batches < 2000 and found.qualities[-1][1] >= 0.6
    assert len(found.losses) == len(found.coherence) == found.batches // 4
    assert trained(1).qualities != found.qualities


def test_a_run_that_diverges_ends_at_once_and_has_not_reached_its_target() -> None:
    found = run(Study("MF", "SGD", 8, 0, 0, 1000.0))
    assert math.isinf(found.batches) and found.qualities[-1][0] < 100


def test_the_whole_gradient_is_that_of_the_loss() -> None:
    task, (x, y, _, _) = Classifier(2, 16), digits_data()
    model = task.initial(1)
    gradient, loss = task.whole(model)
    everything = np.arange(len(y))
    theirs = task.net.gradient(model, everything, np.full(len(y), 1 / len(y), np.float32))
    assert torch.allclose(gradient, theirs, atol=1e-6)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(task.net.logits(model, x), y)))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no optimiser is called 'Lion'"):
        Optimiser("Lion", 0.1, torch.zeros(1, 1))
    for workers, s in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="at least 1, and 0 or more"):
            Delays(torch.zeros(1), workers, s, 0)
