"""What a crew's links do: a table by pairs, as measured and as kept in a run's folder (``links.json``)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.core.errors import Error
from ragtag.core.faults import Faults, Loss, OwnLine
from ragtag.core.types import SEATS_MAX, PeerId
from ragtag.training.state.atomic import write_whole

LINKS_FILE = "links.json"
BYTES_MAX = 1 << 24
"""A file of more is none of these."""


class LinksError(Error, ValueError):
    """There are no links to go by; the message says what to do."""


class LinkWay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction of a link.

    rate_bytes_per_s: what it delivers, headers of datagrams included, where its ends have nothing else to do.
    rtt_s: the shortest round trip.
    busy_rtt_s: the round trip while it was full: queues on the way, too.
    loss: the share of datagrams that is lost, far below this rate.
    """

    source: Annotated[int, Meta(ge=0, lt=SEATS_MAX)]
    dest: Annotated[int, Meta(ge=0, lt=SEATS_MAX)]
    rate_bytes_per_s: Annotated[float, Meta(gt=0.0, le=1e13)]
    rtt_s: Annotated[float, Meta(ge=0.0, le=1e3)]
    busy_rtt_s: Annotated[float, Meta(ge=0.0, le=1e3)]
    loss: Annotated[float, Meta(ge=0.0, lt=1.0)]


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Averages that the crew made to hold an estimate against.

    method: by this averager, in fp32.
    values: of so many values.
    seconds: the middle one took.
    """

    method: str
    values: Annotated[int, Meta(ge=1)]
    seconds: Annotated[float, Meta(gt=0.0)]


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was measured of a crew's links. peers: those that took part."""

    peers: tuple[Annotated[int, Meta(ge=0, lt=SEATS_MAX)], ...]
    ways: tuple[LinkWay, ...]
    tried: Tried | None = None

    def rate(self, peer: PeerId) -> float:
        """A peer's line, bytes per second: the slower of its ways out and in, each the best that was seen.

        Averages send to all at once, and wait for the last: a way that is so slow that its share of the line
        takes longer than the others' decides.
        """
        out = [way.rate_bytes_per_s for way in self.ways if way.source == peer]
        into = [way.rate_bytes_per_s for way in self.ways if way.dest == peer]
        return min(max(out), max(into), (len(self.peers) - 1) * min(out + into))

    def faults(self) -> Faults:
        """These links as the simulator has them: a rate and a delay for each peer, one loss for all.

        Round trips are those of busy ways: by these questions are repeated, and repairs asked for.
        """
        rtts_s = {
            peer: median(way.busy_rtt_s for way in self.ways if peer in (way.source, way.dest))
            for peer in self.peers
        }
        usual_s = median(rtts_s.values())
        lines = tuple(
            OwnLine(at, self.rate(peer), max(0.0, (rtts_s[peer] - usual_s) / 2))
            for at, peer in enumerate(self.peers)
        )
        lost = sum(way.loss for way in self.ways) / len(self.ways)
        slowest = min(line.rate_bytes_per_s for line in lines)
        loss = Loss(lost) if lost else None
        return Faults(loss=loss, latency_s=usual_s / 2, rate_bytes_per_s=slowest, lines=lines)


def write_links(links: Links, folder: Path) -> Path:
    """Keep them in a run's folder. Raises OSError."""
    path = folder / LINKS_FILE
    write_whole(path, [msgspec.json.encode(links), b"\n"], lasting=False)
    return path


def require_whole(links: Links) -> Links:
    """The same. Raises LinksError: a way between two of its peers is missing, or stands there twice."""
    ways = sorted((way.source, way.dest) for way in links.ways)
    wanted = sorted((a, b) for a in links.peers for b in links.peers if a != b)
    if len(links.peers) < 2:
        raise LinksError("these are links of one peer alone: a crew has two or more")
    if ways != wanted:
        odd = sorted(set(wanted) ^ set(ways)) or ways
        raise LinksError(f"the way from peer {odd[0][0]} to peer {odd[0][1]} is missing, or is there twice")
    return links


def read_links(folder: Path) -> Links | None:
    """What was measured in a run; ``None``: nothing was. Raises LinksError: the file is none, or broken."""
    path = folder / LINKS_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > BYTES_MAX:
            raise LinksError(f"it has more than {BYTES_MAX:,} bytes")
        return require_whole(msgspec.json.decode(path.read_bytes(), type=Links))
    except (msgspec.MsgspecError, UnicodeDecodeError, LinksError) as error:
        raise LinksError(
            f"{path} is no table of links ({error}); measure again: ragtag run -n 4 -m ragtag.app.probe.crew"
        ) from error
