"""RPS: averaging over a lossy network.

"Distributed Learning over Unreliable Networks", Yu, Tang, Renggli, Kassing, Singla, Alistarh, Zhang,
Liu, ICML 2019 (arXiv 1810.07766), algorithm 1. A block's owner divides by the weight that arrived, never by
n. A peer that does not get an average keeps its own values. Nothing is retransmitted, and what is late is
lost. Here the unit of loss is the datagram, not the block, and owners rotate (see ``rotating_owners``).
"""

from __future__ import annotations

from dataclasses import replace

from ragtag.core.types import PEERS_MAX
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
            owners=rotating_owners(
                setting.seed, setting.round, setting.n, setting.live, setting.present, setting.auxiliary
            ),
            members=frozenset(range(setting.n)),
            codec=setting.codec,
            repair_s=setting.repair_s if repair else None,
            growth=setting.growth,
            scratch=setting.scratch,
            patience=setting.patience,
            guard=setting.guard,
            live=setting.n_giving,
            quorum=setting.quorum,
            auxiliary=setting.auxiliary,
        )
    )


rps = at_once("rps", lambda setting: _make(setting, repair=False), guards=True, written="RPS()")
"""The paper's algorithm."""

rps_repair = at_once(
    "rps+repair", lambda setting: _make(setting, repair=True), guards=True, written="RPS(repair=True)"
)
"""Beyond the paper: holes are asked for again while the deadline allows."""


def RPS(repair: bool = False, quorum: int = 0) -> Averager:
    """Average what arrives: what is lost or late is left out, and nobody waits for it (ICML 2019).

    repair: ask again for what is missing while the deadline allows.
    quorum: averages are of the values of so many peers, at least; where fewer gave, each keeps its own. Once
        so many are there, another is waited for only while that pays (``rounds.progress``). More than half of
        the crew: of a crew that a cut line parts, one side at most goes on averaging. 0: any number is
        enough. After Decoupled DiLoCo (Douillard et al., 2026, arXiv 2604.21428), without its central syncer:
        each owner of a block decides for its block.
    Raises ValueError: a quorum of 1, or of more peers than average at once.
    """
    averager = rps_repair if repair else rps
    if quorum == 0:
        return averager
    if isinstance(quorum, bool) or not isinstance(quorum, int) or not 2 <= quorum <= PEERS_MAX:
        raise ValueError(
            f"RPS(quorum={quorum!r}): it is a number of peers, from 2 to {PEERS_MAX}, or 0: any number"
        )
    asked = f"repair=True, quorum={quorum}" if repair else f"quorum={quorum}"
    return replace(averager, name=f"{averager.name}, quorum {quorum}", quorum=quorum, written=f"RPS({asked})")
