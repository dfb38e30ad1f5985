"""Which round's snapshot a newcomer asks for, and which of the offers it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ragtag.protocols.transfer.donor import Donor
from ragtag.protocols.transfer.types import CHUNK_BYTES_MAX, CHUNKS_MAX, Need, Offer

_ROUNDS_MAX = 1e6
_LATE_SHARE = 0.9
"""Where asking takes more than a tenth of a round, the round under way is left out."""


def round_to_ask(now_s: float, told: Sequence[tuple[float, Donor]]) -> int:
    """The first round that no donor will have finished when it is asked.

    told: donors, and when each said how far it is. Where rounds are shorter than asking takes, the round is
    a multiple of a power of two as large as the margin, so that newcomers that come together ask for the same
    one and donors take one snapshot for all.
    """
    asking_s = max(donor.answer_s for _, donor in told)

    def newest(at_s: float) -> float:
        return max(donor.round + _rounds(at_s - told_s, donor) for told_s, donor in told)

    first = max(0, math.floor(newest(now_s + asking_s) + _LATE_SHARE) + 1)
    step = 1 << max(0, first - math.floor(newest(now_s)) - 1).bit_length()
    return -(-first // step) * step


def _rounds(took_s: float, donor: Donor) -> float:
    """How many rounds a donor does in so much time, as far as is known; bounded, whatever it says."""
    return min(took_s / donor.round_s, _ROUNDS_MAX) if donor.round_s > 0 else 0.0


def choose(offers: Sequence[Offer], asked: int) -> Offer | None:
    """The snapshot that most donors have; of equals that of the round asked for, else the newest."""
    groups = Counter((offer.round, offer.layout) for offer in offers)
    if not groups:
        return None
    best = max(groups, key=lambda key: (groups[key], key[0] == asked, key))
    return next(offer for offer in offers if (offer.round, offer.layout) == best)


def objection(offer: Offer, need: Need) -> str:
    """Why an offer cannot be taken, by itself (empty: it can)."""
    if offer.schema != need.schema:
        return (
            f"has another model (schema {offer.schema:016x}, here {need.schema:016x}); start this peer with "
            "the crew's model, optimiser and version of the script"
        )
    if not 1 <= offer.total_bytes <= need.blob_bytes_max:
        return (
            f"offers a state of {offer.total_bytes} bytes, where at most {need.blob_bytes_max} are taken "
            "(blob_bytes_max)"
        )
    if not 1 <= offer.chunk_bytes <= CHUNK_BYTES_MAX or offer.n_chunks > CHUNKS_MAX:
        return f"offers {offer.total_bytes} bytes in chunks of {offer.chunk_bytes}, which makes no sense"
    return ""
