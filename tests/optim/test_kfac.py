"""K-FAC's maths, against kfac-pytorch, dense algebra and loops; and what it does with odd models."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import threading
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from ragtag.app.crew.transport import SoloTransport
from ragtag.optim.kfac import OneProcess, preconditioner, why_not
from ragtag.optim.kfac.communicator import Needs
from ragtag.optim.kfac.layers import (
    KfacLayer,
    PassGate,
    decomposed,
    preconditioned,
    too_little_damping,
)
from ragtag.optim.kfac.patches import padded, patches
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.training.kfac import CrewCommunicator

# What kfac-pytorch (gpauloski/kfac-pytorch, commit 869cf11, MIT) computes in one process, in float32: 5 steps
# of two nets, for some forms and intervals. Its hooks had seen one pass of zeros before the first step.
REFERENCE = np.load(Path(__file__).parent / "data" / "kfac_pytorch.npz")
RUNS = sorted({key.split("/")[0] for key in REFERENCE})


def given(run: str, key: str) -> torch.Tensor:
    return torch.from_numpy(REFERENCE[f"{run}/{key}"])


def net(name: str) -> nn.Sequential:
    if name == "linear":
        return nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 10))
    first, second = nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.Conv2d(6, 8, 3, bias=False)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32, 7))


def with_pass_of_zeros(kfac: KFAC, model: nn.Module, x: torch.Tensor) -> None:
    """Take the pass that the reference began with into A: without backward, it counts there and not here."""
    state = kfac.state_dict()

    def see(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        name = next(name for name, layer in kfac.layers.items() if layer.module is module)
        a = kfac.layers[name].input_covariance(args[0])
        state["factors"][f"{name}.A"] = 0.95 * state["factors"][f"{name}.A"] + 0.05 * a

    hooks = [layer.module.register_forward_hook(see) for layer in kfac.layers.values()]
    with torch.no_grad():
        model(torch.zeros_like(x))
    for hook in hooks:
        hook.remove()
    kfac.load_state_dict(state)


@pytest.mark.parametrize("run", RUNS)
def test_it_agrees_with_kfac_pytorch(run: str) -> None:
    settings = json.loads(str(REFERENCE[f"{run}/settings"]))
    model = net(settings["net"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given(run, f"init.{name}"))
    kfac = KFAC(
        model,
        lr=settings["lr"],
        damping=settings["damping"],
        factor_decay=settings["factor_decay"],
        kl_clip=settings["kl_clip"],
        factor_every=settings["factor_update_steps"],
        inverse_every=settings["inverse_update_steps"],
        form=settings["method"],
    )
    with_pass_of_zeros(kfac, model, given(run, "step0.x"))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    for step in range(settings["steps"]):
        optimizer.zero_grad()
        functional.cross_entropy(model(given(run, f"step{step}.x")), given(run, f"step{step}.y")).backward()
        kfac.step()
        for name, parameter in model.named_parameters():
            theirs = given(run, f"step{step}.preconditioned.{name}")
            assert (parameter.grad - theirs).norm() <= 1e-5 * theirs.norm(), (step, name)
        optimizer.step()


def one_pass(model: nn.Module, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Forward and backward of a loss whose output gradients differ everywhere; returns these."""
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    (y * weights).sum().backward()
    return weights


def tiny() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64)


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_it_is_the_dense_inverse_of_the_damped_fisher_matrix(form: str) -> None:
    model, x = tiny()
    kfac = KFAC(model, lr=0.1, damping=0.03, kl_clip=None, form=form, factor_dtype=torch.float64)
    g = one_pass(model, x)
    a = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1)
    big_a = 0.95 * torch.eye(5, dtype=torch.float64) + 0.05 * a.T @ a / 6
    big_g = 0.95 * torch.eye(3, dtype=torch.float64) + 0.05 * g.T @ g / 6
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    if form == "eigen":
        fisher = torch.kron(big_g, big_a) + 0.03 * torch.eye(15, dtype=torch.float64)
    else:
        fisher = torch.kron(
            big_g + 0.03 * torch.eye(3, dtype=torch.float64), big_a + 0.03 * torch.eye(5, dtype=torch.float64)
        )
    dense = torch.linalg.solve(fisher, gradient.reshape(-1)).reshape(3, 5)
    kfac.step()
    ours = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    assert torch.allclose(ours, dense, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(ours, gradient, rtol=0.01)


CONVOLUTIONS = {
    "strided": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv2d(4, 6, 3, stride=(1, 2), padding=(2, 1), groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, (3, 2), groups=4, bias=False),
    "dilated": lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2, bias=False),
    "same": lambda: nn.Conv2d(2, 3, (5, 3), padding="same"),
    "valid": lambda: nn.Conv2d(2, 3, 3, padding="valid"),
    "reflected": lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
    "pointwise": lambda: nn.Conv2d(2, 3, 1),
    "hardly more than borders": lambda: nn.Conv2d(2, 3, (3, 5)),
    "less than borders": lambda: nn.Conv2d(2, 3, (5, 7), padding=(0, 1)),
}


def padded_by_hand(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """By hand: (left, right, above, below)."""
    if conv.padding == "same":
        return functional.pad(x, (1, 1, 2, 2))
    if conv.padding == "valid":
        return x
    above, left = conv.padding
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(x, (left, left, above, above), mode=mode)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("batched", [True, False])
def test_a_convolutions_factors_are_those_of_its_patches_by_loops(kind: str, batched: bool) -> None:
    torch.manual_seed(1)
    conv = CONVOLUTIONS[kind]().double()
    kfac = KFAC(conv, lr=0.1, factor_dtype=torch.float64)
    layer = kfac.layers["model"]
    x = torch.randn(3, conv.in_channels, 7, 8, dtype=torch.float64)[slice(None) if batched else 0]
    g = one_pass(conv, x)
    whole, g = padded_by_hand(conv, x if batched else x[None]), g if batched else g[None]
    n, _, height, width = g.shape
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    ins, outs, positions = conv.in_channels // conv.groups, conv.out_channels // conv.groups, height * width
    for group in range(conv.groups):
        sum_a, sum_g = torch.zeros(layer.size.a, layer.size.a), torch.zeros(outs, outs)
        product = torch.zeros(outs, layer.size.a)
        for i in range(n):
            for row in range(height):
                for column in range(width):
                    values = [
                        whole[i, group * ins + c, row * sh + u * dh, column * sw + v * dw]
                        for c in range(ins)
                        for u in range(kh)
                        for v in range(kw)
                    ]
                    a = torch.stack([*values, *([torch.ones(())] if conv.bias is not None else [])]).double()
                    b = g[i, group * outs : (group + 1) * outs, row, column]
                    sum_a = sum_a + torch.outer(a, a) / positions**2 / (n * positions)
                    sum_g = sum_g + torch.outer(b, b) / positions**2 / (n * positions)
                    product = product + torch.outer(b, a)
        ours = layer.gradient()
        assert torch.allclose(ours if conv.groups == 1 else ours[group], product, rtol=1e-10)
        if group == 0:
            layer_sums = layer._sums
        for ours, theirs in zip(layer_sums, (sum_a, sum_g), strict=True):
            assert torch.allclose(ours if conv.groups == 1 else ours[group], theirs, rtol=1e-10, atol=1e-15)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_even_kernels_are_padded_as_torch_does() -> None:
    conv = nn.Conv2d(2, 3, (4, 2), padding="same", bias=False).double()
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    rows = patches(conv, padded(conv, x)).reshape(2 * 6 * 5, -1)
    product = rows @ conv.weight.permute(2, 3, 1, 0).reshape(-1, 3)
    assert torch.allclose(product, conv(x).permute(0, 2, 3, 1).reshape(-1, 3))


def test_a_grouped_convolution_is_preconditioned_as_its_groups_apart() -> None:
    torch.manual_seed(2)
    whole = nn.Conv2d(4, 6, 3, groups=2).double()
    parts = [nn.Conv2d(2, 3, 3).double() for _ in range(2)]
    x = torch.randn(5, 4, 6, 6, dtype=torch.float64)
    g = torch.randn(5, 6, 4, 4, dtype=torch.float64)
    for at, part in enumerate(parts):
        part.load_state_dict(
            {"weight": whole.weight[at * 3 : at * 3 + 3], "bias": whole.bias[at * 3 : at * 3 + 3]}
        )
    made = [KFAC(conv, lr=0.1, kl_clip=None, factor_dtype=torch.float64) for conv in (whole, *parts)]
    (whole(x) * g).sum().backward()
    for at, part in enumerate(parts):
        (part(x[:, at * 2 : at * 2 + 2]) * g[:, at * 3 : at * 3 + 3]).sum().backward()
    for kfac in made:
        kfac.step()
    assert torch.allclose(whole.weight.grad, torch.cat([part.weight.grad for part in parts]), rtol=1e-9)
    assert torch.allclose(whole.bias.grad, torch.cat([part.bias.grad for part in parts]), rtol=1e-9)


def test_the_gradient_that_is_read_is_the_losss_by_finite_differences() -> None:
    torch.manual_seed(4)
    conv = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2).double()
    layer = KfacLayer("conv", conv, torch.float64, PassGate(lambda: 1.0))
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    conv(x).square().sum().backward()
    read, step = layer.gradient(), 1e-3  # the loss is a square: no step is too long
    for group, out, at in [(0, 0, 0), (0, 1, 17), (1, 0, 5), (1, 1, 18)]:
        flat = conv.bias.data if at == 18 else conv.weight.data.view(2, 2, 18)[group, out]
        where = group * 2 + out if at == 18 else at
        kept, losses = flat[where].item(), []
        for sign in (1, -1):
            flat[where] = kept + sign * step
            losses.append(conv(x).square().sum().item())
        flat[where] = kept
        assert read[group, out, at].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-8)


@pytest.mark.parametrize("scaling", ["fisher", "pytorch"])
@pytest.mark.parametrize("groups", [1, 2])
def test_factors_of_convolutions_can_be_of_some_images_alone(scaling: str, groups: int) -> None:
    """Of the same means as if the batch had been the others' copies; a linear layer counts all rows."""
    factors = []
    x = torch.randn(7, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    for images, every in ((x, 3), (x[[0, 0, 0, 3, 3, 3, 6, 6, 6]], 1)):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=groups), nn.Flatten(), nn.Linear(54, 2))
        kfac = KFAC(model, lr=0.1, scaling=scaling, images_every=every)
        loss = model(images).square().sum() / len(images)
        loss.backward()
        sums = kfac.layers["0"]._sums
        assert sums is not None and kfac.layers["0"].samples == len(images)
        scale = len(images) ** 2 if scaling == "pytorch" else 1  # of gradients of a mean loss
        factors.append((sums[0], sums[1] * scale))
        if every > 1:
            rows = kfac.layers["2"]
            assert torch.allclose(rows._sums[0], rows.input_covariance(model[:2](x).detach()))
    for some, copies in zip(*factors, strict=True):
        assert torch.dist(some, copies) < 1e-6 * copies.norm()


def test_rows_of_sequences_are_samples() -> None:
    torch.manual_seed(5)
    model = nn.Linear(3, 2)
    kfac = KFAC(model, lr=0.1)
    x = torch.randn(4, 5, 3)
    g = one_pass(model, x)
    a = torch.cat([x.reshape(20, 3), torch.ones(20, 1)], 1)
    kfac.step()
    factors = kfac.layers["model"].factors
    assert torch.allclose(factors["A"], 0.95 * torch.eye(4) + 0.05 * a.T @ a / 20, atol=1e-6)
    flat = g.reshape(20, 2)
    assert torch.allclose(factors["G"], 0.95 * torch.eye(2) + 0.05 * flat.T @ flat / 20, atol=1e-6)


def test_accumulated_passes_count_as_their_mean_and_scaled_losses_as_unscaled() -> None:
    torch.manual_seed(6)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 3)
    whole, parts = KFAC(model, lr=0.1), KFAC(twin, lr=0.1, grad_scale=lambda: 512 / 2)
    model(x).square().sum().backward()
    for half in x.split(4):
        (256 * twin(half).square().sum()).backward()
    for parameter in twin.parameters():
        parameter.grad /= 256
    whole.step()
    parts.step()
    for side in "AG":
        ours, theirs = parts.layers["model"].factors[side], whole.layers["model"].factors[side]
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.allclose(model.weight.grad, twin.weight.grad, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "groups"])
def test_fisher_factors_are_of_samples_whatever_the_batch(kind: str) -> None:
    """The gradient of a mean over more samples, of the same kind, gives the same factors."""
    torch.manual_seed(12)
    model: nn.Module = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    if kind == "sequence":
        x = torch.randn(2, 3, 4)
    elif kind != "linear":
        groups = 2 if kind == "groups" else 1
        model, x = nn.Conv2d(4, 6, 3, groups=groups), torch.randn(3, 4, 5, 5)
    twin = copy.deepcopy(model)
    one, more = KFAC(model, lr=0.1, scaling="fisher"), KFAC(twin, lr=0.1, scaling="fisher")
    out = (slice(None),) if kind in ("linear", "sequence") else (slice(None), slice(None), 0, 0)
    targets = torch.zeros(model(x)[out].shape[:-1], dtype=torch.long)

    def loss(net: nn.Module, given: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(net(given)[out].reshape(goal.numel(), -1), goal.reshape(-1))

    loss(model, x, targets).backward()
    loss(twin, torch.cat([x, x]), torch.cat([targets, targets])).backward()
    one.step()
    more.step()
    for side in "AG":
        ours, theirs = one.layers["model"].factors[side], more.layers["model"].factors[side]
        assert torch.dist(ours, theirs) < 1e-6 * theirs.norm()
    if kind == "linear":  # sample by sample
        rows = [torch.cat([row, torch.ones(1)]) for row in x]
        sample = [torch.autograd.grad(loss(twin, row[None], targets[:1]), twin.bias)[0] for row in x]
        assert torch.allclose(one.layers["model"].factors["A"], sum(torch.outer(a, a) for a in rows) / 6)
        assert torch.allclose(
            one.layers["model"].factors["G"], sum(torch.outer(g, g) for g in sample) / 6, atol=1e-7
        )


def test_fisher_factors_begin_as_the_mean_of_the_first_passes() -> None:
    model, _ = tiny()
    kfac = KFAC(model, lr=0.1, scaling="fisher", factor_decay=0.75, factor_dtype=torch.float64)
    rows = [torch.randn(6, 4, dtype=torch.float64) for _ in range(6)]
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for step, given in enumerate(rows):
        one_pass(model, given)
        kfac.step()
        a = torch.cat([given, torch.ones(6, 1, dtype=torch.float64)], 1)
        alpha = min(0.75, step / (step + 1))
        expected = alpha * expected + (1 - alpha) * a.T @ a / 6
        assert torch.allclose(kfac.layers["model"].factors["A"], expected)


def test_one_line_of_image_positions_is_a_sum_over_them() -> None:
    """KFC's scaling: one position is as a Linear layer; of p of them A counts p times as much."""
    torch.manual_seed(13)
    conv, x = nn.Conv2d(3, 2, 1, bias=False), torch.randn(5, 3, 2, 2)
    kfac = KFAC(conv, lr=0.1, scaling="fisher")
    g = one_pass(conv, x)
    kfac.step()
    a_rows, g_rows = x.permute(0, 2, 3, 1).reshape(-1, 3), 5 * g.permute(0, 2, 3, 1).reshape(-1, 2)
    factors = kfac.layers["model"].factors
    assert torch.allclose(factors["A"], 4 * a_rows.T @ a_rows / 20, atol=1e-6)
    assert torch.allclose(factors["G"], g_rows.T @ g_rows / 20, rtol=1e-5)


def test_a_layer_that_changes_its_shape_is_left_to_the_optimizer_and_named() -> None:
    torch.manual_seed(14)
    told: list[tuple[str, str]] = []
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kfac = KFAC(model, lr=0.1, inverse_every=1, on_note=lambda *note: told.append(note))

    def step() -> list[bool]:
        model.zero_grad()
        one_pass(model, torch.randn(6, 3))
        before = [layer.weight.grad.clone() for layer in (model[0], model[1])]
        kfac.step()
        return [torch.equal(a, layer.weight.grad) for a, layer in zip(before, model, strict=True)]

    assert step() == [False, False]
    model[1].weight = nn.Parameter(torch.randn(5, 4))
    model[1].bias = nn.Parameter(torch.zeros(5))
    assert step() == step() == [False, True]
    why = "its weight and bias were (2, 4) and (2,), and are (5, 4) and (5,)"
    assert kfac.left_out == {"1": why}
    assert told == [("1", f"left to the optimizer: {why}")]
    kfac.load_state_dict(kfac.state_dict())


def test_with_an_optimizer_gradients_are_preconditioned_as_it_takes_its_step() -> None:
    results = []
    for hooked in (False, True):
        torch.manual_seed(15)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer) if hooked else KFAC(model, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one_pass(model, torch.randn(6, 3))
            before = model.weight.grad.clone()
            kfac.step()
            assert torch.equal(before, model.weight.grad) is hooked
            optimizer.step()
            assert not torch.equal(before, model.weight.grad)
        results.append(model.weight.detach())
        kfac.close()
        assert not optimizer._optimizer_step_pre_hooks
    assert torch.equal(*results)
    with pytest.raises(TypeError, match="give the optimizer"):
        KFAC(nn.Linear(2, 2))


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_calls_its_parents_step_is_preconditioned_once() -> None:
    results = []
    for kind in (torch.optim.SGD, Twice):
        torch.manual_seed(16)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, damping=0.5, kl_clip=None)
        for _ in range(2):
            optimizer.zero_grad()
            one_pass(model, torch.randn(6, 3))
            kfac.step()
            optimizer.step()
        one_pass(model, torch.randn(6, 3))
        with pytest.warns(RuntimeWarning, match=r"kfac.step\(\) was not called"):
            optimizer.step()  # by the bases that there are
        results.append(model.weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice])
@pytest.mark.parametrize("how", ["first argument", "by name", "told before the step"])
def test_gradients_of_a_closure_are_preconditioned_as_others(how: str, kind: type) -> None:
    """Each call of it makes them anew, after the optimizer's step has begun."""
    results = []
    for closed in (False, True):
        torch.manual_seed(16)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, damping=0.5, kl_clip=None)
        told_in = closed and how != "told before the step"
        for _ in range(3):

            def closure(x: torch.Tensor, kfac: KFAC = kfac, told: bool = told_in) -> float:
                kfac.layers["model"].module.zero_grad()
                one_pass(kfac.layers["model"].module, x)
                if told:
                    kfac.step()
                return 1.5

            given = partial(closure, torch.randn(6, 3))
            if not told_in:
                given()
                kfac.step()
            if not closed:
                optimizer.step()
            else:
                assert (optimizer.step(closure=given) if how == "by name" else optimizer.step(given)) == 1.5
            assert kfac.plain == () and kfac.layers["model"].written
        results.append(model.weight.detach())
    assert torch.equal(*results)


def test_each_gradient_of_a_closure_that_is_called_often_is_preconditioned() -> None:
    torch.manual_seed(18)
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    kfac, seen = KFAC(model, optimizer, damping=0.5, kl_clip=None), []
    plain = optimizer._gather_flat_grad

    def gathered() -> torch.Tensor:
        seen.append(kfac.layers["model"].written)
        return plain()

    optimizer._gather_flat_grad = gathered

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        kfac.step()
        return loss

    optimizer.step(closure)
    assert kfac.steps == len(seen) == 3 and all(seen)


def test_passes_that_teach_nothing_do_not_count() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    kfac, x = KFAC(model, lr=0.1), torch.randn(4, 3)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()
    model(x).sum().backward()
    model.train()
    model(x)  # no backward pass
    copied = copy.deepcopy(model)
    copied(x).sum().backward()
    model.zero_grad()
    assert all(layer._passes == 0 for layer in kfac.layers.values())
    model(x).sum().backward()
    assert all(layer._passes == 1 for layer in kfac.layers.values())


@pytest.mark.parametrize("how", ["none", "zeros", "asked for alone", "another weight"])
@pytest.mark.parametrize("calls", [1, 2])
def test_passes_whose_gradients_were_thrown_away_do_not_count(how: str, calls: int) -> None:
    """The loss of a GAN's generator goes through the discriminator, too."""
    torch.manual_seed(21)
    model = nn.Linear(3, 3).double()
    x = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    kfac = KFAC(model, lr=0.1, factor_dtype=torch.float64)
    layer = kfac.layers["model"]

    def loss(at: int) -> torch.Tensor:
        y = model(x[at])
        return (model(y) if calls == 2 else y).square().sum()

    def of_gradients() -> list[float]:
        for at in (1, 2):  # accumulated
            loss(at).backward()
        assert layer._passes == 2 * calls and layer.samples == 8 * calls
        return [float(part.sum()) for part in layer.taken()]

    model.zero_grad()
    wanted = of_gradients()
    if how == "asked for alone":
        model.zero_grad()
        torch.autograd.grad(loss(0), x[0])
    elif how == "another weight":
        model.weight = nn.Parameter(model.weight.detach().clone())
        kfac.step()
    else:
        loss(0).backward()
        loss(0).backward()
    model.zero_grad(set_to_none=how != "zeros")
    assert of_gradients() == pytest.approx(wanted, rel=1e-12)


def test_passes_of_a_steps_further_batches_count_in_the_next_factors_though_their_gradients_are_taken() -> (
    None
):
    model, x = tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kfac = KFAC(model, optimizer)
    layer = kfac.layers["model"]
    for _ in range(3):  # an optimizer with a target batch has taken the gradients over after each
        one_pass(model, x)
        kfac.step()
        model.zero_grad()
    assert layer.folded == 1
    model(x).sum().backward()  # of no step
    model.zero_grad()
    one_pass(model, x)
    optimizer.step()
    model.zero_grad()
    one_pass(model, x)
    assert layer._passes == 3 and layer.samples == 3 * len(x)
    kfac.step()
    assert layer.folded == 2 and layer.samples == 0


def test_passes_that_are_not_finite_are_dropped_and_leave_gradients_as_they_are() -> None:
    model, x = tiny()
    kfac = KFAC(model, lr=0.1, inverse_every=1)
    (model(x) * math.inf).sum().backward()
    before = model.bias.grad.clone()
    kfac.step()
    assert kfac.dropped == 1 and kfac.ages() == {"model.A": None, "model.G": None}
    assert torch.equal(model.bias.grad, before)
    assert all(torch.isfinite(factor).all() for factor in kfac.layers["model"].factors.values())
    model.zero_grad()
    one_pass(model, x)
    kfac.step()
    good = {side: factor.clone() for side, factor in kfac.layers["model"].factors.items()}
    model.weight.grad.fill_(math.nan)
    kfac.step()
    assert model.weight.grad.isnan().all() and torch.isfinite(model.bias.grad).all()
    assert all(torch.equal(good[side], factor) for side, factor in kfac.layers["model"].factors.items())


class OwnWay(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.own = OwnWay(4, 4)
        self.made = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.skipped = nn.Sequential(nn.Linear(4, 4))
        self.sometimes = nn.Linear(4, 4)
        self.unhooked = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 5)
        self.decode.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor, *, sometimes: bool = False) -> torch.Tensor:
        x = self.norm(self.first(input=self.embed(tokens))) * self.scale
        x = self.skipped(self.frozen(self.made(self.own(x))))
        x = x + functional.linear(x, self.unhooked.weight, self.unhooked.bias)
        return self.decode(self.sometimes(x) if sometimes else x)


def test_what_it_does_not_know_is_left_to_the_optimizer_and_named() -> None:
    torch.manual_seed(8)
    model = Odd()
    kfac = KFAC(model, lr=0.1, skip=["skipped"])
    assert list(kfac.layers) == ["first", "sometimes", "unhooked"]
    tokens = torch.arange(5)
    model(tokens).square().sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    kfac.step()
    changed = {name for name in before if not torch.equal(before[name], model.get_parameter(name).grad)}
    assert changed == {"first.weight", "first.bias"}
    assert model.sometimes.weight.grad is None
    assert kfac.left_out == {
        "model": "Odd is neither Linear nor Conv2d, or computes in its own way",
        "embed": "it shares parameters with decode",
        "norm": "LayerNorm is neither Linear nor Conv2d, or computes in its own way",
        "own": "OwnWay is neither Linear nor Conv2d, or computes in its own way",
        "made": kfac.left_out["made"],
        "made.parametrizations.weight": kfac.left_out["made.parametrizations.weight"],
        "frozen": "some of its parameters need no gradient",
        "skipped.0": "it is skipped",
        "decode": "it shares parameters with embed",
        "sometimes": "no pass has reached it yet",
        "unhooked": "no pass has reached it yet",
    }
    model.zero_grad()
    model(tokens, sometimes=True).square().sum().backward()
    kfac.step()
    assert "sometimes" not in kfac.left_out
    assert why_not(nn.Linear(2, 3)) is None


VIEWS = {
    "sequences": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "sequences of sequences": (lambda: nn.Linear(3, 4), (2, 5, 2, 3)),
    "sequences without bias": (lambda: nn.Linear(3, 4, bias=False), (2, 5, 3)),
    "one row": (lambda: nn.Linear(3, 4), (3,)),
    "one row without bias": (lambda: nn.Linear(3, 4, bias=False), (3,)),
    "one image": (lambda: nn.Conv2d(3, 4, 2), (3, 5, 6)),
    "one image in groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 5, 6)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_pass_is_seen_whatever_becomes_of_its_output_in_place(kind: str) -> None:
    """An output that is a view has another history after an operation in place."""
    make, shape = VIEWS[kind]
    torch.manual_seed(17)
    model = make().double()
    x, seen = torch.randn(shape, dtype=torch.float64), []
    for inplace in (False, True):
        kfac = KFAC(model, lr=0.1, factor_dtype=torch.float64)
        y = functional.relu(model(x), inplace=inplace)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        (y * weights).sum().backward()
        layer = kfac.layers["model"]
        assert layer._sums is not None and layer._passes == 1
        assert torch.equal(layer._sums[1], layer.output_covariance(weights * (y > 0)))
        seen.append((*layer._sums, layer.samples))
        kfac.close()
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*seen, strict=True))


def test_what_the_optimizer_has_not_is_left_alone_and_does_not_shorten_its_step() -> None:
    results = []
    for how in ("head only", "skip"):
        torch.manual_seed(19)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        sgd = torch.optim.SGD(model[2].parameters() if how == "head only" else model.parameters(), lr=0.1)
        kfac = KFAC(model, sgd, skip=["0"] if how == "skip" else [])
        assert list(kfac.layers) == ["2"]
        one_pass(model, torch.randn(6, 3))
        before = model[0].weight.grad.clone()
        kfac.step()
        if how == "head only":
            why = "the optimizer had none of its parameters when K-FAC was made"
            assert kfac.left_out == {"0": why}
            sgd.add_param_group({"params": model[0].parameters()})
        sgd.step()
        assert torch.equal(model[0].weight.grad, before) and kfac.plain == ()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    other = torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"no layer to precondition: .*the optimizer had none"):
        KFAC(model, other)


@pytest.mark.parametrize(
    ("what", "why", "plain"),
    [
        ("frozen bias", "some of its parameters need no gradient", ("0",)),
        ("frozen", "some of its parameters need no gradient", ()),
        ("another", "the model has another module in its place", ()),
        ("pruned", "its parameters are computed from others", ("0",)),
    ],
)
def test_a_layer_that_is_no_more_what_it_was_is_named(what: str, why: str, plain: tuple[str, ...]) -> None:
    torch.manual_seed(22)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kfac = KFAC(model, lr=0.1)
    for step in range(3):
        model.zero_grad()
        one_pass(model, torch.randn(6, 3))
        kfac.step()
        assert kfac.left_out == ({"0": why} if step else {}) and kfac.plain == (plain if step else ())
        if step:
            continue
        if what == "another":
            model[0] = nn.Linear(3, 4)
        elif what == "pruned":
            prune.random_unstructured(model[0], "weight", 0.5)
        else:
            model[0].bias.requires_grad_(False)
            model[0].weight.requires_grad_(what == "frozen bias")


@pytest.mark.parametrize("every", [1, 2])
def test_a_layer_with_gradients_and_no_passes_is_noted_once(every: int) -> None:
    torch.manual_seed(23)
    told: list[tuple[str, str]] = []
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    kfac = KFAC(model, lr=0.1, factor_every=every, on_note=lambda *note: told.append(note))
    noted = []
    for step in range(25 * every):
        model.zero_grad()
        x = functional.linear(model[0](torch.randn(4, 3)), model[1].weight, model[1].bias)
        seldom = step % (9 * every) == 0
        one_pass(model[2] if seldom else partial(functional.linear, weight=model[2].weight), x)
        kfac.step()
        noted += [(step, name) for name, _ in told[len(noted) :]]
    assert noted == [(9 * every, "1")]
    assert told[0][1].startswith("no pass was seen in 10 steps with gradients: it is in evaluation mode")


def test_a_layer_that_is_called_twice_counts_both() -> None:
    torch.manual_seed(9)
    layer = nn.Linear(3, 3)
    kfac = KFAC(nn.Sequential(layer, nn.Tanh(), layer), lr=0.1)
    x = torch.randn(4, 3)
    layer(torch.tanh(layer(x))).sum().backward()
    second = torch.tanh(layer(x)).detach()
    rows = [torch.cat([each, torch.ones(4, 1)], 1) for each in (x, second)]
    kfac.step()
    expected = 0.95 * torch.eye(4) + 0.05 * sum(a.T @ a / 4 for a in rows) / 2
    assert torch.allclose(next(iter(kfac.layers.values())).factors["A"], expected, atol=1e-6)


def test_the_clip_bounds_the_step() -> None:
    grads, products = [], []
    for kappa in (None, 1e-3, 1e9):
        model, x = tiny()
        kfac = KFAC(model, lr=lambda step: 0.5 + step, kl_clip=kappa)
        one_pass(model, x)
        before = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
        kfac.step()
        grads.append(torch.cat([model.weight.grad, model.bias.grad[:, None]], 1))
        products.append(0.25 * (before * grads[-1]).sum().item())
    free, clipped, loose = grads
    nu = math.sqrt(1e-3 / products[0])
    assert nu < 0.9
    assert torch.allclose(clipped, nu * free, rtol=1e-5) and torch.equal(free, loose)


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("groups", [1, 2])
def test_large_factors_are_decomposed_in_diagonal_blocks(form: str, groups: int) -> None:
    """What comes of a gradient is what the dense inverse makes of it whose blocks these are."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4 * groups, 6 * groups, 3, groups=groups, dtype=torch.float64)
    made: list[KFAC] = []
    before, after = list[torch.Tensor](), list[torch.Tensor]()
    x = torch.randn(32, 4 * groups, 5, 5, dtype=torch.float64)
    for block_rows in (None, 37, 13):  # A has 37 rows: in three blocks; G has 6
        conv.zero_grad()
        kfac = KFAC(
            conv, lr=0.1, damping=0.1, kl_clip=None, form=form, factor_dtype=torch.float64,
            block_rows=block_rows,
        )  # fmt: skip
        (conv(x) ** 2).sum().backward()
        gradient = kfac.layers["model"].gradient()
        assert gradient is not None
        before.append(gradient.clone())
        kfac.step()
        kfac.close()
        made.append(kfac)
        after.append(kfac.layers["model"].gradient().clone())
    blocks = made[2].layers["model"]
    assert torch.equal(after[0], after[1]) and not torch.equal(after[0], after[2])
    assert blocks.size.blocks("A") == (12, 12, 13) and blocks.size.blocks("G") == (6,)
    assert sorted(made[2].state_dict()["bases"]["values"]) == [
        *(f"model.A.{form}.{at}" for at in range(3)), f"model.G.{form}",
    ]  # fmt: skip
    cut = torch.block_diag(*(torch.ones(rows, rows, dtype=torch.float64) for rows in (12, 12, 13)))
    a, g = blocks.factors["A"] * cut, blocks.factors["G"]
    for group in range(groups):
        of_a, of_g = (factor[group] if groups > 1 else factor for factor in (a, g))
        one = before[2][group] if groups > 1 else before[2]
        if form == "eigen":
            fisher = torch.kron(of_g, of_a) + 0.1 * torch.eye(6 * 37, dtype=torch.float64)
            want = torch.linalg.solve(fisher, one.reshape(-1)).reshape(6, 37)
        else:
            eyes = (0.1 * torch.eye(len(factor), dtype=torch.float64) for factor in (of_g, of_a))
            damped_g, damped_a = (f + eye for f, eye in zip((of_g, of_a), eyes, strict=True))
            want = torch.linalg.solve(damped_a, torch.linalg.solve(damped_g, one).mT).mT
        torch.testing.assert_close(after[2][group] if groups > 1 else after[2], want)
    assert made[2].ages() == {"model.A": 0, "model.G": 0}
    with pytest.raises(ValueError, match="the state's block_rows is None, not 13"):
        made[2].load_state_dict(made[0].state_dict())
    made[2].load_state_dict(made[2].state_dict())


def test_eigenvalues_below_zero_count_as_zero() -> None:
    factor = torch.diag(torch.tensor([-0.5, 0.0, 2.0]))
    basis = decomposed(factor, "eigen", 0.1)
    assert basis.shape == (4, 3) and basis[-1].tolist() == [0, 0, 2]
    after = preconditioned(torch.eye(3), [basis], [decomposed(torch.eye(3), "eigen", 0.1)], "eigen", 0.1)
    assert torch.allclose(after, torch.diag(torch.tensor([10, 10, 1 / 2.1])), atol=1e-5)


def test_factors_are_updated_and_decomposed_at_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny()
    folded, made = [], []
    kfac = KFAC(model, lr=0.1, factor_every=2, inverse_every=lambda step: 3 if step < 6 else 4)
    fold, plain = preconditioner.fold, preconditioner.decomposed
    monkeypatch.setattr(preconditioner, "fold", lambda *args: folded.append(kfac.steps) or fold(*args))
    monkeypatch.setattr(preconditioner, "decomposed", lambda *args: made.append(kfac.steps) or plain(*args))
    ages = []
    for _ in range(10):
        model.zero_grad()
        one_pass(model, x)
        kfac.step()
        ages.append(kfac.ages()["model.A"])
    assert folded == [0, 2, 4, 6, 8]
    assert made == [0, 0, 3, 3, 8, 8]
    assert ages == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0]


class Answers(TorchDispatchMode):
    """Counts what is asked of the device: an accelerator ends all its work for each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [2, 8])
def test_however_many_layers_a_usual_step_asks_the_device_once(layers: int) -> None:
    """For how long the step is; whether passes are finite is one more transfer, of all layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    kfac = KFAC(model, lr=0.1, factor_every=1, inverse_every=5)
    asked = []
    for _ in range(5):
        model.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        with Answers() as answers:
            kfac.step()
        asked.append(answers.asked)
    assert asked[1:] == [1] * 4


def trained(model: nn.Module, kfac: KFAC, steps: range) -> list[torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        kfac.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stop", [8, 9])  # goes on with kept bases; decomposes factors as they were kept
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_run_goes_on_from_its_state_as_if_it_had_not_stopped(form: str, stop: int) -> None:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    settings = {"lr": 0.1, "factor_every": 2, "inverse_every": 3, "form": form}
    kfac = KFAC(model, **settings)
    trained(model, kfac, range(stop))
    kept, stream = copy.deepcopy(model), io.BytesIO()
    torch.save(kfac.state_dict(), stream)
    through = trained(model, kfac, range(stop, 14))
    stream.seek(0)
    again = KFAC(kept, **settings)
    again.load_state_dict(torch.load(stream, weights_only=True))
    resumed = trained(kept, again, range(stop, 14))
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))
    assert again.ages() == kfac.ages() and again.steps == 14


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_crew_of_one_is_one_process(form: str) -> None:
    results = []
    for crew in (None, lambda needs: CrewCommunicator(SoloTransport(0), "kfac", needs)):
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        kfac = KFAC(model, lr=0.1, factor_every=2, inverse_every=4, form=form, communicator=crew)
        results.append((trained(model, kfac, range(7)), kfac.ages()))
    (alone, ages), (named, ages_named) = results
    assert ages == ages_named
    assert all(torch.equal(a, b) for a, b in zip(alone, named, strict=True))


def test_states_of_other_models_are_refused_and_change_nothing() -> None:
    model, x = tiny()
    kfac = KFAC(model, lr=0.1)
    one_pass(model, x)
    kfac.step()
    good = kfac.state_dict()

    def odd(**changes: object) -> dict[str, object]:
        return {**copy.deepcopy(good), **changes}

    factor = good["factors"]["model.A"]
    values = good["bases"]["values"]
    for state, words in [
        (odd(steps=-1), "steps"),
        (odd(form="inverse"), "form 'inverse'"),
        (odd(scaling="fisher"), "scaling"),
        (odd(factors={"other.A": factor}), "other layers"),
        (odd(factors=None), "other layers"),
        (odd(factors={"model.A": factor[1:], "model.G": good["factors"]["model.G"]}), "'model.A'"),
        (odd(factors={"model.A": factor * math.nan, "model.G": good["factors"]["model.G"]}), "not finite"),
        (odd(folded={}), "passes"),
        (odd(folded={"model": "1"}), "passes"),
        (odd(bases=None), "decompositions"),
        (odd(bases={"values": values, "ages": dict.fromkeys(values, -1)}), "age"),
        (odd(bases={"values": {"x": factor}, "ages": {"x": 0}}), "'x'"),
    ]:
        with pytest.raises(ValueError, match=words):
            kfac.load_state_dict(state)
        assert kfac.steps == 1 and torch.equal(kfac.layers["model"].factors["A"], factor)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": True}, "lr"),
        ({"damping": 0}, "damping"),
        ({"damping": math.inf}, "damping"),
        ({"factor_decay": 1.1}, "factor_decay"),
        ({"kl_clip": 0}, "kl_clip"),
        ({"factor_every": 0}, "factor_every"),
        ({"images_every": 0}, "images_every"),
        ({"images_every": 0.5}, "images_every"),
        ({"block_rows": 0}, "block_rows"),
        ({"block_rows": 2.0}, "block_rows"),
        ({"inverse_every": 1.5}, "inverse_every"),
        ({"form": "svd"}, "form"),
        ({"scaling": "none"}, "scaling"),
        ({"factor_dtype": torch.int32}, "factor_dtype"),
        ({"grad_scale": 0}, "grad_scale"),
        ({"skip": "model"}, "skip"),
        ({"skip": ["nowhere"]}, "nowhere"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_hooked(settings: dict, words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=words):
        KFAC(model, **{"lr": 0.1, **settings})
    assert not model[0]._forward_hooks


def test_what_peers_compare_has_lr_and_values_by_step() -> None:
    def words(**settings: Any) -> str:
        told: list[str] = []

        def made(needs: Needs) -> OneProcess:
            told.append(needs.settings)
            return OneProcess(needs)

        model, _ = tiny()
        KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator=made, **settings)
        return told[0]

    assert words() == words() != words(lr=0.1) != words(lr=5.0)
    assert words(kl_clip=lambda step: 1e-3) == words(kl_clip=lambda step: 1e-3 * (1 + 1e-9))
    for name in ("lr", "kl_clip", "damping", "factor_decay"):
        assert words(**{name: lambda step: 0.01}) != words(**{name: lambda step: 0.02})
        assert words(**{name: lambda step: 0.01}) != words(**{name: lambda step: 0.01 if step < 50 else 0.02})
    assert words(inverse_every=lambda step: 5) != words(inverse_every=lambda step: 6)
    assert words(lr=[0.3, 0.2, 0.1].__getitem__).startswith("lr 0.3/none/none/none, damping 0.003, ")
    by_step = dict.fromkeys(("lr", "kl_clip", "damping", "factor_decay"), lambda step: 1.2346e-5)
    every = dict.fromkeys(("factor_every", "inverse_every"), lambda step: 1000)
    longest = words(**by_step, **every, block_rows=2048, form="inverse", scaling="pytorch")
    assert len(longest) < 400, "a schema's content has 512 letters, others' settings and the name among them"


def test_bad_models_and_bad_values_by_step_are_refused() -> None:
    with pytest.raises(ValueError, match="no layer to precondition"):
        KFAC(nn.LayerNorm(3), lr=0.1)
    with pytest.raises(ValueError, match="no shape yet"):
        KFAC(nn.Sequential(nn.LazyLinear(3)), lr=0.1)
    for settings in (
        {"lr": lambda step: -1.0},
        {"damping": lambda step: 0.0},
        {"inverse_every": lambda step: 0},
        {"factor_every": lambda step: 1 if step == 0 else 0},
    ):
        model, x = tiny()
        kfac = KFAC(model, **{"lr": 0.1, **settings})
        one_pass(model, x)
        before = model.weight.grad.clone()
        with pytest.raises(ValueError, match=f"{next(iter(settings))}.*"):
            kfac.step()
        assert kfac.steps == 0 and torch.equal(model.weight.grad, before)
        assert torch.equal(kfac.layers["model"].factors["A"], torch.eye(5))


def test_a_thread_decomposes_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go, running, plain = threading.Event(), [], preconditioner.decomposed

    def held(*args: object) -> torch.Tensor:
        running.append(threading.current_thread().name)
        assert go.wait(30)
        return plain(*args)

    monkeypatch.setattr(preconditioner, "decomposed", held)
    model, x = tiny()
    kfac = KFAC(model, lr=0.1, inverse_every=1, background=True)
    for _ in range(3):
        model.zero_grad()
        one_pass(model, x)
        before = model.weight.grad.clone()
        kfac.step()
        assert torch.equal(model.weight.grad, before) and kfac.ages()["model.A"] is None
    job = kfac._job
    assert job is not None and kfac.state_dict()["due"]
    go.set()
    job.future.result(30)
    one_pass(model, x)
    kfac.step()
    assert kfac.ages() == {"model.A": 2, "model.G": 2}  # of the first factors; two averages ended since
    assert not torch.equal(model.weight.grad, before)
    assert all(name.startswith("kfac") for name in running)
    assert kfac._job is not job
    kfac._job.future.result(30)
    kfac.step()
    assert kfac.ages()["model.A"] == 1


@pytest.mark.parametrize("background", [True, False])
def test_a_factor_that_cannot_be_decomposed_leaves_its_layer_with_older_bases(
    monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    plain, told = preconditioner.decomposed, []
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def fails(factor: torch.Tensor, *more: object) -> torch.Tensor:
        if factor.shape[-1] == 5:  # 1.A
            raise torch.linalg.LinAlgError("did not converge")
        if factor.shape[-1] == 2:  # 1.G
            return factor * math.nan
        return plain(factor, *more)

    kfac = KFAC(
        model, lr=0.1, inverse_every=1, background=background, on_note=lambda *note: told.append(note)
    )

    def steps(n: int) -> None:
        for _ in range(n):
            model.zero_grad()
            one_pass(model, torch.randn(6, 3))
            kfac.step()
            if background:
                kfac._job.future.result(30)

    monkeypatch.setattr(preconditioner, "decomposed", fails)
    steps(3)
    assert kfac.ages()["1.A"] is None and kfac.ages()["1.G"] is None and kfac.ages()["0.A"] == int(background)
    assert kfac.plain == ("1",)
    why = "its factor cannot be decomposed, and it goes on with older bases: did not converge"
    assert told == [("1", why)], "once"
    monkeypatch.setattr(preconditioner, "decomposed", plain)
    steps(2)
    assert kfac.plain == () and kfac.age == int(background)
    monkeypatch.setattr(preconditioner, "decomposed", fails)
    steps(5)
    assert kfac.plain == () and kfac.ages()["1.A"] >= 4 and kfac.age == kfac.ages()["1.A"]


DEAD = "its factor is singular, and damping is below its rounding: give a damping of"


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("inputs", ["dead units", "constant", "zero"])
def test_singular_factors_train_and_too_little_damping_is_said(form: str, inputs: str) -> None:
    """Units that a ReLU has shut, and inputs that do not differ."""
    fate = {}
    for damping in (1e-12, 0.03):
        torch.manual_seed(13)
        told: list[tuple[str, str]] = []
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        if inputs == "dead units":
            with torch.no_grad():
                model[0].weight[:8], model[0].bias[:8] = 0, -1e3
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        kfac = KFAC(
            model,
            sgd,
            form=form,
            scaling="fisher",
            damping=damping,
            inverse_every=2,
            on_note=lambda *note, told=told: told.append(note),
        )
        losses = []
        for step in range(20):
            x = torch.randn(32, 10)
            y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
            x = {"dead units": x, "constant": torch.ones(32, 10), "zero": 0 * x}[inputs]
            sgd.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            kfac.step()
            if step == 0 or form == "inverse":  # zeros that are exact have inverses; later ones are rounded
                fate[damping] = list(told)
            sgd.step()
            losses.append(loss.item())
        if damping > 0.01:
            assert told == [] and kfac.plain == () and max(losses) < 1.2 * losses[0]
    words = DEAD if form == "eigen" else "with damping 1e-12 it is singular but for rounding; give a larger"
    assert any(words in what for _, what in fate[1e-12])
    assert {name for name, _ in fate[1e-12]} <= {"0", "2"}


def test_the_damping_that_is_asked_for_is_enough() -> None:
    basis = decomposed(torch.diag(torch.tensor([2.0, 0.0, 1.0])), "eigen", 1e-9)
    other = 3 * torch.eye(4)
    needed = too_little_damping(basis, other, 1e-9)
    assert needed == pytest.approx(3 * torch.finfo(torch.float32).eps * 2 * 6)  # the norm of 3 I is 6
    assert too_little_damping(basis, other, needed) is None
    assert too_little_damping(decomposed(torch.eye(3), "eigen", 1e-9), other, 1e-9) is None, "it is regular"


def test_an_indefinite_factor_is_not_inverted() -> None:
    """In half precision a factor rounds below 0 by more than the damping: gradients would turn around."""
    factor = torch.diag(torch.tensor([1.0, -0.01]))
    with pytest.raises(torch.linalg.LinAlgError, match="give a larger damping"):
        decomposed(factor, "inverse", 0.003)
    assert torch.allclose(decomposed(factor, "inverse", 0.02), torch.diag(torch.tensor([1 / 1.02, 100.0])))
    pair = torch.stack([torch.eye(2), factor])
    with pytest.raises(torch.linalg.LinAlgError, match="give a larger damping"):
        decomposed(pair, "inverse", 0.003)


def test_where_nobody_is_told_a_warning_says_what_is_odd() -> None:
    model, x = tiny()
    kfac = KFAC(model, lr=0.1)
    for _ in range(2):
        (model(x) * math.inf).sum().backward()
        with (
            pytest.warns(RuntimeWarning, match="K-FAC: model: passes that are not finite")
            if kfac.steps == 0
            else warnings.catch_warnings(action="error")
        ) as told:
            kfac.step()
        assert told is None or [one.filename for one in told] == [__file__]
    assert kfac.dropped == 2


def test_a_second_one_on_a_layer_waits_for_the_end_of_the_first() -> None:
    """A gradient that is preconditioned twice is none of the loss's."""
    torch.manual_seed(20)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    first, third = KFAC(model[1], sgd), KFAC(model[0], sgd)
    second = KFAC(model, sgd)
    one_pass(model, x)
    with pytest.raises(RuntimeError, match=r"has the layer '0', too, .* close\(\) the older one"):
        second.step()
    assert second.steps == 0 and not second.layers["0"].folded
    first.step()
    third.close()
    with pytest.raises(RuntimeError, match="layer '1'"):
        second.step()
    first.close()
    second.step()
    last = KFAC(model[0], sgd)
    with pytest.raises(RuntimeError, match="layer 'model'"):
        last.step()
    second.step()
    del second
    last.step()
    KFAC(model[0], torch.optim.SGD(model.parameters(), lr=0.1)).step()  # another training


@pytest.mark.parametrize("cycle", [False, True])
def test_one_that_is_made_in_the_place_of_another_goes_on_alone(cycle: bool) -> None:
    """A notebook's cell that is run again."""
    model, x = tiny()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        kfac = KFAC(model, sgd)
        if cycle:
            kfac._itself = kfac
        sgd.zero_grad()
        one_pass(model, x)
        kfac.step()
        before = model.weight.grad.clone()
        sgd.step()
        assert len(model._forward_hooks) == len(sgd._optimizer_step_pre_hooks) == 1
        assert not torch.equal(before, model.weight.grad)


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_model_can_be_saved_whole_and_its_copy_is_watched_by_itself(how: str) -> None:
    model, x = tiny()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), grad_scale=lambda: 1.0)
    if how == "copied":
        again = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        again = torch.load(stream, weights_only=False)
    one_pass(again, x)
    assert kfac.layers["model"]._passes == 0
    own = KFAC(again, lr=0.1)
    one_pass(model, x)
    one_pass(again, x)
    kfac.step()
    own.step()
    for layer in (kfac.layers["model"], own.layers["model"]):
        assert layer.folded == 1
    assert torch.equal(kfac.layers["model"].factors["G"], own.layers["model"].factors["G"])


def test_what_is_no_model_optimizer_or_number_is_refused() -> None:
    model, x = tiny()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model is a SGD; give a torch\.nn\.Module"):
        KFAC(sgd, model)
    with pytest.raises(TypeError, match=r"optimizer is a Linear; give a torch\.optim\.Optimizer"):
        KFAC(model, model)
    kfac = KFAC(model, sgd)
    one_pass(model, x)
    for samples in ("x", -1, math.inf, math.nan, True):
        with pytest.raises(ValueError, match="samples is"):
            kfac.step(samples)
    assert kfac.steps == 0


def test_hooks_and_thread_end_with_the_object() -> None:
    model, x = tiny()
    kfac = KFAC(model, lr=0.1, background=True)
    one_pass(model, x)
    kfac.step()
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("kfac")]
    del kfac
    gc.collect()
    assert not model._forward_hooks
    thread.join(30)
    assert not thread.is_alive()
    kfac = KFAC(model, lr=0.1, background=True)
    model(x).sum().backward()
    kfac.step()
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("kfac")]
    kfac.close()
    thread.join(30)
    assert not thread.is_alive()
    assert not model._forward_hooks
    with pytest.raises(RuntimeError, match="closed"):
        kfac.step()


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_steps_that_were_taken_elsewhere_count_for_when_factors_are_due(missed: int) -> None:
    """A peer that was away would average its factors at other steps than its crew."""

    def made() -> KFAC:
        net = nn.Linear(3, 2)
        return KFAC(net, torch.optim.SGD(net.parameters(), lr=0.1), factor_every=3, background=False)

    state = made().state_dict()
    with closing(made()) as went_on, closing(made()) as from_there:
        went_on.load_state_dict(state)
        went_on.went_on(missed)
        from_there.load_state_dict(state | {"steps": missed})
        assert went_on.steps == from_there.steps == missed
        assert went_on._gate.opened == from_there._gate.opened == (missed == 3)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_step_that_is_forgotten_is_said_once_where_it_was(taken: int) -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, sgd)
    sgd.step()  # no pass yet
    for _ in range(taken):
        model(torch.ones(4, 3)).sum().backward()
        kfac.step()
        sgd.step()
    model(torch.ones(4, 3)).sum().backward()
    by = "older factors precondition" if taken else "gradients are the model's"
    with pytest.warns(RuntimeWarning, match=rf"{by}.*: call kfac.step\(\)") as told:
        sgd.step()
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd.step()
        kfac.step()
        sgd.step()
