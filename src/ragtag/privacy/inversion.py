"""Gradient inversion: what a peer's update tells of the samples behind it.

Geiping, Bauermeister, Dröge, Moeller, "Inverting Gradients: How easy is it to break privacy in federated
learning?" (NeurIPS 2020, arXiv 2003.14053, section 3): samples are sought whose gradient points where the
update points. The objective is 1 less the cosine of both, plus the samples' total variation; Adam takes steps
by the sign of its gradient, within the box that samples lie in. The attacker knows the model as it was,
the loss, how many samples are behind an update, and their labels (which an update mostly tells, too).

It is a meter like those of ``privacy.meters``: the error of what it makes of samples, beside that of the mean
sample, which sees no update. Where it fails a stronger attack may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.core.errors import NotFinite
from ragtag.privacy.meters import ssim

STEPS = 200
RATE = 0.1
"""Falls to a tenth after 3/8, 5/8 and 7/8 of the steps, as in the paper's code."""
VARIATION = 1e-3
"""The weight of total variation. From .0001 to .01 digits are found; .1 blurs them."""
STARTS = 1
Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Inversion:
    """What updates tell of the samples behind them.

    mse: the attacker's error, mean over values.
    blind_mse: of the mean sample.
    ssim, blind_ssim: structural similarity of both; ``None``: samples are no images.
    cosine: of the updates and the gradients of what was found, mean.
    updates: how many were inverted.
    batch: samples behind each.
    """

    mse: float
    blind_mse: float
    ssim: float | None
    blind_ssim: float | None
    cosine: float
    updates: int
    batch: int

    @property
    def hidden(self) -> float:
        """The share of the samples' variance that the attacker does not get: 0 is all told, 1 nothing."""
        return min(1.0, self.mse / self.blind_mse)


def gradients_of(
    model: nn.Module, x: Tensor, y: Tensor, criterion: Criterion = F.cross_entropy
) -> dict[str, Tensor]:
    """The gradients of batches, each by itself: by parameter ``[updates, ...]``.

    x: ``[updates, batch, ...]``. y: ``[updates, batch]``.
    """
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return _gradients(model, criterion, weights)(weights, x, y)


def inverted(
    model: nn.Module,
    updates: Mapping[str, Tensor],
    y: Tensor,
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    criterion: Criterion = F.cross_entropy,
    seed: int = 0,
    steps: int = STEPS,
    variation: float = VARIATION,
    starts: int = STARTS,
) -> tuple[Tensor, Tensor]:
    """Samples whose gradients are most like updates, ``[updates, batch, *shape]``; the cosines ``[updates]``.

    updates: by parameter ``[updates, ...]``: gradients, or steps against them with the sign turned.
    y: labels ``[updates, batch]``; those of a batch should differ, since equal ones say not whose is whose.
    shape: of a sample. low, high: what its values lie within.
    starts: random beginnings, of which each update's best is taken.

    Raises NotFinite: an update is.
    """
    for name, value in updates.items():
        if not bool(value.isfinite().all()):
            raise NotFinite(f"the update of {name!r}")
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    of = _gradients(model, criterion, weights)
    target = _flat(updates)
    best, found = target.new_full((len(y),), -2.0), target.new_zeros(*y.shape, *shape)
    for start in range(starts):
        draws = random.generator(seed, "gradient inversion", start)
        middle, reach = (low + high) / 2, (high - low) / 2
        x = torch.from_numpy(draws.normal(size=found.shape)).to(target) * reach / 2 + middle
        x = x.clamp(low, high).requires_grad_()
        optimizer = torch.optim.Adam([x], RATE * reach)
        marks = [round(steps * share / 8) for share in (3, 5, 7)]
        falls = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, 0.1)
        for _ in range(steps):
            cosines = F.cosine_similarity(_flat(of(weights, x, y)), target, dim=1)
            loss = (1 - cosines).sum() + variation * _variation(x)
            (gradient,) = torch.autograd.grad(loss, x)
            x.grad = gradient.sign()
            optimizer.step()
            falls.step()
            with torch.no_grad():
                x.clamp_(low, high)
        with torch.no_grad():
            cosines = F.cosine_similarity(_flat(of(weights, x, y)), target, dim=1)
            better = cosines > best
            best[better], found[better] = cosines[better], x[better]
    return found, best


def inversion(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    updates: Mapping[str, Tensor] | None = None,
    *,
    blind: Tensor | None = None,
    criterion: Criterion = F.cross_entropy,
    seed: int = 0,
    steps: int = STEPS,
    variation: float = VARIATION,
) -> Inversion:
    """Measure what updates tell of the samples behind them.

    x: the samples ``[updates, batch, ...]``. y: labels ``[updates, batch]``.
    updates: what left, by parameter ``[updates, ...]``; ``None``: the batches' gradients as they are.
    blind: a sample's mean, as the attacker may know it; ``None``: that of these samples.

    Raises ValueError: shapes do not match, or all samples are equal. NotFinite: an update is.
    """
    if x.dim() < 3 or y.shape[:2] != x.shape[:2]:
        raise ValueError(f"inversion: samples {list(x.shape)}, labels {list(y.shape)}; [updates, batch, ...]")
    updates = gradients_of(model, x, y, criterion) if updates is None else updates
    low, high = float(x.min()), float(x.max())
    if not low < high:
        raise ValueError("inversion: all samples are equal, so there is nothing to tell")
    guess, cosines = inverted(
        model,
        updates,
        y,
        x.shape[2:],
        low=low,
        high=high,
        criterion=criterion,
        seed=seed,
        steps=steps,
        variation=variation,
    )
    middle = (x.flatten(0, 1).mean(0) if blind is None else blind).expand_as(x)
    images = x.dim() == 5

    def likeness(made: Tensor) -> float | None:
        if not images:
            return None
        return float(ssim(made.flatten(0, 1), x.flatten(0, 1), high - low).mean())

    return Inversion(
        mse=float(F.mse_loss(guess, x)),
        blind_mse=float(F.mse_loss(middle, x)),
        ssim=likeness(guess),
        blind_ssim=likeness(middle),
        cosine=float(cosines.mean()),
        updates=len(x),
        batch=x.shape[1],
    )


def _gradients(
    model: nn.Module, criterion: Criterion, weights: Mapping[str, Tensor]
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]]:
    frozen = {n: p.detach() for n, p in model.named_parameters() if n not in weights}
    rest = frozen | {name: buffer.detach() for name, buffer in model.named_buffers()}

    def loss(learned: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(model, {**rest, **learned}, (x,))
        return criterion(made, y)

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return lambda learned, x, y: dict(each(dict(learned), x, y))


def _flat(updates: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([updates[name].flatten(1) for name in sorted(updates)], dim=1)


def _variation(x: Tensor) -> Tensor:
    """Of images, the mean difference of neighbouring values, summed over updates; of others none."""
    if x.dim() != 5:
        return x.new_zeros(())
    sideways, down = x.diff(dim=-1).abs().mean(dim=(1, 2, 3, 4)), x.diff(dim=-2).abs().mean(dim=(1, 2, 3, 4))
    return (sideways + down).sum()
