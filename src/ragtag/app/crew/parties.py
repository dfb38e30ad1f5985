"""Peers that do not agree: the larger party goes on without the others, the others end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ragtag.core.types import PeerId


def outvoted_by(mine: Hashable, theirs: Mapping[PeerId, Hashable]) -> list[PeerId]:
    """The largest party that differs from this peer, if that is no smaller than this peer's own.

    mine, theirs: what each peer says; equal ones are of one party. Empty: this peer goes on, without those
    that differ. So of a tie both sides end.
    """
    parties: dict[Hashable, list[PeerId]] = {}
    for peer, said in theirs.items():
        parties.setdefault(said, []).append(peer)
    agreeing = 1 + len(parties.pop(mine, []))
    largest = max(parties.values(), key=len, default=[])
    return largest if len(largest) >= agreeing else []
