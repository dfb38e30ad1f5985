"""Distance correlation of a batch with what is made of it, as a loss that autograd goes through.

Szekely, Rizzo, Bakirov, "Measuring and testing dependence by correlation of distances" (Annals of Statistics,
2007), in the form that Vepakomma et al. ("Reducing leakage in distributed deep learning for sensitive health
data", 2019) minimise. For ``n`` samples X with their codes Z, a and b are the matrices of Euclidean distances
(not squared ones), A and B the same less the means of their rows and columns plus the mean of all. Then

    dCov^2(X, Z) = mean(A * B)      dVar^2(X) = mean(A * A)      dCor = dCov(X, Z) / sqrt(dVar(X) dVar(Z))

so that dCor^2 = mean(A * B) / sqrt(mean(A * A) mean(B * B)). dCor lies in 0 .. 1: it is 1 for Z = cX + d
or a rotation of it, and 0 where X or Z is constant. It is the plain (V-) statistic: of independent X and
Z it is above 0, and the more so the fewer the samples and the more their dimensions.

**No centred matrix is stored.** mean(A * B) = mean(a * b) - 2 mean_i(a_i. b_i.) + a.. b.. needs sums of
a, of b and of their products, which one pass over blocks of rows adds up in float64. The gradient needs
none either: with W = d dCor / d b = (s A - t B) / n^2 for numbers s and t, and M = W / b (0 where b is
0), row i of d dCor / d Z is 2 (sum_j M_ij z_i - sum_j M_ij z_j): one matrix product. Up to ``ROWS``
samples a and b are kept for that; of more, they are computed again, block by block.

Distances come from Gram matrices, in blocks of columns. Columns are centred first, as far points that are
close to each other would cancel out. A squared distance that is no more than what rounding leaves of two
equal points counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 2048
"""Rows of a distance matrix that are in memory at once."""
_COLUMNS = 1024
_ROUNDED = 8
"""A squared distance of so many roundings of both points' squared lengths is none."""


def distance_correlation(x: Tensor, z: Tensor, *, squared: bool = False, rows: int = ROWS) -> Tensor:
    """The distance correlation of samples with their codes: a scalar, which both may be differentiated by.

    It is computed in float64 where one of both is, else in float32 (autocast has no part in it), on the
    device of both. Memory beyond ``x`` and ``z`` is that of two or three matrices ``[min(n, rows), n]``.

    x: ``[n, ...]``, any numbers; only distances between whole samples count.
    z: ``[n, ...]``.
    squared: dCor^2, as some call distance correlation.
    rows: of more samples than that, distances are computed in blocks of so many rows, and twice.

    The gradient is 0 where a sample's code equals another's, where ``x`` or ``z`` is constant (the value is 0
    there), and where the value is 0. NaN and infinity go through. There is no second derivative.

    Raises:
        ValueError: fewer than two samples, not as many of both, no values in a sample, or ``rows`` below 1.
        TypeError: complex numbers.
    """
    if x.dim() == 0 or z.dim() == 0 or len(x) != len(z):
        raise ValueError(
            f"distance_correlation: x is {list(x.shape)} and z is {list(z.shape)}; "
            "both must have one row for each sample"
        )
    if len(x) < 2:
        raise ValueError("distance_correlation: a batch of one has no distances; it needs 2 samples or more")
    if not x.numel() or not z.numel():
        raise ValueError(f"distance_correlation: x is {list(x.shape)}, z {list(z.shape)}: samples are empty")
    if x.is_complex() or z.is_complex():
        raise TypeError("distance_correlation: distances of complex numbers are not defined here")
    if rows < 1:
        raise ValueError(f"distance_correlation: rows is {rows}; it must be 1 or more")
    value: Tensor = _DistanceCorrelation.apply(x, z, squared, rows)  # type: ignore[no-untyped-call]
    return value


class _Moments:
    """Means of products of two centred distance matrices, from sums over their rows.

    value: a scalar, dCor or its square.
    of_x, of_z: the rows' means of each, float64 ``[n]``.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self.of_x, self.of_z = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(2))
        self._products = torch.zeros(3, dtype=torch.float64, device=device)
        self._n = n

    def add(self, at: slice, a: Tensor, b: Tensor) -> None:
        """Count a block of rows."""
        wide = torch.float64
        self.of_x[at], self.of_z[at] = a.mean(1, dtype=wide), b.mean(1, dtype=wide)
        for i, (one, other) in enumerate(((a, b), (a, a), (b, b))):
            self._products[i] += (one * other).sum(dtype=wide)

    def covariances(self) -> Tensor:
        """dCov^2(X, Z), dVar^2(X) and dVar^2(Z), at least 0."""
        x, z = self.of_x, self.of_z
        means = self._products / self._n**2
        pairs = ((x, z), (x, x), (z, z))
        inner = torch.stack([2 * (u * v).mean() - u.mean() * v.mean() for u, v in pairs])
        return (means - inner).clamp_min(0)


class _DistanceCorrelation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, squared: bool, rows: int) -> Tensor:
        kind = torch.float64 if torch.float64 in (x.dtype, z.dtype) else torch.float32
        flat = x.detach().reshape(len(x), -1), z.detach().reshape(len(z), -1)
        moments, kept = _Moments(len(x), x.device), len(x) <= rows
        with torch.autocast(x.device.type, enabled=False):
            for at in _blocks(len(x), rows):
                a, b = (_distances(points, at, kind) for points in flat)
                moments.add(at, a, b)
        both, of_x, of_z = moments.covariances().unbind()
        some = ~((of_x <= 0) | (of_z <= 0))  # NaN goes on
        square = torch.where(some, both / torch.where(some, of_x * of_z, 1.0).sqrt(), 0.0)
        value = square if squared else square.sqrt()
        ctx.save_for_backward(x, z, *((a, b) if kept else ()))
        ctx.moments, ctx.variances, ctx.square, ctx.some = moments, (of_x, of_z), square, some
        ctx.squared, ctx.rows, ctx.kind = squared, rows, kind
        return value.to(kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, z, *kept = ctx.saved_tensors
        of_x, of_z = ctx.variances
        n, square, kind = len(x), ctx.square, ctx.kind
        flat = [points.detach().reshape(n, -1) for points in (x, z)]
        means = ctx.moments.of_x.to(kind), ctx.moments.of_z.to(kind)
        outer = grad.double() if ctx.squared else grad.double() / (2 * square.sqrt())
        some = ctx.some & ~(square <= 0)
        root = torch.where(some, of_x * of_z, 1.0).sqrt()
        cross = torch.where(some, outer / root, 0.0) / n**2
        own = [
            torch.where(some, outer * square / torch.where(some, v, 1.0), 0.0) / n**2 for v in (of_x, of_z)
        ]
        found: list[Tensor | None] = [
            torch.empty(points.shape, dtype=kind, device=x.device) if needed else None
            for points, needed in zip(flat, ctx.needs_input_grad[:2], strict=True)
        ]
        with torch.autocast(x.device.type, enabled=False):
            for at in _blocks(n, ctx.rows):
                distances = kept or [_distances(points, at, kind) for points in flat]
                for mine, gradient in enumerate(found):
                    if gradient is None:
                        continue
                    weights = _centred(distances[1 - mine], means[1 - mine], at).mul_(cross.to(kind))
                    weights.sub_(_centred(distances[mine], means[mine], at).mul_(own[mine].to(kind)))
                    weights.div_(distances[mine]).masked_fill_(distances[mine] == 0, 0.0)
                    _pull(flat[mine], weights, at, kind, gradient)
        shaped = [
            None if gradient is None else gradient.reshape(points.shape).to(points.dtype)
            for gradient, points in zip(found, (x, z), strict=True)
        ]
        return shaped[0], shaped[1], None, None


def _blocks(n: int, rows: int) -> Iterator[slice]:
    return (slice(begin, min(begin + rows, n)) for begin in range(0, n, rows))


def _columns(points: Tensor, kind: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns, each less its mean."""
    for begin in range(0, points.shape[1], _COLUMNS):
        at = slice(begin, begin + _COLUMNS)
        block = points[:, at].to(kind)
        yield at, block - block.mean(0)


def _distances(points: Tensor, at: slice, kind: torch.dtype) -> Tensor:
    """Rows ``at`` of the matrix of Euclidean distances ``[rows, n]``."""
    n, here = len(points), torch.arange(at.start, at.stop, device=points.device)
    found = torch.zeros(len(here), n, dtype=kind, device=points.device)
    lengths = torch.zeros(n, dtype=kind, device=points.device)
    for _, block in _columns(points, kind):
        found.addmm_(block[at], block.T, alpha=-2.0)
        lengths += torch.linalg.vecdot(block, block)
    found.add_(lengths).add_(lengths[at, None])
    rounded = _ROUNDED * torch.finfo(kind).eps
    found.masked_fill_(found <= (lengths + lengths[at, None]).mul_(rounded), 0.0)
    found[torch.arange(len(here), device=points.device), here] = 0.0
    return found.sqrt_()


def _centred(distances: Tensor, means: Tensor, at: slice) -> Tensor:
    """Rows ``at`` of the doubly centred matrix."""
    return (distances - means).sub_(means[at, None]).add_(means.mean())


def _pull(points: Tensor, weights: Tensor, at: slice, kind: torch.dtype, into: Tensor) -> None:
    """Rows ``at`` of the gradient: 2 (sum_j M_ij z_i - sum_j M_ij z_j)."""
    total = weights.sum(1, keepdim=True)
    for columns, block in _columns(points, kind):
        into[at, columns] = (total * block[at]).addmm_(weights, block, beta=2.0, alpha=-2.0)
