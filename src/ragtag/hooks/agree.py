"""Ranks make sure that they mean the same before they send: a short description each, gathered once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

DESCRIPTION_BYTES = 1024


def require_agreement(mine: Mapping[str, object], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare a description (JSON, at most 1,024 bytes) with every rank's.

    Raises ValueError on every rank, naming those that differ from most (from the lowest among equals).
    """
    data = json.dumps(mine, sort_keys=True).encode()
    if len(data) > DESCRIPTION_BYTES:
        raise ValueError(f"a description of {len(data)} bytes; at most {DESCRIPTION_BYTES} are compared")
    padded = torch.frombuffer(bytearray(data.ljust(DESCRIPTION_BYTES)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    texts = [bytes(row.cpu().numpy()).decode(errors="replace").strip() for row in gathered]
    most = Counter(texts).most_common(1)[0][0]
    if all(text == most for text in texts):
        return
    raise ValueError(
        "; ".join(_difference(rank, text, most) for rank, text in enumerate(texts) if text != most)
        + ". Make SparseState with the same options on every rank"
    )


def _difference(rank: int, theirs: str, most: str) -> str:
    try:
        other, usual = json.loads(theirs), json.loads(most)
    except ValueError:
        return f"rank {rank} sends what is no description of a sparse hook"
    keys = [key for key in usual if other.get(key) != usual[key]] or sorted(set(other) - set(usual))
    parts = [f"{key} {other.get(key)!r} where it is {usual.get(key)!r} elsewhere" for key in keys]
    return f"rank {rank} has " + ", ".join(parts)
