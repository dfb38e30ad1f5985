"""Whether the peers of a run ended with the same model, and who is how far behind, in words."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from ragtag.app.terminal.words import counted, these_peers

SHOWN = 12
"""So many digits of a digest are shown."""
GROUPS_MAX = 4
"""So many different models are named."""


@dataclass(frozen=True, slots=True)
class Final:
    """What a peer ended with. digest: of its averaged state ("": not known); round: the last one that it
    averaged (-1: none).
    """

    digest: str
    round: int


def alike(finals: Mapping[int, Final]) -> str:
    """One line about the peers' final models; "" where fewer than two are known."""
    known = {peer: final for peer, final in finals.items() if _is_hex(final.digest)}
    if len(known) < 2:
        return ""
    groups: dict[str, list[int]] = {}
    for peer, final in sorted(known.items()):
        groups.setdefault(final.digest, []).append(peer)
    unknown = sorted(finals.keys() - known.keys())
    rest = f"; of {these_peers(unknown)} it is not known" if unknown else ""
    if len(groups) == 1:
        return f"{counted(len(known), 'peer')} hold the same model ({next(iter(groups))[:SHOWN]}){rest}"
    newest = max(final.round for final in finals.values())
    most = sorted(groups, key=lambda digest: (-len(groups[digest]), groups[digest]))
    parts = [_group(digest, groups[digest], known, newest) for digest in most[:GROUPS_MAX]]
    if more := sum(len(groups[digest]) for digest in most[GROUPS_MAX:]):
        parts.append(f"{counted(more, 'more peer')} {'holds another' if more == 1 else 'hold others'}")
    return f"replicas differ: {'; '.join(parts)}{rest}"


def _group(digest: str, peers: list[int], finals: Mapping[int, Final], newest: int) -> str:
    last = min(finals[peer].round for peer in peers)
    behind = ""
    if last < 0:
        behind = " (never averaged)"
    elif last < newest:
        behind = f" ({counted(newest - last, 'round')} behind)"
    return f"{these_peers(peers)} {'holds' if len(peers) == 1 else 'hold'} {digest[:SHOWN]}{behind}"


def _is_hex(text: str) -> bool:
    return bool(text) and set(text) <= set(string.hexdigits)
