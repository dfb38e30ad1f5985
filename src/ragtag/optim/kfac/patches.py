"""Sums over the patches of a convolution: what each position of its output sees, padding with it.

A convolution's A is the sum of p p' over all patches p. Patches overlap, so the product of two values lies in
many of them; where it counts depends on how far the two are apart, and hardly on where in a patch they are.
So on a processor the images are multiplied with themselves once for each displacement, a row of all images
at a time: a 3 x 3 kernel has 13 of these, and their mirror images, where its A has 81 blocks. Nothing is
copied but the padded images. Two pairs of places in a patch that are equally far apart see the same images
but for borders. Borders are summed by themselves, and each pair takes those that it sees: sums are only
added, and lose no digits.

That is many small products. An accelerator takes longer to begin one than to make it, so there patches are
copied for one product; as they are on a processor where strides keep places apart, in groups, and where an
image has hardly more than borders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def patch_products(module: nn.Conv2d, images: Tensor) -> tuple[Tensor, int]:
    """The sum of p p' over all patches, ``(groups, k, k)``, and how many patches an image has.

    A patch's values are in the weight's order, k = C / groups times the kernel's two sides; with a bias there
    is a 1 behind them.

    images: ``(N, C, H, W)``.
    """
    given = padded(module, images)
    sides = _sides(module, given)
    spans = [_span(module, axis) for axis in (0, 1)]
    shifted = (
        given.device.type == "cpu"
        and module.groups == 1
        and module.stride == (1, 1)
        and all(side >= span for side, span in zip(sides, spans, strict=True))
    )
    product = _by_displacement(module, given) if shifted else _by_copies(module, given)
    positions = math.prod(sides)
    if module.bias is not None:
        sums = patches(module, given.sum(0, keepdim=True)).sum((1, 2, 3)).permute(0, 3, 1, 2)
        sums = sums.reshape(module.groups, -1)
        product = bordered(product, sums, len(images) * positions)
    return product, positions


def bordered(product: Tensor, sums: Tensor, count: int) -> Tensor:
    """The products of rows, as if each had a 1 at its end.

    product, sums: of the rows as they are, ``(groups, k, k)`` and ``(groups, k)``. count: how many there are.
    """
    corner = product.new_full((len(product), 1, 1), count)
    column = sums.unsqueeze(2)
    return torch.cat([torch.cat([product, column], 2), torch.cat([column.mT, corner], 2)], 1)


def padded(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The images with the module's padding around them."""
    margins = []
    for axis in (1, 0):  # the last axis comes first, as ``pad`` has it
        if module.padding == "same":
            whole = _span(module, axis)
            margins += [whole // 2, whole - whole // 2]
        else:
            each = 0 if isinstance(module.padding, str) else int(module.padding[axis])
            margins += [each, each]
    if not any(margins):
        return images
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(images, margins, mode=mode)


def patches(module: nn.Conv2d, given: Tensor) -> Tensor:
    """What each position of the output sees: ``(groups, N, height, width, kh, kw, C / groups)``, a view.

    Channels come last: so whole rows of a kernel lie side by side in memory, and are copied several times as
    fast as one by one.

    given: padded images, ``(N, C, H, W)``.
    """
    sides = _sides(module, given)
    given = given.permute(0, 2, 3, 1).contiguous()
    samples, high, wide, channels = given.shape
    (down, right), (step_down, step_right) = module.dilation, module.stride
    each, line = channels // module.groups, wide * channels
    return given.as_strided(
        (module.groups, samples, *sides, *module.kernel_size, each),
        (each, high * line, step_down * line, step_right * channels, down * line, right * channels, 1),
    )


def _span(module: nn.Conv2d, axis: int) -> int:
    """How far the ends of a kernel are apart."""
    return module.dilation[axis] * (module.kernel_size[axis] - 1)


def _sides(module: nn.Conv2d, given: Tensor) -> list[int]:
    """How many positions the output has, down and across."""
    return [(given.shape[2 + axis] - _span(module, axis) - 1) // module.stride[axis] + 1 for axis in (0, 1)]


def _by_copies(module: nn.Conv2d, given: Tensor) -> Tensor:
    seen = patches(module, given)
    groups, *_, high, wide, each = seen.shape
    rows = seen.reshape(groups, math.prod(seen.shape[1:4]), -1)
    product = (rows.mT @ rows).view(groups, high, wide, each, high, wide, each)
    return product.permute(0, 3, 1, 2, 6, 4, 5).reshape(groups, rows.shape[2], rows.shape[2])


def _by_displacement(module: nn.Conv2d, given: Tensor) -> Tensor:
    (high, wide), (down, right) = module.kernel_size, module.dilation
    height, width = _sides(module, given)
    given = given.permute(2, 3, 0, 1).contiguous()  # a place of all images is one run of memory
    channels = given.shape[-1]
    found = given.new_empty(channels, high, wide, channels, high, wide)
    for below in range(high):
        for beside in range(1 - wide if below else 0, wide):
            first, second = _apart(given, below * down, beside * right)
            borders = (high - 1 - below) * down, (wide - 1 - abs(beside)) * right
            products = _bordered_products(first, second, borders, (height, width))
            for axis, (border, dilation) in enumerate(zip(borders, module.dilation, strict=True)):
                products = products.unfold(axis, border + 1, dilation).sum(-1)
            products = products.permute(2, 3, 0, 1)  # of places above and left first
            found.diagonal(below, 1, 4).diagonal(beside, 1, 3).copy_(products)
            if below or beside:
                mirrored = found.diagonal(-below, 1, 4).diagonal(-beside, 1, 3)
                mirrored.copy_(products.transpose(0, 1))
    return found.view(1, channels * high * wide, channels * high * wide)


def _apart(given: Tensor, below: int, beside: int) -> tuple[Tensor, Tensor]:
    """Each place of ``(H, W, N, C)``, and what is so many rows and columns from it, where both are."""
    rows, columns = given.shape[0] - below, given.shape[1] - abs(beside)
    left, right = max(0, -beside), max(0, beside)
    return given[:rows, left : left + columns], given[below:, right : right + columns]


def _bordered_products(
    first: Tensor, second: Tensor, borders: tuple[int, int], sides: tuple[int, int]
) -> Tensor:
    """The products of channels, ``(C, C)``, summed over images and places, of ``(H, W, N, C)`` each.

    borders: how many rows and columns at each end are summed by themselves; all between them is one.
    sides: in which row and column the borders at the far ends begin.

    Returns ``(rows + 1 + rows, columns + 1 + columns, C, C)``.
    """
    (rows, columns), (height, width) = borders, sides
    channels = first.shape[-1]
    found = first.new_empty(2 * rows + 1, 2 * columns + 1, channels, channels)
    for at in range(2 * columns + 1):
        begin = at if at <= columns else width + at - columns - 1
        end = width if at == columns else begin + 1
        one, other = (part[:, begin:end].flatten(1, 2) for part in (first, second))
        found[:rows, at] = torch.bmm(one[:rows].mT, other[:rows])
        found[rows, at] = torch.bmm(one[rows:height].mT, other[rows:height]).sum(0)
        found[rows + 1 :, at] = torch.bmm(one[height:].mT, other[height:])
    return found
