"""What a model has that no average is of: frozen parameters, those that no optimizer has, integers.

Peers begin with the same.

A head that is trained on one backbone is of no use on another. What training leaves as it is stays as peers
begin with it, so this is compared once, and one peer's is carried to all where it differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from ragtag.codecs.dense import fp32
from ragtag.core.types import OpenedTogether, Outcome
from ragtag.protocols.rounds.allreduce import direct
from ragtag.training.exchange.dense import Replica
from ragtag.training.state.whole import DIGEST_BYTES, Stand, Stands, digest_of
from ragtag.training.tensors.layout import Part
from ragtag.training.transport import Transport

ROUND_BYTES = 1 << 24
"""So much is carried in one round, whatever a model's size."""
_STEP = (
    16  # bytes: no value is longer, and each tensor begins at a multiple, so that a chunk has whole values
)


class Fixed:
    """Tensors of any type that one peer may take from another, bit for bit.

    name: of the optimizer's channel.
    parts: parameters and buffers.

    They travel as pieces of 16 bits, each of which float32 has exactly.
    """

    def __init__(self, name: str, parts: Sequence[Part], transport: Transport) -> None:
        self.name = f"{name}/fixed"
        self._parts, self._transport = tuple(parts), transport
        self._replica: Replica | None = None
        self._pieces = torch.zeros(0, device="cpu")

    @property
    def whole(self) -> Fixed:
        """Itself: what ``average`` makes alike."""
        return self

    def stand(self) -> Stand:
        """With a digest of names, types and shapes (``formed_alike``), and one of the values."""
        tensors = [part.find() for part in self._parts]
        forms = [(part.name, t.dtype, tuple(t.shape)) for part, t in zip(self._parts, tensors, strict=True)]
        form = hashlib.blake2b(str(forms).encode(), digest_size=DIGEST_BYTES).hexdigest()
        return Stand(f"{form} {digest_of(tensors)}")

    @torch.no_grad()
    def average(self, weight: float, together: OpenedTogether | None = None) -> Outcome:
        """Rounds over everybody, in which one peer has weight 1 and all others 0: its values are taken. What
        does not come stays as it is. Returns the last round's outcome.

        All peers of ``together`` (``None``: all that live) call this, or none. They wait for each other at
        the first call (``None``: as long as they do for a round).
        Raises ValueError: the crew has more seats than average all at once.
        """
        tensors = [part.find() for part in self._parts]
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        for stretches in _rounds(flat):
            replica = self._replica or self._opened(flat, together)
            for own, at, until, place in stretches:
                pieces = _pieces(own[at:until])
                self._pieces[place : place + len(pieces)] = pieces
            outcome = replica.average(weight)
            for own, at, until, place in stretches:
                own[at:until] = _joined(self._pieces[place:], own[at:until]).to(own.device)
        for tensor, own in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():  # then these are copies
                tensor.copy_(own.view(tensor.shape))
        return outcome

    def _opened(self, flat: Sequence[torch.Tensor], together: OpenedTogether | None) -> Replica:
        self._pieces = torch.zeros(min(ROUND_BYTES, sum(map(_room, flat))) // 2, device="cpu")
        part = Part("pieces of 16 bits", "all", lambda: self._pieces)
        replica = Replica([part], self._transport, direct, fp32, name=self.name, together=together)
        self._replica = replica
        return replica


def formed_alike(stands: Stands) -> bool:
    """Whether all peers have tensors of the same names, types and shapes."""
    return len({stand.digest.partition(" ")[0] for stand in stands.values()}) == 1


def _room(tensor: torch.Tensor) -> int:
    """Bytes, in whole steps."""
    return -(-tensor.numel() * tensor.element_size() // _STEP) * _STEP


def _rounds(flat: Sequence[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, int, int, int]]]:
    """For each round the stretches of vectors that go into it: the vector, from which to which of its values,
    and at which piece they begin.
    """
    stretches: list[tuple[torch.Tensor, int, int, int]] = []
    place = 0
    for own in flat:
        done = 0
        while done < _room(own):
            more = min(_room(own) - done, ROUND_BYTES - place)
            size = own.element_size()
            stretches.append((own, done // size, min(own.numel(), (done + more) // size), place // 2))
            done, place = done + more, place + more
            if place == ROUND_BYTES:
                yield stretches
                stretches, place = [], 0
    if stretches:
        yield stretches


def _pieces(values: torch.Tensor) -> torch.Tensor:
    """Their bytes, two in each float32 (of an odd number the last one has one)."""
    own = values.to("cpu").contiguous().view(torch.uint8)
    return torch.cat([own, own.new_zeros(len(own) % 2)]).view(torch.int16).float()


def _joined(pieces: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values whose bytes these are, as many as ``like`` has."""
    n_bytes = like.numel() * like.element_size()
    return pieces[: -(-n_bytes // 2)].to(torch.int16).view(torch.uint8)[:n_bytes].view(like.dtype)
