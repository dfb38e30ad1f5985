"""The maths of one layer: its factors, their decompositions, and a gradient between these.

For a layer y = W x + b with input rows a (1 appended for b) and output gradients g, K-FAC takes the Fisher
matrix of (W b) for the Kronecker product of A = E[a a'] and G = E[g g']. A convolution's rows are its
patches, one for each position of its output. A convolution in groups is as many layers of one form: all its
matrices have the groups in front.

What a factor is a mean of can be counted in two ways (``Scaling``):

fisher: of samples. A sample's output gradient is that of its own loss, so the gradient of a mean over n
samples counts n times; and a patch counts as often as there are positions, since a sample's gradient is a sum
over these ("A Kronecker-factored approximate Fisher matrix for convolution layers", Grosse, Martens, ICML
2016, arXiv 1602.01407). Then G x A is the Fisher matrix whatever the batch and the image's size, damping
means the same everywhere, and peers with batches of unlike size agree.
pytorch: of the mean loss, rows of convolutions divided by the number of positions, as kfac-pytorch does
("Convolutional Neural Network Training with Distributed K-FAC", Pauloski et al., SC 2020, arXiv 2007.00784).
For n samples and p positions that is the Fisher matrix divided by n^2 p^5, to which one damping is added.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ragtag.optim.kfac.patches import bordered, patch_products
from ragtag.optim.kfac.placement import SIDES, DecompositionForm, LayerSize, Side

Scaling = Literal["fisher", "pytorch"]
"""What factors are means of: gradients of samples' losses, or of the mean loss (see the module)."""


class PassGate:
    """What K-FAC tells the hooks of its layers: whether passes count now, how losses are scaled, and of how
    many images one counts.
    """

    def __init__(
        self, scale: Callable[[], float], scaling: Scaling = "pytorch", images_every: int = 1
    ) -> None:
        self.opened = True
        self.scale, self.scaling, self.images_every = scale, scaling, images_every


class _Hook:
    """Shows a layer the passes of its module. Copied or pickled, with the module, it shows them to nobody."""

    def __init__(self, layer: KfacLayer | None = None) -> None:
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._layer is not None:
            self._layer.forward(module, args, kwargs, output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class KfacLayer:
    """One layer whose passes are watched: ``Linear`` or ``Conv2d``.

    A pass counts when its backward pass has given the weight its gradient: until then the graph holds its A
    (n x n values, and no copy of the input), so one that is dropped leaves nothing. It counts no more when
    that gradient is gone or was changed by the next backward pass, such as by ``zero_grad``. Passes in
    evaluation mode or without gradients do not count. Of several passes (gradient accumulation, a layer that
    is called twice) the mean is taken.
    """

    def __init__(
        self,
        name: str,
        module: nn.Linear | nn.Conv2d,
        dtype: torch.dtype,
        gate: PassGate,
        block_rows: int | None = None,
    ) -> None:
        self.name, self.module, self.dtype, self._gate = name, module, dtype, gate
        self.groups = module.groups if isinstance(module, nn.Conv2d) else 1
        rows = module.weight[0].numel() + (module.bias is not None)
        self.size = LayerSize(rows, module.weight.shape[0] // self.groups, self.groups, block_rows)
        self.factors = {"A": self._identity(self.size.a), "G": self._identity(self.size.g)}
        self.folded = 0
        """How many times new passes have come into the factors; 1 at least where they are other peers'."""
        self.samples = 0
        """Of the passes since the factors were updated."""
        self._form = self._shapes()
        self._wrote: tuple[Callable[[], Tensor | None], int] = (lambda: None), 0
        self._sums: tuple[Tensor, Tensor] | None = None
        self._passes = 0
        self._reached: list[tuple[Tensor, Tensor, int]] = []
        """Of the backward pass under way, or of one that gave the weight no gradient."""
        self._reached_in = -1
        self._gave: tuple[Callable[[], Tensor | None], int] = (lambda: None), 0
        """The gradient that the passes that count have given, and its version then."""
        self._kept: tuple[tuple[Tensor, Tensor] | None, int, int] = (None, 0, 0)
        """Sums, passes and samples that count whatever becomes of their gradients."""
        self._hooks: list[RemovableHandle] = []
        self._hooked: Tensor | None = None

    def _identity(self, size: int) -> Tensor:
        eye = torch.eye(size, dtype=self.dtype, device=self.module.weight.device)
        return eye if self.groups == 1 else eye.repeat(self.groups, 1, 1)

    def _shapes(self) -> tuple[torch.Size | None, ...]:
        bias = self.module.bias
        return self.module.weight.shape, None if bias is None else bias.shape

    def block(self, side: Side, at: int) -> Tensor:
        """A diagonal block of a factor, ``(..., n, n)``, as it is now."""
        rows = self.size.blocks(side)
        span = slice(sum(rows[:at]), sum(rows[: at + 1]))
        return self.factors[side][..., span, span]

    @property
    def changed(self) -> str | None:
        """In which way it is not the layer any more that it was; ``None``: it is."""
        now, then = self._shapes(), self._form
        return None if now == then else f"its weight and bias were {_sizes(then)}, and are {_sizes(now)}"

    def left_out(self, there: bool) -> str | None:
        """Why it is left alone now; ``None``: it is not. there: whether the model has its module yet."""
        if not there:
            return "the model has another module in its place"
        return self.changed or why_not(self.module)

    # -- Passes

    @property
    def _weight(self) -> Tensor | None:
        """``None``: it is computed from others by now."""
        return self.module._parameters.get("weight")

    def watch(self) -> None:
        """Begin to see passes, or, where the layer has another weight by now, its gradients again."""
        weight = self._weight
        if weight is not None and weight.requires_grad and weight is not self._hooked:
            self.remove()
            self._hooked = weight
            self._hooks = [
                self.module.register_forward_hook(_Hook(self), with_kwargs=True),
                weight.register_post_accumulate_grad_hook(self._given),  # type: ignore[no-untyped-call]
            ]

    def remove(self) -> None:
        """End that."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], None

    def forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """A pass of the module: it counts when the backward pass has come through it."""
        if module is not self.module or not (  # a replica on another device shares the hooks
            module.training and self._gate.opened and output.requires_grad and output.numel()
        ):
            return
        if self.changed:
            return
        given = args[0] if args else kwargs["input"]
        with torch.no_grad():
            a = self.input_covariance(given.detach())
        # An operation in place on a view gives it another history, without its hooks; its base keeps these.
        base = output._base if output._is_view() else None
        hooked = output if base is None or base.numel() != output.numel() else base
        hooked.register_hook(partial(self._backward, a, output.shape))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _backward(self, a: Tensor, shape: torch.Size, gradient: Tensor) -> None:
        gradient = gradient.reshape(shape)
        backward = torch._C._current_graph_task_id()
        if self._reached_in != backward:  # what torch.autograd.grad has asked for gave no gradient
            self._reached, self._reached_in = [], backward
        self._reached.append((a, self.output_covariance(gradient.detach()), self._samples_of(gradient)))

    @torch.no_grad()
    def _given(self, weight: Tensor) -> None:
        """A backward pass has added to the weight's gradient, by which that is one version further."""
        gradient = weight.grad
        held, version = self._gave
        if gradient is None or held() is not gradient or version != gradient._version - 1:
            self._sums, self._passes, self.samples = self._kept
        if gradient is not None:
            self._gave = weakref.ref(gradient), gradient._version
            for a, g, samples in self._reached:
                self._sums = (a, g) if self._sums is None else (self._sums[0] + a, self._sums[1] + g)
                self._passes += 1
                self.samples += samples
        self._reached = []

    def keep(self) -> None:
        """The gradients as they are now go into a step: their passes count from now on without them."""
        self._kept = self._sums, self._passes, self.samples

    @property
    def untold(self) -> bool:
        """Whether there were passes since ``keep``."""
        return self._passes > self._kept[1]

    def forget(self) -> None:
        """Drop the passes since the factors were updated."""
        self._sums, self._passes, self.samples, self._reached = None, 0, 0, []
        self.keep()

    def kept(self, alpha: float) -> float:
        """How much of the factors stays when new passes come in (see ``fold``)."""
        return min(alpha, self.folded / (self.folded + 1)) if self._gate.scaling == "fisher" else alpha

    def taken(self) -> tuple[Tensor, ...]:
        """The mean of the passes since the factors were updated, of A and of G, which are then forgotten;
        nothing: there were none.
        """
        sums, passes = self._sums or (), self._passes
        self.forget()
        return sums if passes < 2 else tuple(part / passes for part in sums)

    def _samples_of(self, values: Tensor) -> int:
        """How many samples a pass has: of a convolution images, else rows."""
        if isinstance(self.module, nn.Linear):
            return values.numel() // values.shape[-1]
        return values.shape[0] if values.dim() == 4 else 1

    @property
    def _sums_as(self) -> torch.dtype:
        """Sums over rows are of float32 at least: in half precision a few thousand rows would overflow."""
        return torch.promote_types(self.dtype, torch.float32)

    def _counted(self, images: Tensor) -> Tensor:
        """Those of a pass that go into the factors, the same of inputs and gradients: ``(N, C, H, W)``."""
        return images[:: self._gate.images_every] if images.dim() == 4 else images.unsqueeze(0)

    def input_covariance(self, given: Tensor) -> Tensor:
        """Of what the layer's outputs are products of: ``(a, a)``, or ``(groups, a, a)``.

        given: a pass's input, ``(..., in)``, or ``(N, C, H, W)`` or ``(C, H, W)``.
        """
        if isinstance(self.module, nn.Linear):
            given = given.to(self._sums_as)
            rows = given.reshape(1, -1, given.shape[-1])
            product = rows.mT @ rows
            n, positions = rows.shape[1], 1
            if self.module.bias is not None:
                product = bordered(product, rows.sum(1), n)
        else:
            images = self._counted(given).to(self._sums_as)
            product, positions = patch_products(self.module, images)
            n = len(images) * positions
        weight = positions if self._gate.scaling == "fisher" else 1 / positions**2
        return self._averaged(product, weight / n)

    def output_covariance(self, gradient: Tensor) -> Tensor:
        """Of a pass's output gradient: ``(g, g)``, or ``(groups, g, g)``."""
        samples = self._samples_of(gradient)
        if isinstance(self.module, nn.Linear):
            rows, positions = gradient.to(self._sums_as).reshape(1, -1, gradient.shape[-1]), 1
        else:
            whole = self._counted(gradient).to(self._sums_as)
            positions = whole.shape[2] * whole.shape[3]
            rows = whole.reshape(len(whole), self.groups, -1, positions).permute(1, 0, 3, 2)
            rows = rows.reshape(self.groups, len(whole) * positions, -1)
        weight = samples**2 if self._gate.scaling == "fisher" else 1 / positions**2
        return self._averaged(rows.mT @ rows, weight / rows.shape[1] / self._gate.scale() ** 2)

    def _averaged(self, product: Tensor, weight: float) -> Tensor:
        """``weight`` times sums ``(groups, n, n)``, exactly symmetric, in the factors' form and type."""
        whole = ((product + product.mT) * (weight / 2)).to(self.dtype)
        return whole[0] if self.groups == 1 else whole

    # -- The gradient

    @property
    def has_gradient(self) -> bool:
        """Whether one of its parameters has one, also where that is none that K-FAC can take."""
        return any(parameter.grad is not None for parameter in self.module.parameters(recurse=False))

    def gradient(self) -> Tensor | None:
        """``(g, a)``, or ``(groups, g, a)``, the bias's as last column; ``None``: it has none like that."""
        weight, bias = None if self._weight is None else self._weight.grad, self.module.bias
        if self.changed or weight is None or (bias is not None and bias.grad is None):
            return None
        parts = [weight.reshape(self.groups, self.size.g, -1)]
        if bias is not None and bias.grad is not None:
            parts.append(bias.grad.reshape(self.groups, self.size.g, 1))
        whole = torch.cat(parts, -1)
        return whole[0] if self.groups == 1 else whole

    def write(self, gradient: Tensor) -> None:
        """Put a gradient of that form in place of the layer's, in its own memory."""
        weight, bias = self.module.weight.grad, self.module.bias
        assert weight is not None
        if bias is not None:
            assert bias.grad is not None
            bias.grad.copy_(gradient[..., -1].reshape(bias.shape))
            gradient = gradient[..., :-1]
        weight.copy_(gradient.reshape(weight.shape))
        self._wrote = weakref.ref(weight), weight._version

    @property
    def written(self) -> bool:
        """Whether the gradient is still what was written last."""
        weight = None if self._weight is None else self._weight.grad
        return weight is not None and self._wrote[0]() is weight and self._wrote[1] == weight._version


def fold(layers: Sequence[KfacLayer], alpha: float) -> list[bool]:
    """Take the passes since the last time into the factors: ``alpha F + (1 - alpha) F_new``.

    Of samples' losses F is the mean of the first ones as long as that counts more than ``1 - alpha``, and
    else it begins with the identity.

    Returns of which layers they were finite: passes that are not (a scaled loss that overflowed) are dropped.
    All layers are looked at together: an accelerator waits for one answer, and not for one of each layer.
    """
    passes = [layer.taken() for layer in layers]
    spoilt = _spoilt([part for parts in passes for part in parts])
    finite = [not any(id(part) in spoilt for part in parts) for parts in passes]
    kept: list[tuple[KfacLayer, Side, Tensor, float]] = []
    for layer, parts, good in zip(layers, passes, finite, strict=True):
        if parts and good:
            own = layer.kept(alpha)
            kept += [(layer, side, part, own) for side, part in zip(SIDES, parts, strict=True)]
            layer.folded += 1
    if kept:
        factors = torch._foreach_mul(
            [layer.factors[side].to(part.device) for layer, side, part, _ in kept], [own for *_, own in kept]
        )
        torch._foreach_add_(
            factors, torch._foreach_mul([part for *_, part, _ in kept], [1 - own for *_, own in kept])
        )
        for (layer, side, _, _), factor in zip(kept, factors, strict=True):
            layer.factors[side] = factor
    return finite


def _spoilt(parts: list[Tensor]) -> set[int]:
    """The ids of those with NaN or infinity in them: one answer from the device."""
    if not parts:
        return set()
    largest = torch._foreach_norm(parts, math.inf)
    finite = torch.stack([one.to(largest[0].device) for one in largest]).isfinite().tolist()
    return {id(part) for part, good in zip(parts, finite, strict=True) if not good}


def decomposed(factor: Tensor, form: DecompositionForm, damping: float) -> Tensor:
    """What preconditioning needs of a factor ``(..., n, n)``, in float32 at least.

    eigen: ``(..., n + 1, n)``: eigenvectors as columns, and below them the eigenvalues, those below 0 as 0.
    inverse: of ``factor + damping I``, ``(..., n, n)``.

    Raises torch.linalg.LinAlgError: it has none; an inverse, where an eigenvalue of the damped factor is not
    above 0: what rounding has left of a singular factor would turn the gradient around.
    """
    plain = factor if factor.dtype == torch.float64 else factor.float()
    if form == "inverse":
        eye = torch.eye(plain.shape[-1], dtype=plain.dtype, device=plain.device)
        root, failed = torch.linalg.cholesky_ex(plain + damping * eye)
        if bool(failed.any()):
            raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
                f"with damping {damping:g} it is singular but for rounding; give a larger damping"
            )
        inverse: Tensor = torch.cholesky_inverse(root)
        return inverse.contiguous()  # as those have it that it is sent to: products round by memory's order
    values, vectors = torch.linalg.eigh(plain)
    return torch.cat([vectors, values.clamp(min=0).unsqueeze(-2)], -2)


def too_little_damping(basis: Tensor, other: Tensor, damping: float) -> float | None:
    """The damping that a factor's eigenvectors need at least to count, where it is singular and has less.

    basis: ``decomposed`` by eigenvectors. other: the layer's other factor, whose norm is at least its
    largest eigenvalue. Of n eigenvalues those below n eps times the largest are rounding (``matrix_rank``);
    with less damping than that, gradients there are divided by next to nothing, and so is their rounding.
    """
    values = _parts(basis)[1]
    largest = values.amax(-1) * values.shape[-1] * torch.finfo(values.dtype).eps
    singular = values.amin(-1) <= largest
    needed = float((largest * singular * torch.linalg.matrix_norm(other.to(values))).max())
    return needed if damping < needed else None


def undecomposed(factor: Tensor, form: DecompositionForm) -> Tensor:
    """Zeros of the shape of ``decomposed``."""
    n = factor.shape[-1]
    return factor.new_zeros(*factor.shape[:-2], n + (form == "eigen"), n)


def preconditioned(
    gradient: Tensor, a: Sequence[Tensor], g: Sequence[Tensor], form: DecompositionForm, damping: float
) -> Tensor:
    """A gradient ``(..., g, a)`` times the inverse of the damped Fisher matrix, from ``decomposed`` factors.

    a, g: one for each diagonal block of the factor, in their order.
    eigen: of ``G x A + damping I``, exactly. inverse: of ``(G + damping I) x (A + damping I)``.
    """
    a_rows, g_rows = ([one.shape[-1] for one in blocks] for blocks in (a, g))
    given = gradient.to(a[0].dtype)
    found = []
    for rows, of_g in zip(torch.split(given, g_rows, -2), g, strict=True):
        parts = zip(torch.split(rows, a_rows, -1), a, strict=True)
        found.append(_joined([_preconditioned(part, of_a, of_g, form, damping) for part, of_a in parts], -1))
    return _joined(found, -2)


def _joined(parts: list[Tensor], along: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, along)


def _preconditioned(given: Tensor, a: Tensor, g: Tensor, form: DecompositionForm, damping: float) -> Tensor:
    """By one block of each side."""
    if form == "inverse":
        return g @ given @ a
    (a_vectors, a_values), (g_vectors, g_values) = _parts(a), _parts(g)
    inner = g_vectors.mT @ given @ a_vectors
    inner = inner / (g_values.unsqueeze(-1) * a_values.unsqueeze(-2) + damping)
    return g_vectors @ inner @ a_vectors.mT


def _parts(basis: Tensor) -> tuple[Tensor, Tensor]:
    return basis[..., :-1, :], basis[..., -1, :]


def why_not(module: nn.Module) -> str | None:
    """Why a module with parameters of its own is left to the optimiser; ``None``: K-FAC knows it."""
    kind = type(module)
    base = nn.Conv2d if issubclass(kind, nn.Conv2d) else nn.Linear
    computes = ("forward", "_conv_forward") if base is nn.Conv2d else ("forward",)
    own_way = any(getattr(kind, name) is not getattr(base, name) for name in computes)
    if not issubclass(kind, base) or own_way:
        return f"{kind.__name__} is neither Linear nor Conv2d, or computes in its own way"
    parameters = dict(module.named_parameters(recurse=False))
    if "weight" not in parameters or (getattr(module, "bias", None) is not None and "bias" not in parameters):
        return "its parameters are computed from others"
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return "some of its parameters need no gradient"
    if not all(parameter.is_floating_point() for parameter in parameters.values()):
        return "its parameters are not real floating-point numbers"
    if any(parameter.numel() == 0 for parameter in parameters.values()):
        return "it has no values"
    return None


def _sizes(shapes: tuple[torch.Size | None, ...]) -> str:
    return " and ".join("none" if shape is None else str(tuple(shape)) for shape in shapes)
