"""Which machine averages a channel: a value that a node is configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ragtag.codecs.base import Codec
from ragtag.core.types import PEERS_MAX, Effect, Event, Floats, PeerId
from ragtag.protocols.base import Round


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method needs to make the machine of one round.

    live: the peers that own blocks, as far as this one knows; present: those that have not left for good.
    growth: of ``n`` since the crew was founded (``base.Spec``).
    scratch: float32 ``[n_chunks, elements]``, memory of an old round that this one may use for its mean.
    earlier: the machines of the rounds before that still answer.
    """

    me: PeerId
    n: int
    seed: int
    channel: int
    round: int
    live: frozenset[PeerId]
    present: frozenset[PeerId]
    n_chunks: int
    codec: Codec
    repair_s: float
    growth: int = 0
    scratch: Floats | None = None
    earlier: tuple[Round, ...] = ()


@dataclass(frozen=True, slots=True)
class CrowdSetting:
    """What a method needs to make one peer's part in a crowd, for all rounds of a channel.

    peers: who is there, with this one. probe_s, rtt_s: measured times of one exchange of the whole vector,
    and of a round trip. reuse: as for ``lane.Channel``.
    """

    me: PeerId
    peers: frozenset[PeerId]
    seed: int
    channel: int
    codec: Codec
    n_chunks: int
    probe_s: float
    rtt_s: float
    reuse: bool = False


class Many(Protocol):
    """One peer's part in a crowd that averages in groups: rounds, matchmaking and deadlines are its own.

    done: the last round that is over; highest: the newest that was heard of; active: the one under way.
    """

    done: int
    highest: int
    active: int | None

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Average`` begins its next round, ``Done`` ends it."""
        ...

    def probed(self, probe_s: float) -> None:
        """One exchange of the whole vector takes this long."""
        ...


class Method(NamedTuple):
    """How a channel's rounds are done.

    patience: how many times the measured budget a round may take. Lossy methods take 1; a method
    that repairs what is lost stands by longer, as its name promises.
    crowd: for methods that average in groups, in place of ``make``.
    gathers: it takes ``Offer`` in place of ``Average``, and ``n_chunks`` is how many rows a peer may offer.
    seats_max: how many seats the crew may have; ``SEATS_MAX`` for those that average in groups.
    written: how a script asks for it, which is also its ``repr``.
    """

    name: str
    make: Callable[[Setting], Round]
    patience: float = 1.0
    crowd: Callable[[CrowdSetting], Many] | None = None
    gathers: bool = False
    seats_max: int = PEERS_MAX
    written: str = ""

    def __repr__(self) -> str:
        return self.written or f"Method({self.name!r})"


def no_round(setting: Setting) -> Round:
    """In place of ``make``, for a method whose crowd numbers its rounds itself."""
    raise RuntimeError(f"channel {setting.channel} averages in groups; its crowd makes the rounds")
