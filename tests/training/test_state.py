"""A snapshot gives back, to the bit, what a peer's training consists of; what does not fit is named."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from ragtag.training.optimizer import CrewOptimizer
from ragtag.training.snapshot import HEADER_BYTES_MAX, layout_of
from ragtag.training.state import Snapshot, capture, restore
from ragtag.training.tree import DEPTH_MAX, Packer, Unpacker, copy_tree
from tests.training.fake_transport import FakeCrew

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def crew(inner: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> CrewOptimizer:
    return CrewOptimizer(inner, FakeCrew(1).transport(0), model=model, **options)


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
    assert a.progress == b.progress


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
    model, other = net(1, dtype), net(2, dtype)
    optimizer, fresh = crew(make(model), model), crew(make(other), other)
    train(model, optimizer, 0, taken)
    data = capture(optimizer).to_bytes()
    train(model, optimizer, taken, taken + 3)
    train(other, fresh, 50, 50 + (taken + 1) % 3)  # with or without a state of its own
    restore(Snapshot.from_bytes(data), fresh)
    assert fresh.progress == (taken, 0)
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
    data = capture(optimizer, {"lr": scheduler}).to_bytes()
    train(model, optimizer, 3, 8, scheduler)
    restore(Snapshot.from_bytes(data), fresh, {"lr": second})
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
    data = capture(optimizer, extra).to_bytes()
    restore(Snapshot.from_bytes(data), fresh, second)
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
    snapshot = capture(optimizer)
    assert "cache" not in snapshot.model
    assert sorted(snapshot.model) == sorted(
        k for k in model.state_dict() if "tied" not in k and "_extra" not in k
    )
    restore(Snapshot.from_bytes(snapshot.to_bytes()), crew(sgd(other.body[3]), other))
    for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert same(x, y), name
    assert int(other.body[1].num_batches_tracked) == 2
    assert int(other.count) == 8
    assert other.cache.shape == (9,)


def test_restores_in_place_where_the_bucket_shares_memory_and_autograd_sees_it() -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model), crew(sgd(other), other)
    train(other, fresh, 0, 1)
    bucket = fresh._replica.bucket  # type: ignore[union-attr]
    assert all(bucket.shared(at) for at in range(len(bucket.parts)))
    places = [p.data_ptr() for p in other.parameters()]
    weight = other[3].weight
    before = weight._version
    loss = other(torch.ones(4, 5)).square().sum()
    restore(capture(optimizer), fresh)
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
    snapshot = capture(optimizer, {"kept": kept})
    first = snapshot.to_bytes()
    for _ in range(2):
        train(model, optimizer, 2, 4)
        kept.value.add_(1)
        assert snapshot.to_bytes() == first
        restore(snapshot, optimizer, {"kept": kept})


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
    restore(Snapshot.from_bytes(capture(optimizer).to_bytes()), fresh)
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
    restore(capture(optimizer), fresh)
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"]) == (None, True)
    train(other, fresh, 2, 3)


def test_progress_and_the_round() -> None:
    model, other = net(1), net(2)
    optimizer, fresh = crew(sgd(model), model, every=4), crew(sgd(other), other, every=4)
    train(model, optimizer, 0, 6)
    snapshot = Snapshot.from_bytes(capture(optimizer).to_bytes())
    assert (snapshot.step, snapshot.since) == (6, 2)
    assert optimizer.outcome is not None
    assert snapshot.round == optimizer.outcome.round
    assert capture(optimizer, round=9).round == 9
    restore(snapshot, fresh)
    train(other, fresh, 6, 8)
    assert fresh.outcome is not None
    assert fresh.progress == (8, 0)


def test_gradients_gathered_before_are_forgotten() -> None:
    model, other = net(1), net(2)
    optimizer = crew(sgd(model), model, average="gradients", every=2)
    fresh = crew(sgd(other), other, average="gradients", every=2)
    train(model, optimizer, 0, 4)
    data = capture(optimizer).to_bytes()
    train(other, fresh, 90, 93)
    restore(Snapshot.from_bytes(data), fresh)
    train(model, optimizer, 4, 6)
    train(other, fresh, 4, 6)
    assert_same_training(model, optimizer, other, fresh)


def test_a_model_not_yet_known_is_asked_for() -> None:
    model, other = net(1), net(2)
    optimizer = crew(sgd(model), None)
    with pytest.raises(RuntimeError, match="give model="):
        capture(optimizer)
    assert same(capture(optimizer, model=model).model, capture(crew(sgd(model), model)).model)
    with pytest.raises(ValueError, match="6 of the optimizer's 6 parameters are not in the model given"):
        capture(optimizer, model=other)
    train(model, optimizer, 0, 1)
    snapshot = capture(optimizer)
    restore(snapshot, crew(sgd(other), None), model=other)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model, other = net(1), net(2)
    compiled = torch.compile(model)
    snapshot = capture(crew(sgd(compiled), compiled))  # type: ignore[arg-type]
    restore(snapshot, crew(sgd(other), other))
    assert same(dict(model.state_dict()), dict(other.state_dict()))


# -- What does not fit


def refused(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], match: str, steps: int = 2) -> None:
    model = net(1)
    optimizer = crew(adam(model), model)
    train(model, optimizer, 0, 2)
    snapshot = capture(optimizer)
    other, inner = make()
    fresh = crew(inner, other)
    train(other, fresh, 0, steps)
    before = copy.deepcopy((other.state_dict(), inner.state_dict()))
    with pytest.raises(ValueError, match=match):
        restore(snapshot, fresh)
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
    snapshot = capture(optimizer, {"lr": scheduler})
    with pytest.raises(ValueError, match=r"extra 'lr' is in the snapshot and not here \(given are none\)"):
        restore(snapshot, optimizer)
    with pytest.raises(ValueError, match="extra 'ema' is not in the snapshot"):
        restore(snapshot, optimizer, {"lr": scheduler, "ema": net()})
    with pytest.raises(TypeError, match=r"extra 'x' is a int, which has no state_dict\(\)"):
        capture(optimizer, {"x": 3})  # type: ignore[dict-item]

    for value, kind in ((lambda: 0, "function"), (Kept(1), "Kept"), ({1, 2}, "set"), (b"x", "bytes")):
        with pytest.raises(TypeError, match=rf"extra 'h'\['deep'\]\[1\]\['in'\] is a .*{kind}"):
            capture(optimizer, {"h": Kept(value)})
    with pytest.raises(TypeError, match="keys are str or int"):
        capture(optimizer, {"h": Kept({1.5: 2})})
    for tensor in (
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.zeros(2, dtype=torch.complex128),
    ):
        with pytest.raises(TypeError, match="extra 'h'"):
            capture(optimizer, {"h": Kept(tensor)})
    looped: list[Any] = []
    looped.append(looped)
    with pytest.raises(TypeError, match="holds itself"):
        capture(optimizer, {"h": Kept(looped)})


# -- The bytes


def peer(seed: int, steps: int) -> tuple[nn.Module, CrewOptimizer, Any]:
    model = net(seed)
    optimizer = crew(adam(model), model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, 2_000)
    train(model, optimizer, seed, seed + steps, scheduler)
    return model, optimizer, scheduler


def test_chunks_of_one_layout_may_come_from_different_donors() -> None:
    donors = [capture(o, {"lr": s}) for _, o, s in (peer(1, 2), peer(2, 105))]
    a, b = (donor.to_bytes() for donor in donors)
    assert a != b
    layout = layout_of(a)
    assert layout == layout_of(b)
    assert (layout.n_bytes, layout.front_bytes % 8) == (len(a), 0)
    for chunk in (8, 1_024, 4_096):
        pieces = [(a, b)[at // chunk % 2][at : at + chunk] for at in range(0, len(a), chunk)]
        mixed = Snapshot.from_bytes(b"".join(pieces))
        for name, tensor in mixed.model.items():
            choices = torch.stack([donor.model[name].reshape(-1) for donor in donors])
            assert bool((tensor.reshape(-1) == choices).any(0).all()), name
    front = Snapshot.from_bytes(a[: layout.front_bytes] + b[layout.front_bytes :])
    assert (front.step, front.extra["lr"]["last_epoch"]) == (2, 2)
    assert same(dict(front.model), dict(Snapshot.from_bytes(b).model))
    assert layout_of(a[: layout.front_bytes]) == layout
    assert layout_of(capture(peer(1, 2)[1]).to_bytes()).digest != layout.digest


def test_the_file_is_plain_safetensors_with_the_numbers_first() -> None:
    _, optimizer, scheduler = peer(1, 3)
    data = capture(optimizer, {"lr": scheduler}, round=17).to_bytes()
    tensors = load(data)
    assert {"__numbers__", "model.1.num_batches_tracked", "optimizer.state.0.exp_avg"} <= set(tensors)
    assert tensors["__numbers__"][:3].tolist() == [3, 17, 0]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__numbers__"]["data_offsets"][0] == 0
    assert list(header["__metadata__"]) == ["ragtag"]
    assert capture(optimizer, {"lr": scheduler}, round=17).to_bytes() == data


numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)
trees = st.recursive(
    numbers | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def snapshot_of(extra: Any) -> Snapshot:
    plain = {"class": "SGD", "defaults": [], "names": [], "param_groups": [], "state": {}}
    return Snapshot(3, 4, 1, {"w": torch.arange(5.0), "": torch.zeros(())}, plain, extra={"x": extra})


@given(tree=trees)
def test_every_tree_comes_back(tree: Any) -> None:
    back = Snapshot.from_bytes(snapshot_of(copy_tree(tree, "tree")).to_bytes())
    assert same(back.extra["x"], tree)
    assert (back.step, back.round, back.since) == (3, 4, 1)


def test_numbers_of_numpy_are_numbers() -> None:
    tree = copy_tree([np.float64(1.5), np.int32(-3), np.bool_(True), np.float32(0.5), np.str_("x")], "tree")
    assert same(tree, [1.5, -3, True, 0.5, "x"])


def test_names_that_meet_are_kept_apart() -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    assert same(Snapshot.from_bytes(snapshot_of(tree).to_bytes()).extra["x"], tree)


WHOLE = snapshot_of({"f": 1.5, "t": torch.ones(2, dtype=torch.bool), "l": [1, "two", None, (3,)]}).to_bytes()


def read_or_refuse(data: bytes) -> None:
    """Only a snapshot or a ValueError may come of it."""
    try:
        snapshot = Snapshot.from_bytes(data)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(snapshot, Snapshot)


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="no snapshot"):
        Snapshot.from_bytes(WHOLE[:length])


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no snapshot"):
        Snapshot.from_bytes(data)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(at: int, value: int) -> None:
    read_or_refuse(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.sampled_from(["int", "float", "bool", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["str", "big", "tensor", "list", "tuple", "dict", "ordered", "counter"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


def forged(form: Any, numbers: int = 3, **entry: Any) -> bytes:
    tensors = {"__numbers__": torch.zeros(numbers, dtype=torch.int64).view(torch.uint64)}
    body = {"version": 1, "schema": snapshot_of(None).schema_hash, "form": form} | entry
    return save(tensors, {"ragtag": json.dumps(body)})


@given(st.lists(json_values, min_size=6, max_size=6) | json_values, st.integers(0, 6))
def test_a_forged_form_is_read_or_refused(form: Any, numbers: int) -> None:
    read_or_refuse(forged(form, numbers))


def test_what_is_wrong_is_said() -> None:
    def why(data: bytes) -> str:
        with pytest.raises(ValueError) as raised:
            Snapshot.from_bytes(data)
        return str(raised.value)

    header = int.from_bytes(WHOLE[:8], "little")
    assert "cut off" in why(WHOLE[:-1])
    assert "something follows" in why(WHOLE + b"x")
    assert f"at most {HEADER_BYTES_MAX}" in why((1 << 62).to_bytes(8, "little") + b"{" * 100)
    assert "its metadata has no entry 'ragtag'" in why(save({"a": torch.zeros(2)}))
    assert "format version 2, and this ragtag reads 1" in why(forged([], version=2))
    assert "six parts" in why(forged([]))
    deep = '{"version":1,"schema":"' + "0" * 32 + '","form":' + "[" * 5_000 + "]" * 5_000 + "}"
    assert "its header is damaged" in why(save(load(WHOLE), {"ragtag": deep}))
    nested: Any = None
    for _ in range(DEPTH_MAX + 2):
        nested = {"list": [nested]}
    assert "nested more than" in why(forged([nested] * 6))
    assert "not those of its schema" in why(WHOLE.replace(b"model.w", b"model.v"))
    lost = WHOLE.replace(b'"extra.x.t"', b'"extra.x.s"')
    assert "tensor 'extra.x.t' is missing" in why(lost)
    assert header + 8 < layout_of(WHOLE).front_bytes < len(WHOLE)
    bad_bool = WHOLE[:-2] + b"\x02\x01"
    assert "neither true nor false" in why(bad_bool)
    more = load(WHOLE) | {"extra.y": torch.zeros(1)}
    text = json.loads(WHOLE[8 : 8 + header])["__metadata__"]["ragtag"]
    assert "tensor 'extra.y' belongs to nothing" in why(save(more, {"ragtag": text}))
    none = dict(json.loads(WHOLE[8 : 8 + header]), __metadata__={"ragtag": text}, huge={})
    none["huge"] = {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}
    body = json.dumps(none).encode()
    assert "'huge' of F32" in why(len(body).to_bytes(8, "little") + body + WHOLE[8 + header :])


def test_a_header_that_names_the_numbers_twice() -> None:
    header = int.from_bytes(WHOLE[:8], "little")
    other = b'"__numbers__":{"dtype":"F64","shape":[5],"data_offsets":[0,40]}'
    plain = WHOLE[8 : 8 + header].rstrip()
    for body in (plain[:-1] + b"," + other + b"}", b"{" + other + b"," + plain[1:]):
        read_or_refuse(len(body).to_bytes(8, "little") + body + WHOLE[8 + header :])


def test_forms_that_take_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match="bits"):
        Packer().pack(1 << 20_000, "big")
    with pytest.raises(ValueError, match="no integer"):
        Unpacker([], {}).unpack({"big": "9" * 5_000})
    big = -(10**3_000)
    assert Unpacker([], {}).unpack(Packer().pack(big, "")) == big
