"""SampledTopK and exact top-k of a tensor where it lies: on a CPU by the numpy or compiled path, elsewhere by
torch's own operations, with the same result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragtag.codecs.sparse.selection import INFINITE, require_k
from ragtag.codecs.sparse.topk import SAMPLE, sampled_top_k
from ragtag.core.errors import NotFinite
from ragtag.core.seed import uniform

_SIGNLESS = 0x7FFFFFFF


def sampled_top_k_tensor(
    u: Tensor, k: int, key: int = 0, sample: int = SAMPLE, *, native: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest in magnitude of float32 ``[d]``: indices (int64, ascending) and values, on its device.

    native: by torch's operations even on a CPU (``None``: only elsewhere).

    Raises:
        TypeError, ValueError: the tensor is not float32, dense and one-dimensional; k below 1 or above d.
        NotFinite: it has NaN or infinity.
    """
    if u.dtype != torch.float32:
        raise TypeError(f"the tensor is {u.dtype}, not float32: only float32 values are sparsified")
    if u.dim() != 1 or not u.is_contiguous():
        raise ValueError(f"the tensor has shape {tuple(u.shape)}, strides {u.stride()}; flatten it")
    u = u.detach()
    require_k(k, len(u))
    if not (u.device.type != "cpu" if native is None else native):
        chosen = sampled_top_k(u.numpy(), k, key, sample)
        return torch.from_numpy(chosen.indices), torch.from_numpy(chosen.values)
    if not len(u):
        return torch.zeros(0, dtype=torch.int64, device=u.device), u
    candidates = _candidates(u, k, key, sample)
    bits = u[candidates].view(torch.int32) & _SIGNLESS
    last = torch.topk(bits, k, sorted=False).values.min()
    chosen_ = bits > last
    ties = (bits == last).nonzero()[: k - int(chosen_.sum()), 0]
    chosen_[ties] = True
    at = candidates[chosen_]
    return at, u[at]


def _candidates(u: Tensor, k: int, key: int, sample: int) -> Tensor:
    """Indices of the k largest and some more."""
    bits = u.view(torch.int32) & _SIGNLESS
    if int(bits.max()) >= int(INFINITE):
        bad = ~torch.isfinite(u)
        raise NotFinite(
            f"the tensor has {int(u.isnan().sum())} NaN and {int(u.isinf().sum())} infinite of {len(u)} "
            f"values, the first at {int(bad.nonzero()[0, 0])}. Nothing was sent. Lower the learning rate or "
            "clip gradients"
        )
    stride = len(u) // max(1, sample)
    if stride >= 2:
        drawn = bits[int(uniform(key) * stride) :: stride]
        expected = k * len(drawn) / len(u)
        rank = math.ceil(expected + 3 * math.sqrt(expected) + 4)
        while rank < len(drawn) // 2:
            least = torch.topk(drawn, rank, sorted=False).values.min().clamp(min=1)
            found = (bits >= least).nonzero()[:, 0]
            if len(found) >= k:
                return found
            rank *= 2
    return torch.arange(len(u), device=u.device)
