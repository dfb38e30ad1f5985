"""How a peer that comes to few rounds brings in what it learned since it was last there.

Its own model is old: averaged as it is, it would pull the others back to where they were. So it takes the
crew's average first, adds to that what its own steps have changed, and offers the sum (the difference to a
common anchor, as in DiLoCo, Douillard et al., 2023, arXiv 2311.08105, section 2: not weights, but what was
learned).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Merge:
    """The anchor of one model: what its parameters were after the last average."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._anchor: list[torch.Tensor] = []

    @property
    def marked(self) -> bool:
        """Whether there is an anchor."""
        return bool(self._anchor)

    @torch.no_grad()
    def mark(self) -> None:
        """The parameters are as the last average left them."""
        if not self._anchor:
            self._anchor = [parameter.detach().clone() for parameter in self._parameters]
            return
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.copy_(parameter)

    def forget(self) -> None:
        """There is nothing to bring in later."""
        self._anchor = []

    @torch.no_grad()
    def lift(self) -> None:
        """Set the parameters back to the anchor; keep what was learned since in its place."""
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            learned = parameter - anchor
            parameter.copy_(anchor)
            anchor.copy_(learned)

    @torch.no_grad()
    def land(self) -> None:
        """Add what was learned to the parameters as they are now; the anchor is where they stood before."""
        for learned, parameter in zip(self._anchor, self._parameters, strict=True):
            base = parameter.detach().clone()
            parameter.add_(learned)
            learned.copy_(base)
