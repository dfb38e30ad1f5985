"""Which machine averages a channel: a value that a node is configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ragtag.codecs.base import Codec
from ragtag.core.types import Floats, PeerId
from ragtag.protocols.base import Round


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method needs to make the machine of one round.

    live: the peers that own blocks, as far as this one knows; present: those that have not left for good.
    growth: of ``n`` since the crew was founded (``base.Spec``).
    scratch: float32 ``[n_chunks, elements]``, memory of an old round that this one may use for its mean.
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


class Method(NamedTuple):
    """How a channel's rounds are done.

    patience: how many times the measured budget a round may take. Lossy methods take 1; a method
    that repairs what is lost stands by longer, as its name promises.
    """

    name: str
    make: Callable[[Setting], Round]
    patience: float = 1.0
