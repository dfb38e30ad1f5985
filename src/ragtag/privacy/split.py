"""Split learning: a net is cut, clients keep the first layers and the data, a server trains the rest.

Vepakomma, Gupta, Swedish, Raskar, "Split learning for health" (arXiv 1812.00564). Forward, a batch's
codes Z go up to the server; backward, their gradients come down. In the plain form labels go up with Z.
In the U-shaped form they stay: the last layers are the client's, too, so what the server makes of Z comes
down, and its gradient goes up. ``SplitModel`` does one such turn in one process: what crosses the cut is
detached from what computed it, and counted; gradients end in both parts as if the net were whole, so any
optimizers, one for each part or one for all, take the step. Several clients are several such models with
one ``middle``; they either have weights of their own below the cut, or hand them on (``hand_over``).

What an epoch sends, in values, after Singh et al., "Detailed comparison of communication efficiency of
split learning and federated learning" (arXiv 1909.09145), for K clients, N parameters, p samples in all,
cut width q and the share of parameters below the cut:

    federated averaging    2 K N          split    2 p q (+ share K N where clients hand weights on)
    large-batch SGD        2 N a client and step

Split sends less than federated averaging from K = p q / N clients on (without weights handed on).

A server sees codes and gradients, and labels in the plain form. NoPeek lowers what codes tell by some
(``ragtag.privacy.meters``); a server that sends gradients of its own choice is stopped by nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ragtag.privacy.correlation import distance_correlation

VALUE_BYTES = 4
Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class SplitTraffic:
    """What has crossed a cut: payload, without headers.

    up_bytes, down_bytes: activations and gradients, from the client and to it.
    label_bytes: labels, from the client; 0 in the U-shaped form.
    messages: in both directions; labels go along with codes.
    """

    up_bytes: int = 0
    down_bytes: int = 0
    label_bytes: int = 0
    messages: int = 0

    @property
    def bytes(self) -> int:
        """Activations and gradients: what the formula ``2 p q`` counts."""
        return self.up_bytes + self.down_bytes


class SplitModel:
    """One client's turn with a server, in one process.

    front: the client's first layers.
    middle: the server's.
    back: the client's last layers (the U-shaped form); ``None``: the server has them, and gets the labels.
    criterion: of outputs and labels, a scalar.
    nopeek: the weight a1 of the distance correlation of a batch with its codes, which the client computes.

    Raises ValueError: ``nopeek`` is below 0.
    """

    def __init__(
        self,
        front: nn.Module,
        middle: nn.Module,
        back: nn.Module | None = None,
        *,
        criterion: Criterion = nn.functional.cross_entropy,
        nopeek: float = 0.0,
    ) -> None:
        if not nopeek >= 0:
            raise ValueError(f"SplitModel: nopeek is {nopeek}; it must be 0 or more")
        self.front, self.middle, self.back = front, middle, back
        self._criterion, self._nopeek = criterion, nopeek
        self.traffic = SplitTraffic()

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """A batch forward and backward; gradients are added to both parts' ``.grad``, as ``backward`` does.

        x: the batch ``[n, ...]``. y: its labels ``[n, ...]``.
        Returns the task's loss, a scalar, without NoPeek's term.
        """
        codes = self.front(x)
        seen = self._crosses(codes, up=True)
        made = self.middle(seen)
        if self.back is None:
            self.traffic.label_bytes += y.nbytes
            loss = self._criterion(made, y)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            given = self._crosses(made, up=False)
            loss = self._criterion(self.back(given), y)
            loss.backward()  # type: ignore[no-untyped-call]
            made.backward(self._crosses(_gradient(given), up=True))
        down = self._crosses(_gradient(seen), up=False)
        ends, gradients = [codes], [down.detach()]
        if self._nopeek:
            term = self._nopeek * distance_correlation(x, codes)
            ends, gradients = [*ends, term], [*gradients, torch.ones_like(term)]
        if any(end.requires_grad for end in ends):  # a front without parameters has nothing to learn
            torch.autograd.backward(ends, gradients)
        return loss.detach()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Outputs for a batch; what crosses is not counted."""
        made: Tensor = self.middle(self.front(x))
        return made if self.back is None else self.back(made)

    def _crosses(self, values: Tensor, *, up: bool) -> Tensor:
        """A copy that nothing but its values connects with where they come from."""
        traffic = self.traffic
        traffic.messages += 1
        if up:
            traffic.up_bytes += values.nbytes
        else:
            traffic.down_bytes += values.nbytes
        return values.detach().clone().requires_grad_()


def hand_over(giver: nn.Module, taker: nn.Module) -> int:
    """The next client begins with the weights below the cut of the one before it, and with its buffers.

    Returns what that sends: the bytes of parameters and buffers.
    Raises RuntimeError: the modules differ.
    """
    state = giver.state_dict()
    taker.load_state_dict(state)
    return sum(value.nbytes for value in state.values())


def federated_bytes(clients: int, parameters: int) -> int:
    """Of an epoch of federated averaging, one average in it: each client's model up, the mean down."""
    return 2 * clients * parameters * VALUE_BYTES


def split_bytes(
    samples: int, width: int, *, clients: int = 0, parameters: int = 0, share: float = 0.0
) -> float:
    """Of an epoch of split learning: codes up and gradients down, and weights from client to client.

    samples: of all clients together.
    width: values of a sample's code.
    share: of ``parameters``, how many lie below the cut; 0: clients do not hand weights on.
    """
    return (2 * samples * width + share * clients * parameters) * VALUE_BYTES


def large_batch_bytes(steps: int, parameters: int) -> int:
    """Of one client in so many steps of synchronous SGD: its gradient up, the new model down."""
    return 2 * steps * parameters * VALUE_BYTES


def crossover_clients(samples: int, width: int, parameters: int) -> float:
    """From so many clients on an epoch of split learning sends less than one of federated averaging."""
    return samples * width / parameters


def _gradient(values: Tensor) -> Tensor:
    return torch.zeros_like(values) if values.grad is None else values.grad
