import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.schema import FRAGMENTS_MAX
from ragtag.optim.outer import Nesterov, Streaming


@given(st.floats(0.01, 2.0), st.floats(0.0, 0.99), st.integers(0, 2**32 - 1))
def test_it_is_torchs_nesterov_on_what_was_learned(lr, momentum, seed) -> None:
    rng = np.random.default_rng(seed)
    model = rng.standard_normal(7).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(model.copy()))
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer = Nesterov(lr, momentum)
    state = outer.init(model)
    for _ in range(5):
        average = (model + 0.1 * rng.standard_normal(7)).astype(np.float32)
        theirs.grad = theirs.detach() - torch.from_numpy(average)
        sgd.step()
        kept = model.copy(), state.copy()
        ours, state_next = outer.update(model, average, state)
        assert (model == kept[0]).all() and (state == kept[1]).all()
        assert ours.dtype == np.float32
        assert np.allclose(ours, theirs.detach().numpy(), atol=1e-4)
        model, state = ours, state_next
        with torch.no_grad():
            theirs.copy_(torch.from_numpy(model))


def test_rate_one_without_momentum_is_the_average() -> None:
    outer, model = Nesterov(1.0, 0.0), np.array([1.0, 2.0], np.float32)
    average = np.array([3.0, -1.0], np.float32)
    assert np.allclose(outer.update(model, average, outer.init(model))[0], average)


def test_momentum_goes_on_in_a_steady_direction() -> None:
    outer, model = Nesterov(0.7, 0.9), np.zeros(1, np.float32)
    state, steps = outer.init(model), []
    for _ in range(200):
        after, state = outer.update(model, model + 1, state)
        steps.append(float((after - model)[0]))
        model = after
    assert steps[0] == pytest.approx(0.7 * 1.9) and steps[-1] == pytest.approx(0.7 / 0.1, rel=1e-3)


@pytest.mark.parametrize(
    "make", [lambda: Nesterov(0.0), lambda: Nesterov(momentum=1.0), lambda: Nesterov(np.nan)]
)
def test_bad_settings_are_refused(make) -> None:
    with pytest.raises(ValueError, match="outer"):
        make()


def test_bad_vectors_are_refused() -> None:
    outer, model = Nesterov(), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="one shape"):
        outer.update(model, np.zeros(4, np.float32), outer.init(model))
    with pytest.raises(ValueError, match="not finite; keep the model"):
        outer.update(model, np.full(3, np.nan, np.float32), outer.init(model))


def test_limits_of_fragments_and_of_what_is_kept() -> None:
    for fine in ({"fragments": FRAGMENTS_MAX}, {"fragments": 1}, {"kept": 0.0}, {"kept": 1.0}):
        assert Streaming(Nesterov(), **fine)  # type: ignore[arg-type]
    for wrong in ({"fragments": FRAGMENTS_MAX + 1}, {"fragments": 0}, {"kept": -0.1}, {"kept": 1.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Streaming(Nesterov(), **wrong)  # type: ignore[arg-type]
