"""Units: every value is in one, what an optimizer keeps of it too; they are given and taken whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragtag.training.align.units import UNITS_MAX, VALUES_MIN, Look, Units
from ragtag.training.optimizer.modes import Models
from ragtag.training.tensors.modules import name_parameters, parameters_of


def units_of(inner: torch.optim.Optimizer) -> Units:
    parts = Models(inner).parts(name_parameters(inner.param_groups, []), ())
    return Units(parts, lambda parameter: inner.state.get(parameter, {}))


def stepped(tensors: list[torch.Tensor], kind: str = "adam") -> torch.optim.Optimizer:
    """An optimizer that has taken a step, but for the last parameter, which had no gradient."""
    kinds = {
        "adam": lambda: torch.optim.Adam(tensors, lr=0.01),
        "sgd": lambda: torch.optim.SGD(tensors, lr=0.01),
        "momentum": lambda: torch.optim.SGD(tensors, lr=0.01, momentum=0.9),
    }
    inner: torch.optim.Optimizer = kinds[kind]()
    for at, tensor in enumerate(tensors[:-1]):
        draw = torch.Generator().manual_seed(at)
        tensor.grad = torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
    inner.step()
    return inner


def model(seed: int = 0) -> list[torch.Tensor]:
    """Parameters of several kinds, some of them smaller than a unit, one of many."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3,), (40, 50), (), (0, 4), (2, 3, 8, 8), (1,), (7, 100)]
    tensors = [torch.randn(shape, generator=draw) for shape in shapes]
    tensors[4] = tensors[4].to(memory_format=torch.channels_last)
    tensors[6] = tensors[6].bfloat16()
    return [nn.Parameter(tensor) for tensor in tensors]


def everything(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that a unit should cover: of an empty parameter there is nothing to tell."""
    found = []
    for parameter in (p for p in parameters_of(inner.param_groups) if p.numel()):
        slots = inner.state.get(parameter, {})
        found += [parameter.detach(), *(slots[name] for name in sorted(slots))]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("kind", ["adam", "sgd", "momentum"])
def test_each_value_is_in_one_unit(kind: str) -> None:
    inner = stepped(model(), kind)
    units = units_of(inner)
    assert units.n == -(-units.n_values // VALUES_MIN)
    before = [units.digest(u, Look()) for u in range(units.n)]
    total = sum(units.form(u).total for u in range(units.n))
    assert total == sum(tensor.numel() for tensor in everything(inner))
    for tensor in everything(inner):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            where = np.unravel_index(place, tensor.shape) if tensor.dim() else ()
            with torch.no_grad():
                was = tensor[where].clone()
                tensor[where] = was + 1
            changed = [u for u in range(units.n) if units.digest(u, Look()) != before[u]]
            assert len(changed) == 1
            with torch.no_grad():
                tensor[where] = was
    assert [units.digest(u, Look()) for u in range(units.n)] == before


@pytest.mark.parametrize("kind", ["adam", "sgd", "momentum"])
def test_what_is_put_is_the_givers_to_the_bit(kind: str) -> None:
    giver, taker = stepped(model(0), kind), stepped(model(1), kind)
    with torch.no_grad():
        for tensor in everything(taker):
            tensor.mul_(0.5)
    a, b = units_of(giver), units_of(taker)
    look = Look()
    changed = was = 0.0
    own = torch.cat([p.detach().reshape(-1).double() for p in parameters_of(taker.param_groups)])
    for unit in reversed(range(a.n)):
        form, values = a.values(unit, look)
        assert (form, form.total) == (b.form(unit), len(values))
        norms = b.put(unit, form.tag, values)
        assert norms is not None
        changed, was = changed + norms[0], was + norms[1]
    for mine, other in zip(everything(taker), everything(giver), strict=True):
        assert torch.equal(mine, other)
    assert [a.digest(u, Look()) for u in range(a.n)] == [b.digest(u, Look()) for u in range(b.n)]
    there = torch.cat([p.detach().reshape(-1).double() for p in parameters_of(giver.param_groups)])
    assert changed == pytest.approx(float((there - own).square().sum()), rel=1e-6)
    assert was == pytest.approx(float(own.square().sum()), rel=1e-6)


def test_who_has_other_state_takes_the_parameters_alone() -> None:
    giver, taker = stepped(model(0)), stepped(model(1), "sgd")
    a, b = units_of(giver), units_of(taker)
    assert any(a.digest(u, Look()) != b.digest(u, Look()) for u in range(a.n))
    for unit in range(a.n):
        form, values = a.values(unit, Look())
        assert b.put(unit, form.tag, values) is not None
    for mine, other in zip(parameters_of(taker.param_groups), parameters_of(giver.param_groups), strict=True):
        assert torch.equal(mine, other)
    assert not any(taker.state.values())


def test_what_does_not_fit_is_not_taken() -> None:
    inner = stepped(model())
    units = units_of(inner)
    before = copy.deepcopy(everything(inner))
    form, values = units.values(0, Look())
    assert units.put(0, form.tag, values[:-1]) is None
    assert units.put(0, form.tag + 1, values[: form.parameters - 1]) is None
    assert all(torch.equal(a, b) for a, b in zip(everything(inner), before, strict=True))


def test_autograd_sees_that_a_parameter_was_written_to() -> None:
    parameter = nn.Parameter(torch.ones(4))
    units = units_of(torch.optim.SGD([parameter], lr=0.1))
    loss = (parameter * parameter).sum()
    assert units.put(0, units.form(0).tag, np.zeros(4, np.float32)) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_units_are_few_and_together_the_model(sizes: list[int]) -> None:
    inner = torch.optim.SGD([torch.zeros(size) for size in [*sizes, 1]], lr=0.1)
    units = units_of(inner)
    assert 1 <= units.n <= UNITS_MAX
    forms = [units.form(u) for u in range(units.n)]
    assert sum(form.parameters for form in forms) == sum(sizes) + 1
    assert all(form.parameters == units.each for form in forms[:-1])


def test_a_large_model_has_no_more_units() -> None:
    units = units_of(torch.optim.SGD([torch.zeros(1 << 22)], lr=0.1))
    assert units.n <= UNITS_MAX and units.n * units.each >= 1 << 22
