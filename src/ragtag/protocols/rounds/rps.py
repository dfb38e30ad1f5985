"""RPS: averaging over a lossy network.

"Distributed Learning over Unreliable Networks", Yu, Tang, Renggli, Kassing, Singla, Alistarh, Zhang,
Liu, ICML 2019 (arXiv 1810.07766), algorithm 1. A block's owner divides by the weight that arrived, never by
n. A peer that does not get an average keeps its own values. Nothing is retransmitted, and what is late is
lost. Here the unit of loss is the datagram, not the block, and owners rotate (see ``rotating_owners``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ragtag.core import seed as random
from ragtag.core.types import PEERS_MAX
from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.channel.averager import Averager, Setting, is_planned
from ragtag.protocols.rounds.base import Round, Spec
from ragtag.protocols.rounds.hadamard import SIZE_MAX, Hadamard
from ragtag.protocols.rounds.layout import layout_of, order_of, rotating_owners
from ragtag.protocols.rounds.reduce import scatter_gather


def _make(setting: Setting, repair: bool) -> Round:
    spec = Spec(
        me=setting.me,
        channel=setting.channel,
        round=setting.round,
        layout=layout_of(setting.n_chunks, setting.n),
        owners=rotating_owners(setting.seed, setting.round, setting.n, *setting.owning, setting.auxiliary),
        members=frozenset(range(setting.n)),
        codec=setting.codec,
        repair_s=setting.repair_s if repair else None,
        enough=setting.enough,
        growth=setting.growth,
        scratch=setting.scratch,
        patience=setting.patience,
        reordering=setting.reordering,
        guard=setting.guard,
        live=setting.n_giving,
        quorum=setting.quorum,
        spread=_spread(setting),
        auxiliary=setting.auxiliary,
    )
    if setting.shares:
        spec = setting.shared(spec, order_of(setting.seed, setting.round, len(setting.shares)))
    return scatter_gather(spec)


rps = at_once("rps", lambda setting: _make(setting, repair=False), guards=True, written="RPS()")
"""The paper's algorithm."""

rps_repair = at_once(
    "rps+repair", lambda setting: _make(setting, repair=True), guards=True, written="RPS(repair=True)"
)
"""Beyond the paper: holes are asked for again while the deadline allows."""


def RPS(
    repair: bool | float = False,
    quorum: int = 0,
    hadamard: int = 0,
    shares: Literal["equal", "measured"] = "equal",
) -> Averager:
    """Average what arrives: what is lost or late is left out, and nobody waits for it (ICML 2019).

    repair: ask again for what is missing, from when a message is under way until the deadline. A share from
        1.0 to 0: so much of each message is enough, and nobody waits for the repair of the rest (``True``:
        1.0). What is on its way for the first time is waited for all the same: without loss nothing is left
        out. The outcome says chunk by chunk what came. 0, ``False``: nothing is repaired.
    quorum: averages are of the values of so many peers, at least; where fewer gave, each keeps its own. Once
        so many are there, another is waited for only while that pays (``rounds.progress``). More than half of
        the crew: of a crew that a cut line parts, one side at most goes on averaging. 0: any number is
        enough. After Decoupled DiLoCo (Douillard et al., 2026, arXiv 2604.21428), without its central syncer:
        each owner of a block decides for its block. With ``Outer(delay=...)`` or ``overlap=True`` no step
        waits for an average: it is taken over at the first step at which it is there.
    hadamard: mix so many chunks, a power of two (64 serves well), by a randomised Hadamard transform, so that
        a burst of loss harms all of a model a little, and no part of it much (``rounds.hadamard``). The
        squared error stays the same; where it falls changes. 0: chunks are sent as they are.
    shares: "measured": each peer owns as much as its measured line is good for (``channel.shares``). Of what
        is lost an owner's own copy never is, so a peer with a larger share counts for a little more.
    Raises ValueError: ``repair`` is no share; a quorum of 1, or of more peers than average at once;
        ``hadamard`` is no power of two from 2 to 1,024; there are no such ``shares``.
    """
    if not isinstance(repair, bool | int | float) or not 0.0 <= repair <= 1.0:
        raise ValueError(
            f"RPS(repair={repair!r}): a share of each message that is enough, from 1.0 to 0, or True: all"
        )
    enough = float(repair) or 1.0
    averager = rps_repair if repair else rps
    asked, said = ["repair=True"] if repair else [], [averager.name]
    if enough < 1.0:
        asked, said = [f"repair={enough:g}"], [averager.name, f"to {enough:g}"]
    if (
        isinstance(quorum, bool)
        or not isinstance(quorum, int)
        or not (quorum == 0 or 2 <= quorum <= PEERS_MAX)
    ):
        raise ValueError(
            f"RPS(quorum={quorum!r}): it is a number of peers, from 2 to {PEERS_MAX}, or 0: any number"
        )
    whole = isinstance(hadamard, int) and not isinstance(hadamard, bool)
    if not whole or (hadamard != 0 and not (2 <= hadamard <= SIZE_MAX and hadamard.bit_count() == 1)):
        raise ValueError(
            f"RPS(hadamard={hadamard!r}): it is how many chunks are mixed, a power of two from 2 to "
            f"{SIZE_MAX}, or 0: none"
        )
    if quorum:
        asked.append(f"quorum={quorum}")
        said.append(f"quorum {quorum}")
    if hadamard:
        asked.append(f"hadamard={hadamard}")
        said.append(f"Hadamard {hadamard}")
    if is_planned(shares):
        asked.append('shares="measured"')
        said.append("measured shares")
    if len(said) == 1:
        return averager
    written, planned = f"RPS({', '.join(asked)})", is_planned(shares)
    return replace(
        averager,
        name=", ".join(said),
        quorum=quorum,
        hadamard=hadamard,
        planned=planned,
        written=written,
        enough=enough,
    )


def _spread(setting: Setting) -> Hadamard | None:
    """The round's transform: its signs are drawn by the crew's seed, the channel and the round."""
    if not setting.hadamard:
        return None
    key = random.stream_key(setting.seed, "hadamard", setting.channel, setting.round)
    return Hadamard(key, setting.n_chunks, setting.codec.elements, setting.hadamard, setting.edges)
