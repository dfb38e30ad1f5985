"""K-FAC with a crew: what ``optim.kfac`` asks of other peers, by named tensors.

Factors are averaged, weighted by samples; bases are computed at one owner each and published; both by one
``NamedTensors``. Peers whose gradients the crew averages hold the same gradient and the same bases, so that
each preconditions for itself, and nothing more travels: KAISA's communication-optimal placement. Bases come
to peers at different moments, and these are to take the same steps: so all use one from the step on that
follows its publication. A peer that has it later is brought into step by comparisons of replicas.

With fewer workers to a layer, bases go to these alone, and preconditioned gradients to all others: by a
second average in each step, to which a layer's workers give its gradient and the others zeros. Each row of
that average carries how many workers' values are in it, by which it is divided. So a row is right whatever
was lost, and wherever peers that see different crews have placed a layer. A row in which no worker is has
not come, and the step is taken with that part of the gradient as it was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DenseName, fp32
from ragtag.core.types import Outcome
from ragtag.optim.kfac.communicator import Basis, FactorRound, Needs
from ragtag.optim.kfac.placement import LayerSize, kaisa
from ragtag.protocols.channel.averager import Averager
from ragtag.training.named import NamedTensors, Newest
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.transport import PublishingTransport

Placement = Literal["communication", "memory"] | float
"""How many peers precondition a layer's gradient: all, one, or a share of them."""
COMING_MAX = 4
"""Versions of one basis that wait for their step; of more the oldest is passed over."""
AHEAD_MAX = 2
"""A peer in step with others has no basis for a step further ahead: they are in its step, or in the next."""
STAMPS = 2
"""Values before a basis (see ``_Coming``)."""
STEPS_MAX = 1 << 24
"""What is stamped is float32: steps go modulo this."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A basis with its stamps.

    begin: the step from which on all use it.
    late: how many averages its factors were behind when it was published.
    """

    newest: Newest
    begin: int
    late: int


class CrewCommunicator:
    """A ``Communicator`` of one K-FAC on a crew's transport.

    placement: "communication" (all peers are workers of all layers), "memory" (one is), or a share between.
    alike: whether all peers take the same steps, by gradients that they have averaged.
    averager: of factors, and of gradients. codec: how factors and bases travel.
    The others: as for ``NamedTensors``.

    Raises ValueError: the placement is none.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        name: str,
        needs: Needs,
        *,
        placement: Placement = "communication",
        alike: bool = True,
        averager: Averager | str | None = None,
        codec: Codec | DenseName | None = None,
        seed: int = 0,
        founded: int | None = None,
        away: Callable[[int], bool] = lambda channel: False,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._needs = transport, needs
        self._share, self._alike = share_of(placement), alike
        self._used: dict[str, _Coming] = {}
        self._coming: dict[str, deque[_Coming]] = {name: deque(maxlen=COMING_MAX) for name in needs.computed}
        self._looked: dict[str, tuple[int, int]] = {}
        self.tensors = NamedTensors(
            transport,
            name,
            needs.averaged,
            {name: example.new_zeros(example.numel() + STAMPS) for name, example in needs.computed.items()},
            method=averager,
            codec=codec,
            seed=seed,
            settings=f"{needs.settings}, placement {placement}",
            founded=founded,
            away=away,
            on_outcome=on_outcome,
            on_publish=on_publish,
        )
        self._rows = Rows(needs.layers, fp32.elements)
        self._gradients: NamedTensors | None = None
        self._seen: frozenset[int] = frozenset()
        self._work: frozenset[str] = frozenset(needs.layers)
        self._standing_in: frozenset[str] = frozenset()
        if self._share < 1:
            self._gradients = NamedTensors(
                transport,
                f"{name}/gradients",
                {"rows": self._rows.shape},
                method=averager,
                seed=seed,
                away=away,
            )
            self._place()

    # -- Factors and bases

    def average(self, values: Mapping[str, Tensor], weight: float) -> FactorRound:
        """Begin an average of all factors."""
        return self.tensors.average(values, weight)

    def mine(self) -> list[str]:
        """The bases that this peer owns, and those for whose silent owner it stands in."""
        names = self.tensors.mine(self._needs.costs)
        owners = self.tensors.owners(self._needs.costs)
        stood_in = {name for name in names if owners[name].first != self._transport.me}
        self._standing_in = frozenset(
            layer for layer, bases in self._needs.bases.items() if not stood_in.isdisjoint(bases)
        )
        return names

    def publish(self, values: Mapping[str, Tensor], late: int, step: int) -> None:
        """Have all take these; waits for nobody."""
        stamps = torch.tensor([float((step + 1) % STEPS_MAX), float(min(late, STEPS_MAX))])
        self.tensors.publish(
            {
                name: torch.cat([stamps.to(one.device), one.reshape(-1).float()])
                for name, one in values.items()
            }
        )

    def newest(self, name: str, step: int) -> Basis | None:
        """The newest that is to be used at a step; never waits."""
        came, coming = self.tensors.newest(name), self._coming[name]
        if came is not None and self._looked.get(name) != (came.version, came.peer):
            self._looked[name] = came.version, came.peer
            begin, late = map(int, came.tensor[:STAMPS].tolist())
            coming.append(_Coming(came, _nearest(begin, step), late))
        while coming and not (self._alike and step < coming[0].begin <= step + AHEAD_MAX):
            self._used[name] = coming.popleft()
        used = self._used.get(name)
        if used is None:
            return None
        form = self._needs.computed[name].shape
        age = max(0, self.tensors.clock - used.newest.version) + used.late
        return Basis(used.newest.tensor[STAMPS:].reshape(form), age)

    # -- Gradients

    def works_on(self) -> Collection[str]:
        """The layers that are placed here, and those of a silent owner that this peer stands in for."""
        if self._gradients is not None and self._transport.live != self._seen:
            self._place()
        return self._work | self._standing_in

    def _place(self) -> None:
        """Whom layers belong to follows from the agreed view; this peer takes the bases that it needs now."""
        self._seen, me = self._transport.live, self._transport.me
        plan = kaisa(self._needs.layers, self._seen, fraction=self._share)
        self._work = frozenset(layer for layer, one in plan.items() if me in one.workers)
        owners = self.tensors.owners(self._needs.costs)
        wanted = {name for name, pair in owners.items() if me in pair}
        wanted.update(basis for layer in self._work for basis in self._needs.bases[layer])
        self.tensors.only(sorted(wanted))

    def share(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Give and take preconditioned gradients; where all are workers, there is nothing to."""
        if self._gradients is None:
            return own
        mean = self._gradients.average({"rows": self._rows.filled(own)}).result()
        return {**self._rows.read(mean["rows"]), **own}


class Rows:
    """The gradients of layers as rows of ``elements`` values, as many as a chunk has.

    layers: how large each is. A row's first value says how often the others are in it.
    """

    def __init__(self, layers: Mapping[str, LayerSize], elements: int) -> None:
        self._spans: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        at = 0
        for name, one in layers.items():
            shape = (one.g, one.a) if one.groups == 1 else (one.groups, one.g, one.a)
            rows = -(-math.prod(shape) // (elements - 1))
            self._spans[name] = at, at + rows, shape
            at += rows
        self.shape = (at, elements)

    def filled(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Rows with these gradients, once each, and zeros for other layers."""
        rows = torch.zeros(self.shape)
        for name, gradient in gradients.items():
            first, end, _ = self._spans[name]
            values = torch.zeros((end - first) * (self.shape[1] - 1))
            values[: gradient.numel()] = gradient.detach().reshape(-1).to("cpu", torch.float32)
            rows[first:end, 0] = 1.0
            rows[first:end, 1:] = values.reshape(end - first, -1)
        return rows

    def read(self, mean: Tensor) -> dict[str, Tensor]:
        """The gradients of those layers of which somebody has given a row; NaN in rows that nobody has."""
        found = {}
        for name, (first, end, shape) in self._spans.items():
            rows = mean[first:end]
            given = rows[:, :1] > 0
            if bool(given.any()):
                flat = torch.where(given, rows[:, 1:] / rows[:, :1], math.nan).reshape(-1)
                found[name] = flat[: math.prod(shape)].reshape(shape)
        return found


def _nearest(stamp: int, step: int) -> int:
    """The number nearest to a step that is stamped so."""
    half = STEPS_MAX // 2
    return step + (stamp - step + half) % STEPS_MAX - half


def share_of(placement: Placement) -> float:
    """The share of the peers that are workers of one layer; 0: one of them.

    Raises ValueError: it is no placement.
    """
    named = {"communication": 1.0, "memory": 1e-9}
    if isinstance(placement, str) and placement in named:
        return named[placement]
    if isinstance(placement, int | float) and not isinstance(placement, bool) and 0 < placement <= 1:
        return float(placement)
    raise ValueError(
        f'K-FAC: placement is {placement!r}; give "communication", "memory", or a share of the peers'
    )


def averages_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all peers take the same steps with it."""
    return isinstance(optimizer, CrewOptimizer) and optimizer._averaged.averages_gradients


def require_gradients(placement: Placement, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where peers would take each other's gradients that are not of one mean."""
    if share_of(placement) < 1 and not averages_gradients(optimizer):
        raise ValueError(
            f"K-FAC: with placement {placement!r} peers take preconditioned gradients from each other, which "
            'is for gradients that all of them average: crew.optimizer(..., average="gradients") by '
            'ragtag.RPS() or ragtag.AllReduce(); else give placement="communication"'
        )
