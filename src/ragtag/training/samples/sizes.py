"""Batches whose size follows each peer's measured speed, so that all come to an average at about one time.

"Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments", Chen, Weng, Wang,
Li, Li, SoCC 2020 (arXiv 1806.02508; LB-BSP): sizes follow speeds at the barriers, their sum unchanged. Here
each peer finds its own from what all post, with no agreement: nobody waits for anybody's, and averages
weighted by samples are right whatever the sizes are.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

from ragtag.core.channels import topic_of
from ragtag.core.types import PeerId
from ragtag.schedules.base import whole
from ragtag.schedules.grouping import plausible
from ragtag.training.transport import Peers

TOPICS = 16
"""Topics of the notice board for speeds: more splits share them in turn."""
MOST = 4
"""By default a batch is at most so many times the loader's,"""
GRAINS = 8
"""and made of grains, of which the loader's has so many."""
NEWS = 0.05
"""A speed is posted again once it has changed by this share."""
STAY = 0.75
"""A size stays until it is off by so many grains: else it would go to and fro."""
_WINDOW = 9
_POST = struct.Struct("<Bd")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """``crew.split(loader, sizes=ragtag.BatchSizes())``: the loader's batch size is the mean over peers.

    least, most: samples in a batch of any peer; by default a grain, and four times the loader's.
    grain: sizes are multiples of it, and so are the blocks of the pool; by default an eighth of the loader's
        size.

    The last batches of an epoch may be smaller. Give the optimizer ``weight="samples"``.
    Raises ValueError: one is below 1, or ``least`` above ``most``.
    """

    least: int | None = None
    most: int | None = None
    grain: int | None = None

    def __post_init__(self) -> None:
        for name in ("least", "most", "grain"):
            if (value := getattr(self, name)) is not None:
                whole(f"batch sizes: {name}", value, 1, "samples")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"batch sizes: least {self.least}, most {self.most}")

    def bounds(self, batch: int) -> tuple[int, int, int]:
        """The grain, and the least and most grains of a batch, for a loader with this batch size.

        Raises ValueError: no multiple of the grain lies between ``least`` and ``most``.
        """
        grain = max(1, batch // GRAINS) if self.grain is None else self.grain
        least = 1 if self.least is None else -(-self.least // grain)
        most = max(least, MOST * batch // grain) if self.most is None else self.most // grain
        if most < least:
            raise ValueError(
                f"batch sizes: no multiple of the grain, {grain}, is {self.least or 1} to {self.most}"
            )
        return grain, least, most


def share(
    step_s: dict[PeerId, float], me: PeerId, batch: int, grain: int, bounds: tuple[int, int], now: int
) -> int:
    """How many grains this peer's batch has.

    step_s: seconds per sample of the peers that are known.
    now: its grains until now.
    """
    if me not in step_s:
        return now
    mean = math.fsum(1 / s for s in step_s.values()) / len(step_s)
    want = batch / grain / step_s[me] / mean
    grains = now if abs(want - now) < STAY else round(want)
    return min(bounds[1], max(bounds[0], grains))


class Sizer:
    """One peer's batch size.

    busy_s: how long this peer has computed since the start, less waits; it grows with each step. topic: of
    the notice board.
    """

    def __init__(
        self, peers: Peers, asked: BatchSizes, batch: int, busy_s: Callable[[], float], ordinal: int = 0
    ) -> None:
        self._peers, self._batch, self._busy_s = peers, batch, busy_s
        self._topic = topic_of(f"split {ordinal % TOPICS}/speeds")
        self.grain, *bounds = asked.bounds(batch)
        self._bounds = bounds[0], bounds[1]
        self.grains = min(bounds[1], max(bounds[0], round(batch / self.grain)))
        """How many grains the next batch has."""
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._seen_s: float | None = None
        self._samples = 0
        self._posted_s = 0.0

    def handed(self, samples: int) -> None:
        """A batch is handed out; what was computed since the last one was on those before."""
        busy_s = self._busy_s()
        if self._samples and busy_s > 0 and busy_s != self._seen_s:
            if self._seen_s is not None:  # the first is of an unknown number of samples
                self._took_s.append((busy_s - self._seen_s) / self._samples)
                self._post()
            self._seen_s, self._samples = busy_s, 0
        self._samples += samples

    def size(self) -> int:
        """Samples of the next batch."""
        self.grains = share(
            self._speeds(), self._peers.me, self._batch, self.grain, self._bounds, self.grains
        )
        return self.grains * self.grain

    def _post(self) -> None:
        now_s = median_low(self._took_s)
        if now_s > 0 and abs(now_s - self._posted_s) > NEWS * self._posted_s:
            self._posted_s = now_s
            self._peers.post_soon(self._topic, _POST.pack(_VERSION, now_s))

    def _speeds(self) -> dict[PeerId, float]:
        """Seconds per sample, of peers that post and answer and are believed."""
        notices = self._peers.notices(self._topic)
        told = {
            peer: s
            for peer, posted in notices.posts.items()
            if peer not in notices.silent and (s := _decode(posted.blob)) is not None
        }
        if self._posted_s:
            told[self._peers.me] = self._posted_s
        return plausible(told)[0] if len(told) > 2 else told


def _decode(blob: bytes) -> float | None:
    """Seconds per sample, as posted; ``None``: it is of another version, or none that can be."""
    if len(blob) != _POST.size:
        return None
    version, s = _POST.unpack(blob)
    return float(s) if version == _VERSION and s > 0 and math.isfinite(s) else None
