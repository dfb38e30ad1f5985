"""What K-FAC asks of other peers, and what that is where there are none.

``Communicator`` is a part of what ``crew.tensors`` gives; K-FAC itself knows neither peers nor rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragtag.optim.kfac.placement import LayerSize

Examples = Mapping[str, Tensor]
"""Named tensors of the shapes, and on the devices, of those that are to come."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one K-FAC asks for.

    averaged, computed: factors and bases by name.
    layers: how large each is, by name.
    bases: of each layer, the names of what its gradient is preconditioned by.
    settings: in words; the same on all peers, or their preconditioned gradients differ.
    """

    averaged: Examples
    computed: Examples
    layers: Mapping[str, LayerSize]
    bases: Mapping[str, tuple[str, ...]]
    settings: str


class FactorRound(Protocol):
    """An average under way."""

    @property
    def over(self) -> bool:
        """Whether ``result`` is there at once."""
        ...

    def result(self) -> Mapping[str, Tensor]:
        """Wait for its end, which its own deadline bounds. The means by name, without what nobody gave."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """A whole value of a computed tensor.

    tensor: not to be changed.
    age_rounds: how many averages of factors ended since that of which it was made, 0 or more.
    """

    tensor: Tensor
    age_rounds: int


class Communicator(Protocol):
    """Named tensors: factors that are averaged, and bases that an owner computes for all."""

    def require_in(self, asked: str) -> None:
        """Raise the crew's error, with what was asked for, where this peer has left it."""
        ...

    def taken(self) -> int | None:
        """The number of the newest step that all take together, the same at each; ``None``: each peer takes
        steps of its own.
        """
        ...

    def in_step(self) -> bool:
        """Whether peers wait for each other at each step, so that to wait for an average of factors costs
        little more. Else each goes on at its own pace, and takes the average once it is over.
        """
        ...

    def average(self, values: Mapping[str, Tensor], weight: float) -> FactorRound:
        """Begin an average of factors, each over the peers that give it.

        values: the factors that this peer gives. weight: how much they count.
        """
        ...

    def mine(self, step: int) -> list[str]:
        """Of all computed tensors, those that this peer is to compute at a step."""
        ...

    def publish(
        self, values: Mapping[str, Tensor], took_s: Mapping[str, float], late: int, step: int
    ) -> None:
        """At a step, have all take these, made of the factors of so many averages ago; waits for nobody.

        took_s: how long each of them took.
        """
        ...

    def newest(self, name: str, step: int) -> Basis | None:
        """What there is of a computed tensor to be used at a step; never waits."""
        ...

    def works_on(self) -> Collection[str]:
        """The layers whose gradients this peer is to precondition now."""
        ...

    def share(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Give preconditioned gradients to peers that do not make them, and take theirs.

        own: of layers that this peer works on, ``(g, a)``, or ``(groups, g, a)``. Returns own ones, and what
        came of other layers' within the deadline of one round, with NaN where nothing did. All peers call it
        in each step.
        """
        ...


class _Ended:
    over = True

    def __init__(self, values: Mapping[str, Tensor], on_taken: Callable[[], None]) -> None:
        self._values, self._on_taken = values, on_taken

    def result(self) -> Mapping[str, Tensor]:
        self._on_taken()
        return self._values


class OneProcess:
    """A ``Communicator`` without others: averages are its own values, and it computes everything."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._forms = {name: (example.shape, example.device) for name, example in needs.computed.items()}
        self._rounds = 0
        self._held: dict[str, tuple[Tensor, int]] = {}

    def require_in(self, asked: str) -> None:
        """There is no crew to leave."""

    def taken(self) -> None:
        """There are no others."""

    def in_step(self) -> bool:
        """There is nobody to wait for."""
        return True

    def average(self, values: Mapping[str, Tensor], weight: float) -> FactorRound:
        """Done at once; it counts when its result is taken, which is to be once."""
        return _Ended(values, self._count)

    def _count(self) -> None:
        self._rounds += 1

    def mine(self, step: int) -> list[str]:
        """All."""
        return list(self._forms)

    def works_on(self) -> Collection[str]:
        """All."""
        return self._needs.layers.keys()

    def share(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Its own."""
        return own

    def publish(
        self, values: Mapping[str, Tensor], took_s: Mapping[str, float], late: int, step: int
    ) -> None:
        """There at once."""
        self._held.update({name: (value, self._rounds - late) for name, value in values.items()})

    def newest(self, name: str, step: int) -> Basis | None:
        """What was published last."""
        held = self._held.get(name)
        return None if held is None else Basis(held[0], self._rounds - held[1])

    def state_dict(self) -> dict[str, object]:
        """What was published, with its ages in rounds."""
        values = {name: value.detach().cpu().clone() for name, (value, _) in self._held.items()}
        return {"values": values, "ages": {name: self._rounds - at for name, (_, at) in self._held.items()}}

    def load_state_dict(self, state: object, /) -> None:
        """Raises ValueError: a name, shape or age is not one that there can be; nothing has changed then."""
        values = state.get("values") if isinstance(state, dict) else None
        ages = state.get("ages") if isinstance(state, dict) else None
        if not isinstance(values, dict) or not isinstance(ages, dict) or values.keys() != ages.keys():
            raise ValueError("the state of K-FAC's decompositions has other parts than it should")
        for name, value in values.items():
            if name not in self._forms:
                raise ValueError(f"the state has a decomposition {name!r}, which there is not")
            shape = self._forms[name][0]
            if not isinstance(value, Tensor) or value.shape != shape or not torch.isfinite(value).all():
                raise ValueError(
                    f"the state's decomposition {name!r} is no finite tensor of shape {tuple(shape)}"
                )
            if type(ages[name]) is not int or ages[name] < 0:
                raise ValueError(f"the state's decomposition {name!r} has the age {ages[name]!r}")
        self._held = {
            name: (value.to(self._forms[name][1], copy=True), self._rounds - ages[name])
            for name, value in values.items()
        }
