"""A snapshot gives back, to the bit, what a peer's training consists of; what does not fit is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import Snapshot, capture, restore
from ragtag.training.state.tree import copy_tree
from tests.training.simulated import TappedCrew

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def crew(inner: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> CrewOptimizer:
    return CrewOptimizer(inner, TappedCrew(1).transport(0), model=model, **options)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, until: int, *then: Any) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(begin, until):
        draw = torch.Generator().manual_seed(step)
        inputs, targets = (
            torch.randn(6, 5, generator=draw).to(dtype),
            torch.randint(0, 3, (6,), generator=draw),
        )

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
        for scheduler in then:
            scheduler.step()


def same(a: Any, b: Any) -> bool:
    """Alike to the bit, kinds included (NaN is like itself)."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and bytes(a.reshape(-1).view(torch.uint8)) == bytes(b.reshape(-1).view(torch.uint8))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def assert_same_training(one: nn.Module, a: CrewOptimizer, two: nn.Module, b: CrewOptimizer) -> None:
    for (name, x), y in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert same(x, y), name
    assert same(a.state_dict()["state"], b.state_dict()["state"])
    assert same(a.state_dict()["param_groups"], b.state_dict()["param_groups"])
    assert a._averaged.progress == b._averaged.progress


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": sgd,
    "nesterov, fused": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "adam": adam,
    "adam, foreach, amsgrad": lambda m: torch.optim.Adam(m.parameters(), foreach=True, amsgrad=True),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw, lr a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), t0=2),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.3}, {"params": [*m[1].parameters(), *m[3].parameters()]}],
        lr=0.1,
        momentum=0.9,
    ),
    "named": lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("taken", [0, 3])
def test_goes_on_as_if_never_interrupted(make: Make, dtype: torch.dtype, taken: int) -> None:
    if make is OPTIMIZERS["nesterov, fused"] and dtype == torch.bfloat16:
        # Of equal runs without Ragtag, one in ten differs too, and parameters stay as they were.
        pytest.skip("torch 2.12 and 2.13: fused SGD is broken on CPU in bfloat16 (PyTorch's issue 191763)")
    model, other = net(1, dtype), net(2, dtype)
    optimizer, fresh = crew(make(model), model), crew(make(other), other)
    train(model, optimizer, 0, taken)
    data = capture(optimizer._averaged).to_bytes()
    train(model, optimizer, taken, taken + 3)
    train(other, fresh, 50, 50 + (taken + 1) % 3)  # with or without a state of its own
    restore(Snapshot.from_bytes(data), fresh._averaged)
    assert fresh._averaged.progress == (taken, 0)
    train(other, fresh, taken, taken + 3)
    assert_same_training(model, optimizer, other, fresh)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_go_on_too(make: Callable[[Any], Any]) -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model), crew(sgd(other), other)
    scheduler, second = make(optimizer), make(fresh)
    train(model, optimizer, 0, 3, scheduler)
    data = capture(optimizer._averaged, {"lr": scheduler}).to_bytes()
    train(model, optimizer, 3, 8, scheduler)
    restore(Snapshot.from_bytes(data), fresh._averaged, {"lr": second})
    train(other, fresh, 3, 8, second)
    assert_same_training(model, optimizer, other, fresh)
    assert same(copy_tree(scheduler.state_dict(), "a"), copy_tree(second.state_dict(), "b"))


def test_plateau_scaler_and_moving_average_are_extras() -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model), crew(sgd(other), other)

    def more(o: CrewOptimizer, m: nn.Module) -> dict[str, Any]:
        return {
            "plateau": lr_scheduler.ReduceLROnPlateau(o, patience=0),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2),
            "ema": torch.optim.swa_utils.AveragedModel(m),
        }

    extra, second = more(optimizer, model), more(fresh, other)
    for step in range(3):
        loss = F.cross_entropy(model(torch.randn(6, 5)), torch.zeros(6, dtype=torch.long))
        extra["scaler"].scale(loss).backward()
        extra["scaler"].step(optimizer)
        extra["scaler"].update()
        extra["plateau"].step(float(step))
        extra["ema"].update_parameters(model)
    data = capture(optimizer._averaged, extra).to_bytes()
    restore(Snapshot.from_bytes(data), fresh._averaged, second)
    for name in extra:
        assert same(copy_tree(extra[name].state_dict(), ""), copy_tree(second[name].state_dict(), "")), name
    assert second["scaler"].get_scale() == 2.0**8
    assert second["plateau"].num_bad_epochs == extra["plateau"].num_bad_epochs


def test_buffers_frozen_parameters_and_extra_state_come_along_non_persistent_ones_do_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.body[0].weight.requires_grad_(False)
            self.tied = self.body[3]
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("count", torch.tensor(7, dtype=torch.int32))
            self.register_buffer("cache", torch.zeros(3), persistent=False)
            self.register_buffer("none", None)
            self.note: dict[str, Any] = {"seen": 0}

        def get_extra_state(self) -> dict[str, Any]:
            return self.note

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.note = state

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.body(inputs)

    model, other = Odd(), Odd()
    optimizer = crew(sgd(model.body[3]), model)
    train(model, optimizer, 0, 2)
    model.mask.logical_not_()
    model.count.add_(1)
    model.note = {"seen": 5, "scale": torch.tensor([0.5])}
    with torch.no_grad():
        model.body[0].weight.add_(1)
    other.cache = torch.ones(9)
    snapshot = capture(optimizer._averaged)
    assert "cache" not in snapshot.model
    assert sorted(snapshot.model) == sorted(
        k for k in model.state_dict() if "tied" not in k and "_extra" not in k
    )
    restore(Snapshot.from_bytes(snapshot.to_bytes()), crew(sgd(other.body[3]), other)._averaged)
    for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert same(x, y), name
    assert int(other.body[1].num_batches_tracked) == 2
    assert int(other.count) == 8
    assert other.cache.shape == (9,)


def test_restores_in_place_where_the_bucket_shares_memory_and_autograd_sees_it() -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model), crew(sgd(other), other)
    train(other, fresh, 0, 1)
    bucket = fresh._averaged._exchange.bucket  # type: ignore[union-attr]
    assert all(bucket.shared(at) for at in range(len(bucket.parts)))
    places = [p.data_ptr() for p in other.parameters()]
    weight = other[3].weight
    before = weight._version
    loss = other(torch.ones(4, 5)).square().sum()
    restore(capture(optimizer._averaged), fresh._averaged)
    assert [p.data_ptr() for p in other.parameters()] == places
    assert all(torch.equal(bucket.on_host(at), part.find()) for at, part in enumerate(bucket.parts))
    assert torch.equal(bucket.on_host(0), model[0].weight)
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Kept:
    """Hands out and takes over the very object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [1, {"in": self.value}]}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.value = state["deep"][1]["in"]


def test_a_snapshot_is_a_copy_both_ways() -> None:
    model = net(1)
    optimizer = crew(adam(model), model)
    kept = Kept(torch.zeros(3))
    train(model, optimizer, 0, 2)
    snapshot = capture(optimizer._averaged, {"kept": kept})
    first = snapshot.to_bytes()
    for _ in range(2):
        train(model, optimizer, 2, 4)
        kept.value.add_(1)
        assert snapshot.to_bytes() == first
        restore(snapshot, optimizer._averaged, {"kept": kept})


def test_channels_last_keeps_its_memory_order() -> None:
    def make(seed: int) -> tuple[nn.Module, CrewOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(
            memory_format=torch.channels_last
        )
        return model, crew(torch.optim.Adam(model.parameters(), fused=True), model)

    def one(model: nn.Module, optimizer: CrewOptimizer) -> None:
        model(torch.ones(2, 3, 3, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), (other, fresh) = make(1), make(2)
    one(model, optimizer)
    restore(Snapshot.from_bytes(capture(optimizer._averaged).to_bytes()), fresh._averaged)
    average = fresh.state[other[0].weight]["exp_avg"]
    assert average.stride() == other[0].weight.stride() == model[0].weight.stride()
    one(model, optimizer)
    one(other, fresh)
    assert_same_training(model, optimizer, other, fresh)


def test_how_a_peer_computes_stays_its_own() -> None:
    model, other = net(1), net(2)
    optimizer = crew(torch.optim.Adam(model.parameters(), fused=True), model)
    fresh = crew(torch.optim.Adam(other.parameters(), foreach=True), other)
    train(model, optimizer, 0, 2)
    restore(capture(optimizer._averaged), fresh._averaged)
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"]) == (None, True)
    train(other, fresh, 2, 3)


def test_progress_and_the_round() -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model, every=4), crew(sgd(other), other, every=4)
    train(model, optimizer, 0, 6)
    snapshot = Snapshot.from_bytes(capture(optimizer._averaged).to_bytes())
    assert (snapshot.step, snapshot.since) == (6, 2)
    assert optimizer.outcome is not None
    assert snapshot.round == optimizer.outcome.round
    assert capture(optimizer._averaged, round=9).round == 9
    restore(snapshot, fresh._averaged)
    train(other, fresh, 6, 8)
    assert fresh.outcome is not None
    assert fresh._averaged.progress == (8, 0)


def test_gradients_gathered_before_are_forgotten() -> None:
    model, other = net(1), net(2)
    optimizer = crew(sgd(model), model, average="gradients", every=2)
    fresh = crew(sgd(other), other, average="gradients", every=2)
    train(model, optimizer, 0, 4)
    data = capture(optimizer._averaged).to_bytes()
    train(other, fresh, 90, 93)
    restore(Snapshot.from_bytes(data), fresh._averaged)
    train(model, optimizer, 4, 6)
    train(other, fresh, 4, 6)
    assert_same_training(model, optimizer, other, fresh)


def test_a_model_not_yet_known_is_asked_for() -> None:
    model, other = net(1), net(2)
    optimizer = crew(sgd(model), None)
    with pytest.raises(RuntimeError, match="give model="):
        capture(optimizer._averaged)
    assert same(
        capture(optimizer._averaged, model=model).model, capture(crew(sgd(model), model)._averaged).model
    )
    with pytest.raises(ValueError, match="6 of the optimizer's 6 parameters are not in the model given"):
        capture(optimizer._averaged, model=other)
    train(model, optimizer, 0, 1)
    snapshot = capture(optimizer._averaged)
    restore(snapshot, crew(sgd(other), None)._averaged, model=other)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model, other = net(1), net(2)
    compiled = torch.compile(model)
    snapshot = capture(crew(sgd(compiled), compiled)._averaged)  # type: ignore[arg-type]
    restore(snapshot, crew(sgd(other), other)._averaged)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


# -- What does not fit


def refused(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], match: str, steps: int = 2) -> None:
    model = net(1)
    optimizer = crew(adam(model), model)
    train(model, optimizer, 0, 2)
    snapshot = capture(optimizer._averaged)
    other, inner = make()
    fresh = crew(inner, other)
    train(other, fresh, 0, steps)
    before = copy.deepcopy((other.state_dict(), inner.state_dict()))
    with pytest.raises(ValueError, match=match):
        restore(snapshot, fresh._averaged)
    assert same(dict(before[0]), dict(other.state_dict()))
    assert same(before[1], inner.state_dict())


def both(model: nn.Module, make: Make = adam) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, make(model)


def test_another_model_is_refused_by_the_first_tensor_that_differs() -> None:
    wide = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    refused(lambda: both(wide), r"'0.weight' is \(9, 5\) float32 here and \(8, 5\) float32 in the snapshot")
    refused(lambda: both(net(0, torch.float64)), r"'0.weight' is \(8, 5\) float64 here and \(8, 5\) float32")
    plain = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 3))
    refused(
        lambda: both(plain),
        r"'1.(weight|running_mean)' \(8,\) float32 is in the snapshot and not in this model",
    )
    longer = nn.Sequential(*net(), nn.Linear(3, 3))
    refused(lambda: both(longer), r"'4.weight' \(3, 3\) float32 is in this model and not in the snapshot")


def test_another_optimizer_is_refused_by_what_differs() -> None:
    refused(lambda: both(net(), sgd), "the optimizer is SGD here and Adam in the snapshot")
    split: Make = lambda m: torch.optim.Adam([{"params": m[:2].parameters()}, {"params": m[2:].parameters()}])  # noqa: E731
    refused(lambda: both(net(), split), "parameter 4 of the optimizer's group 0 is none here and '3.weight'")
    amsgrad: Make = lambda m: torch.optim.Adam(m.parameters(), amsgrad=True)  # noqa: E731
    refused(lambda: both(net(), amsgrad), "'0.weight': 'max_exp_avg_sq' is in this optimizer and not in the")

    class Adam(torch.optim.Adam):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.defaults["warmth"] = 1
            for group in self.param_groups:
                group["warmth"] = 1

    Adam.__qualname__ = "Adam"
    refused(
        lambda: both(net(), lambda m: Adam(m.parameters())), "option 'warmth' is in this optimizer and not in"
    )


def test_extras_must_be_the_same_and_plain_data() -> None:
    model = net()
    optimizer = crew(sgd(model), model)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    snapshot = capture(optimizer._averaged, {"lr": scheduler})
    with pytest.raises(ValueError, match=r"extra 'lr' is in the snapshot and not here \(given are none\)"):
        restore(snapshot, optimizer._averaged)
    with pytest.raises(ValueError, match="extra 'ema' is not in the snapshot"):
        restore(snapshot, optimizer._averaged, {"lr": scheduler, "ema": net()})
    with pytest.raises(TypeError, match=r"extra 'x' is a int, which has no state_dict\(\)"):
        capture(optimizer._averaged, {"x": 3})  # type: ignore[dict-item]

    for value, kind in ((lambda: 0, "function"), (Kept(1), "Kept"), ({1, 2}, "set"), (b"x", "bytes")):
        with pytest.raises(TypeError, match=rf"extra 'h'\['deep'\]\[1\]\['in'\] is a .*{kind}"):
            capture(optimizer._averaged, {"h": Kept(value)})
    with pytest.raises(TypeError, match="keys are str or int"):
        capture(optimizer._averaged, {"h": Kept({1.5: 2})})
    for tensor in (
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.zeros(2, dtype=torch.complex128),
    ):
        with pytest.raises(TypeError, match="extra 'h'"):
            capture(optimizer._averaged, {"h": Kept(tensor)})
    looped: list[Any] = []
    looped.append(looped)
    with pytest.raises(TypeError, match="holds itself"):
        capture(optimizer._averaged, {"h": Kept(looped)})
