"""Numbers and peers in plain English, for what people read."""

from __future__ import annotations

from collections.abc import Iterable


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun: ``1 peer``, ``2 peers``. many: where it is not ``one`` with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def these_peers(numbers: Iterable[int]) -> str:
    """Which peers: ``peer 2``, ``peers 0 and 2``, ``peers 0 to 3, 5 and 7``."""
    stretches: list[list[int]] = []
    for number in sorted(set(numbers)):
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    parts: list[str] = []
    for stretch in stretches:
        if len(stretch) > 2:
            parts.append(f"{stretch[0]} to {stretch[-1]}")
        else:
            parts += map(str, stretch)
    if len(parts) > 1:
        parts = [", ".join(parts[:-1]) + f" and {parts[-1]}"]
    several = sum(map(len, stretches)) > 1
    return f"peer{'s' if several else ''} {''.join(parts)}" if parts else "no peer"
