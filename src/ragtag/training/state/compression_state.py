"""What of a sparse average's state is every peer's alike, and what is this peer's own.

Alike: the anchor that differences are to, and the outer momentum. They are in all snapshots: a newcomer that
had others would apply the same differences and end elsewhere. Its own: the residual, velocities, what a
selector remembers, and what is sent and undecided. That is what *this* peer has not delivered yet: a newcomer
that took it over from a donor would send it a second time. So it is in a peer's own checkpoints alone, and
only the peer of that number takes it up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ragtag.training.exchange.sparse import SHARED
from ragtag.training.optimizer.averaged import AveragedModel

NAME = "ragtag.compression"
"""Its name among a snapshot's extra state."""


class CompressionState:
    """Compression as a part of snapshots. own: with what is this peer's own."""

    def __init__(self, averaged: AveragedModel, own: bool) -> None:
        self._averaged, self._own = averaged, own

    def state_dict(self) -> dict[str, Any]:
        """``shared`` and, where asked for, ``own``: tensors by name."""
        replica = self._averaged.sparse
        if replica is None:
            return {}
        state = replica.tensors()
        parts = {"shared": {name: state[name] for name in SHARED if state[name].numel()}}
        if self._own:
            parts["own"] = {name: tensor for name, tensor in state.items() if name not in SHARED}
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what there is. What was undecided goes back into the residual.

        Raises ValueError, naming what does not fit; nothing has changed then.
        """
        tensors: dict[str, torch.Tensor] = dict(state.get("shared", {}))
        if self._own:
            tensors |= state.get("own", {})
        if tensors:
            self._averaged.load_compression(tensors)
