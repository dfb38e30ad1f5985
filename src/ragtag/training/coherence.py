"""Gradient coherence, measured while training: whether gradients still point where they pointed before.

"Toward Understanding the Impact of Staleness in Distributed Machine Learning", Dai, Zhou, Dong, Zhang, Xing,
ICLR 2019 (arXiv 1810.03264), definition 1: mu_t is the least over the last s steps k of
<grad F(x_t), grad F(x_k)> / |grad F(x_k)|^2. Above 0, a stale update still helps; the theory asks for a
learning rate of the order of mu / (s L sqrt(T)).

What is measured here are this peer's own gradients, of single batches (or of several, added up), kept as
sketches: rows of ``WIDTH`` values are added up with random signs (as in "Finding frequent items in data
streams", Charikar, Chen, Farach-Colton, ICALP 2002, the place in a row standing for the bucket), so that
products of sketches are those of the gradients on average, off by about |a| |b| / sqrt(WIDTH). Noise of the
batches lies in |grad|^2 and not in the product: mu comes out nearer to 0 than that of whole gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ragtag.core import seed as random
from ragtag.schedules.base import whole

WIDTH = 1 << 14
"""Values of a sketch: 64 KB; gradients of no more values are kept as they are."""


@dataclass(frozen=True, slots=True)
class Coherence:
    """What is asked for: ``crew.optimizer(..., coherence=ragtag.Coherence())``.

    every: steps from one measurement to the next.
    over: how many steps before it have their gradients added up, in one pass over the gradient each.
    back: how many earlier measurements mu is the least of, so it looks ``back * every`` steps back.
    Raises ValueError: one is below 1, or ``over`` above ``every``.
    """

    every: int = 10
    over: int = 1
    back: int = 8

    def __post_init__(self) -> None:
        whole("coherence: every", self.every, 1, "steps")
        whole("coherence: over", self.over, 1, "steps")
        whole("coherence: back", self.back, 1, "measurements")
        if self.over > self.every:
            raise ValueError(f"coherence: gradients of {self.over} steps, measured each {self.every}")


class CoherenceMeter:
    """One optimizer's measurements. parameters: whose gradients are measured, in an order that stays."""

    def __init__(self, asked: Coherence, parameters: Iterable[torch.Tensor]) -> None:
        self.asked, self._parameters = asked, list(parameters)
        self._past: deque[torch.Tensor] = deque(maxlen=asked.back)
        self._sum: torch.Tensor | None = None
        rows = -(-sum(p.numel() for p in self._parameters) // WIDTH)
        drawn = random.bits(random.stream_key(0, "coherence"), rows) & np.uint64(1)
        self._signs = torch.from_numpy(np.where(drawn == 1, 1.0, -1.0).astype(np.float32))

    def stepped(self, step: int) -> float | None:
        """After local step number ``step``, with its gradients still there: mu, when it is time.

        ``None``: it is not, or there is nothing to compare with, or a gradient was not finite.
        """
        if -step % self.asked.every >= self.asked.over:
            return None
        now = self._sketch()
        self._sum = now if self._sum is None else self._sum + now
        if step % self.asked.every:
            return None
        now, self._sum = self._sum, None
        if not bool(now.isfinite().all()):
            return None
        found = [float(now @ past) / square for past in self._past if (square := float(past @ past)) > 0]
        self._past.append(now)
        mu = min(found, default=math.nan)
        return mu if math.isfinite(mu) else None

    def forget(self) -> None:
        """Another state was restored: earlier gradients belong to another place."""
        self._past.clear()
        self._sum = None

    @torch.no_grad()
    def _sketch(self) -> torch.Tensor:
        """Of all gradients as one vector, float32 ``[WIDTH]`` on the host."""
        sums: dict[torch.device, torch.Tensor] = {}
        at = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.numel():
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                if dense.device not in sums:
                    sums[dense.device] = torch.zeros(WIDTH, device=dense.device)
                self._add(sums[dense.device], dense.reshape(-1).float(), at)
            at += parameter.numel()
        whole_ = torch.zeros(WIDTH, device="cpu")
        for part in sums.values():
            whole_ += part.cpu()
        return whole_

    def _add(self, total: torch.Tensor, values: torch.Tensor, at: int) -> None:
        """Values that begin at place ``at`` of the vector: to the end of its row, whole rows, the rest."""
        row, column = divmod(at, WIDTH)
        head = min(len(values), WIDTH - column)
        total[column : column + head] += self._signs[row].item() * values[:head]
        rows = (len(values) - head) // WIDTH
        if rows:
            table = values[head : head + rows * WIDTH].view(rows, WIDTH)
            total += self._signs[row + 1 : row + 1 + rows].to(values.device) @ table
        rest = values[head + rows * WIDTH :]
        if len(rest):
            total[: len(rest)] += self._signs[row + 1 + rows].item() * rest
