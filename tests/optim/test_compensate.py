import numpy as np
import pytest

from ragtag.optim.compensate import compensated


def test_it_points_to_the_gradient_of_now() -> None:
    """A log loss near its optimum: the squared gradient stands for the curvature, on average over labels."""
    rng = np.random.default_rng(0)
    x = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 30_000)]  # one feature at a time: a diagonal Hessian
    y = (rng.random(30_000) < 1 / (1 + np.exp(-x @ np.ones(3)))).astype(np.float32)

    def each(w):
        return (1 / (1 + np.exp(-x @ w)) - y)[:, None] * x

    stale = np.ones(3, np.float32) * np.float32(0.9)
    model = np.ones(3, np.float32)
    fixed = np.mean([compensated(g, model, stale, 1.0) for g in each(stale).astype(np.float32)], axis=0)
    now, then = each(model).mean(0), each(stale).mean(0)
    assert np.linalg.norm(fixed - now) < 0.5 * np.linalg.norm(then - now)


def test_strength_zero_changes_nothing_and_nonsense_is_refused() -> None:
    g = np.array([1.0, -2.0], np.float32)
    assert (compensated(g, g + 3, g, 0.0) == g).all()
    with pytest.raises(ValueError, match="one shape"):
        compensated(g, g, g[:1], 0.1)
    with pytest.raises(ValueError, match="strength -1"):
        compensated(g, g, g, -1)
