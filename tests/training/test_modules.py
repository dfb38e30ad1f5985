"""Which tensors are found, and what they are called."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ragtag.core.channels import channel_of
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.tensors.modules import Watch, buffer_parts, name_parameters, parameters_of
from tests.training.simulated import TappedCrew


def hooks() -> int:
    return len(torch_module._global_forward_pre_hooks)


def names_after(optimizer: CrewOptimizer, crew: TappedCrew) -> list[str]:
    optimizer.average()
    return [tensor.name for tensor in crew.schemas[channel_of("model")].tensors]


def test_the_outermost_module_that_owns_the_parameters_is_found() -> None:
    crew, before = TappedCrew(1), hooks()
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, teacher = nn.Sequential(inner), nn.Sequential(nn.Linear(2, 2))
    optimizer = CrewOptimizer(torch.optim.SGD(inner.parameters(), lr=0.1), crew.transport(0))
    assert hooks() == before + 1
    teacher(torch.ones(2, 2))
    inner[0](torch.ones(2, 2))
    model(torch.ones(2, 2))
    assert hooks() == before
    assert names_after(optimizer, crew) == [
        "0.0.weight",
        "0.0.bias",
        "0.1.weight",
        "0.1.bias",
        "0.1.running_mean",
        "0.1.running_var",
    ]


def test_two_models_in_one_optimizer() -> None:
    crew, before = TappedCrew(1), hooks()
    generator, critic = nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 1, bias=False))
    both = [*generator.parameters(), *critic.parameters()]
    optimizer = CrewOptimizer(torch.optim.SGD(both, lr=0.1), crew.transport(0))
    critic(generator(torch.ones(1, 2)))
    assert names_after(optimizer, crew) == ["0.weight", "1.0.weight"]
    assert hooks() == before


def test_a_part_that_is_called_first_gives_way_to_its_whole() -> None:
    crew = TappedCrew(1)
    encoder, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    whole = nn.Sequential(encoder, nn.Linear(2, 2, bias=False))
    both = [*whole.parameters(), *other.parameters()]
    optimizer = CrewOptimizer(torch.optim.SGD(both, lr=0.1), crew.transport(0))
    for model in (encoder, whole, other):
        model(torch.ones(1, 2))
    assert names_after(optimizer, crew) == ["0.0.weight", "0.1.weight", "1.weight"]


def test_without_a_model_parameters_have_numbers() -> None:
    crew = TappedCrew(1)
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(2))]}]
    optimizer = CrewOptimizer(torch.optim.SGD(groups, lr=0.1), crew.transport(0))
    assert names_after(optimizer, crew) == ["parameter 0 of group 0", "parameter 0 of group 1"]


def test_an_optimizer_that_never_steps_leaves_no_hook() -> None:
    before = hooks()
    optimizer = CrewOptimizer(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), TappedCrew(1).transport(0)
    )
    assert hooks() == before + 1
    del optimizer
    gc.collect()
    assert hooks() == before


def test_a_compiled_model_has_its_own_names() -> None:
    model = torch.nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert name_parameters(optimizer.param_groups, [model]) == ["weight", "bias"]


def test_a_compiled_model_is_given_or_found() -> None:
    for given in (True, False):
        crew, model = TappedCrew(1), nn.Sequential(nn.Linear(2, 2))
        compiled = torch.compile(model, backend="eager")
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            crew.transport(0),
            model=compiled if given else None,
        )
        if given:
            compiled(torch.ones(1, 2)).sum().backward()
        else:
            with pytest.warns(UserWarning, match="global hooks"):  # torch's own; passing the model avoids it
                compiled(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        compiled(torch.ones(1, 2)).sum().backward()  # with its parameters in another place
        optimizer.step()
        assert [tensor.name for tensor in crew.schemas[channel_of("model")].tensors] == ["0.weight", "0.bias"]


def test_a_parameter_in_two_places_has_its_first_name() -> None:
    weight = nn.Parameter(torch.ones(1))
    model = nn.ParameterDict({"a": weight, "b": weight})
    groups = [{"params": [weight]}]
    assert name_parameters(groups, [model]) == ["a"]
    assert parameters_of(groups) == [weight]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("nothing", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("again", self.mean)


def test_masks_tables_and_counts_are_left_out() -> None:
    parts, left_out = buffer_parts([nn.Sequential(Odd())])
    assert [str(part) for part in parts] == ["buffer '0.mean'"]
    assert left_out == ["0.table", "0.mask"]


def test_a_buffer_is_found_after_it_was_replaced() -> None:
    model = Odd()
    parts, _ = buffer_parts([model])
    model.mean = torch.ones(2)
    assert parts[0].find() is model.mean


def test_no_more_modules_are_kept_than_asked() -> None:
    layers = [nn.Linear(1, 1) for _ in range(5)]
    watch = Watch([p for layer in layers for p in layer.parameters()], modules_max=3)
    for layer in layers:
        layer(torch.ones(1, 1))
    watch.end()
    assert watch.modules == layers[:3]
