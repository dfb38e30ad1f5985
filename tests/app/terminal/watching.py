"""Runs as a live view sees them."""

from __future__ import annotations

import heapq
import io
import math

from rich.console import Console

from ragtag.app.terminal.dashboard import Dashboard
from ragtag.app.terminal.peers import PeerTable
from ragtag.core import trace
from tests.app.synthetic import Story, crew_records, peer_records


def in_time(story: Story) -> list[trace.Record]:
    parts = [list(crew_records(story)), *(list(peer_records(story, p)) for p in range(story.peers))]
    return list(heapq.merge(*(sorted(part, key=lambda r: r.t) for part in parts), key=lambda r: r.t))


def fed(story: Story, until_t: float = math.inf) -> Dashboard:
    dashboard = Dashboard(0)
    for record in in_time(story):
        if record.t > until_t:
            break
        dashboard.feed(record)
    return dashboard


def shown(dashboard: Dashboard, width: int, height: int = 30) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=False).print(dashboard.render())
    return out.getvalue()


def states(peers: PeerTable) -> list[str]:
    return [peers.state(peer) for peer in peers.rows]


def step(t: float, peer: int, n: int = 1, loss: float = 1.0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=loss)
