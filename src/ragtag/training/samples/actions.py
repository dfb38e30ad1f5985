"""What the pool of samples tells its caller to do next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """Draw this block now."""

    epoch: int
    block: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Post this, give its number to ``posted``, and ask again."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again soon: others have not answered yet."""


@dataclass(frozen=True, slots=True)
class Over:
    """All blocks are claimed, and one's own are used."""
