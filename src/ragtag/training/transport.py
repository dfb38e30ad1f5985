"""What training needs of a network: the interface to a transport.

The live transport and the simulated one are made elsewhere; training knows neither.
"""

from __future__ import annotations

from typing import Protocol

from ragtag.codecs.base import Codec
from ragtag.core.schema import Schema
from ragtag.core.types import Bytes, Floats, OpenedTogether, Outcome, Publish
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.publish.channel import Publisher


class Pending(Protocol):
    """A round under way."""

    @property
    def over(self) -> bool:
        """Whether the round is done, so that ``wait`` returns at once."""
        ...

    def wait(self) -> Outcome:
        """Wait until the round is done; the round's own deadline bounds it."""
        ...


class Peers(Protocol):
    """The peers that take part, and their notice board."""

    @property
    def me(self) -> int:
        """This peer's number."""
        ...

    @property
    def n(self) -> int:
        """How many peers the crew has, dead or alive."""
        ...

    @property
    def may_grow(self) -> bool:
        """Whether peers may come to a crew that has but one."""
        ...

    @property
    def late(self) -> bool:
        """Whether the crew averaged before this peer came: it has to ``take_part`` on each channel, once (see
        ``state.abreast``).
        """
        ...

    @property
    def live(self) -> frozenset[int]:
        """The peers believed to take part now; always with this one."""
        ...

    @property
    def auxiliary(self) -> frozenset[int]:
        """The peers that average and compute nothing."""
        ...

    @property
    def clients(self) -> frozenset[int]:
        """The peers that compute and own nothing of what is averaged; this one may be among them."""
        ...

    def rates(self) -> dict[int, float]:
        """Bytes a second that the way to each peer delivers, as measured; those not measured are left out."""
        ...

    def post(self, topic: int, blob: bytes) -> int:
        """Put this peer's newest value of a topic on the notice board; at most 1,064 bytes.

        Returns the post's number, higher than that of every post that had come here before.
        """
        ...

    def post_soon(self, topic: int, blob: bytes) -> None:
        """The same, without waiting for the post's number."""
        ...

    def posts(self, topic: int) -> dict[int, bytes]:
        """Every peer's newest value of a topic, one's own included."""
        ...

    def notices(self, topic: int) -> Notices:
        """The same with numbers: which peers have acknowledged what, and which answer nothing."""
        ...

    def now_s(self) -> float:
        """The time, from whenever on; it never goes back."""
        ...

    def pause(self, for_s: float) -> None:
        """Do nothing for so long."""
        ...


class Transport(Peers, Protocol):
    """What a network gives to training."""

    def configure(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        *,
        together: OpenedTogether | None = None,
    ) -> None:
        """Open a channel: compare the schema with every peer's. together: all peers open it now, also those
        that came late; ``None``: one that comes late opens what the others have averaged on before.

        A round averages float32 ``[schema.n_chunks(codec.elements), codec.elements]``; of
        ``schema.fragments`` such parts that lie one after the other in a table, the round's (see ``Schema``).
        Raises SchemaMismatch, naming the first tensor that differs.
        """
        ...

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> Pending:
        """Begin the channel's next round with ``values``, float32 ``[fragments * n_chunks, elements]``.

        aside: peers that it does not wait for, since they are known to come to few rounds.
        due: the round that is due, where this peer can tell: none before it begins.
        number: of the round, where the caller numbers all of a channel.

        ``values`` may be the model's own memory: it does not change before ``wait`` returns, and does
        right afterwards. What a transport still has to send of it by then it copies, or drops.
        ``outcome.mean`` is not changed by the caller.
        """
        ...

    def heard_of(self, channel: int) -> int:
        """The newest round of a channel that anything has come of; -1: none."""
        ...

    def newer(self, channel: int) -> bool:
        """Whether others are known to have begun a round of a channel that this peer has not."""
        ...

    def goes_on_after(self, channel: int, round_: int) -> None:
        """From now on this peer begins no round of a channel up to this one: they went by without it, or are
        in the state that it was given.
        """
        ...

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        number: int = -1,
    ) -> Pending:
        """Begin the next round of a channel whose method gathers rows (see ``Outcome.gathered``).

        rows: uint8 ``[k, chunk_bytes]``, k at most ``schema.n_chunks(codec.elements)``; not changed any more.
        number: the round's, higher than the last one's; -1: the channel numbers its rounds. See ``Offer``.
        """
        ...


class PublishingTransport(Transport, Protocol):
    """A transport whose channels may also carry values that one peer publishes for all."""

    def publish(self, ask: Publish) -> None:
        """Have the channel's machine take this; it does not wait for any other peer."""
        ...

    def published(self, channel: int) -> tuple[Publisher, float]:
        """What a channel has brought (to be read only), and what time it is on its clock."""
        ...
