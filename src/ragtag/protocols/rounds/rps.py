"""RPS: averaging over a lossy network.

"Distributed Learning over Unreliable Networks", Yu, Tang, Renggli, Kassing, Singla, Alistarh, Zhang,
Liu, ICML 2019 (arXiv 1810.07766), algorithm 1. A block's owner divides by the weight that arrived, never by
n. A peer that does not get an average keeps its own values. Nothing is retransmitted, and what is late is
lost. Here the unit of loss is the datagram, not the block, and owners rotate (see ``rotating_owners``).
"""

from __future__ import annotations

from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.channel.averager import Averager, Setting
from ragtag.protocols.rounds.base import Round, Spec
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.reduce import scatter_gather


def _make(setting: Setting, repair: bool) -> Round:
    return scatter_gather(
        Spec(
            me=setting.me,
            channel=setting.channel,
            round=setting.round,
            layout=layout_of(setting.n_chunks, setting.n),
            owners=rotating_owners(setting.seed, setting.round, setting.n, setting.live),
            members=frozenset(range(setting.n)),
            codec=setting.codec,
            repair_s=setting.repair_s if repair else None,
            growth=setting.growth,
            scratch=setting.scratch,
            patience=setting.patience,
            guard=setting.guard,
            live=len(setting.live),
        )
    )


rps = at_once("rps", lambda setting: _make(setting, repair=False), guards=True, written="RPS()")
"""The paper's algorithm."""

rps_repair = at_once(
    "rps+repair", lambda setting: _make(setting, repair=True), guards=True, written="RPS(repair=True)"
)
"""Beyond the paper: holes are asked for again while the deadline allows."""


def RPS(repair: bool = False) -> Averager:
    """Average what arrives: what is lost or late is left out, and nobody waits for it (ICML 2019).

    repair: ask again for what is missing while the deadline allows.
    """
    return rps_repair if repair else rps
