"""What an exchange is: how one peer's part of a model goes through a round, and what is done around it.

``dense`` and ``sparse`` exchange with the crew. Layers go around one of them, each an exchange itself: outer
steps, a slow peer's turn, replicas that are kept alike. A layer adds what is its own and hands on the rest,
so an optimizer knows neither how many there are nor which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from ragtag.core.types import Outcome, PeerId
from ragtag.training.tensors.bucket import Bucket


class Exchange(Protocol):
    """What an optimizer does with what it averages, in each round."""

    @property
    def bucket(self) -> Bucket:
        """The tensors that are averaged, and their table."""
        ...

    @property
    def kept(self) -> bool:
        """Whether something of this peer's is in no average yet, and is offered again."""
        ...

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round, in place. Where no average came, own values stay.

        weight: how much this peer counts; 0: it takes and gives nothing.
        deadline_s: bounds the round; by default its bound comes from measurement.
        aside: peers that it does not wait for.
        Raises NotFinite, naming the tensor, before anything is sent, when a value is NaN or infinite.
        """
        ...

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Any:
        """The first half of ``average``: what ``end`` takes; an Outcome where the round is over already."""
        ...

    def end(self, begun: Any) -> Outcome:
        """The second half: wait, and take the average over."""
        ...

    def stepped(self, outcome: Outcome) -> None:
        """The step by an average has been taken."""
        ...

    def forget(self) -> None:
        """The model has come from elsewhere: what was gathered here is of none."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, by layer."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave; what is of a layer that there is not here is passed over.

        Raises ValueError, naming what does not fit first; that layer has not changed then.
        """
        ...


class Layer:
    """An exchange around another one; it hands everything on."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    @property
    def bucket(self) -> Bucket:
        """See ``Exchange``."""
        return self.inner.bucket

    @property
    def kept(self) -> bool:
        """See ``Exchange``."""
        return self.inner.kept

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """See ``Exchange``."""
        return self.inner.average(weight, deadline_s, aside)

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Any:
        """See ``Exchange``."""
        return self.inner.begin(weight, deadline_s, aside)

    def end(self, begun: Any) -> Outcome:
        """See ``Exchange``."""
        return self.inner.end(begun)

    def stepped(self, outcome: Outcome) -> None:
        """See ``Exchange``."""
        self.inner.stepped(outcome)

    def forget(self) -> None:
        """See ``Exchange``."""
        self.inner.forget()

    def state_dict(self) -> dict[str, Any]:
        """See ``Exchange``."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Exchange``."""
        self.inner.load_state_dict(state)


E = TypeVar("E")


def layer(exchange: Exchange | None, kind: type[E]) -> E | None:
    """The layer of a kind, or the exchange at the bottom; ``None``: there is none."""
    while exchange is not None:
        if isinstance(exchange, kind):
            return exchange
        exchange = exchange.inner if isinstance(exchange, Layer) else None
    return None
