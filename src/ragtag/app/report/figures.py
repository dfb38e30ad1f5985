"""The headline figures of a run, for the page and for machines."""

from __future__ import annotations

from typing import Any

from ragtag.app.report.data import FREEZES, PeerFigures, Summary
from ragtag.core import trace


def figures(summary: Summary) -> dict[str, Any]:
    """Headline figures as plain JSON values; None where nothing was measured; seconds, shares 0 to 1.

    persons: samples that each person's own peers have told of themselves.
    epochs: the most that a peer tells of samples that were missed or used twice, and the least.
    """
    run, survivors = summary.run, summary.survivors
    own = [p.accuracy for p in survivors if p.accuracy is not None]
    mean_eval, board = summary.mean_eval, summary.leaderboard
    return {
        "name": run.name if run else None,
        "world": run.world if run else None,
        "method": run.method if run else None,
        "seed": run.seed if run else None,
        "peers": sum(not p.auxiliary for p in summary.peers.values()),
        "auxiliaries": sum(p.auxiliary for p in summary.peers.values()),
        "clients": sorted(p.number for p in summary.peers.values() if p.client),
        "finished": summary.finished,
        "duration_s": summary.extent.lasted_s,
        "accuracy": {
            "own": {str(p.number): p.accuracy for p in summary.peers.values()},
            "survivors_mean": sum(own) / len(own) if own else None,
            "survivors_lowest": min(own) if own else None,
            "mean_model": mean_eval.accuracy if mean_eval else None,
        },
        "arrival": {
            "mean": summary.arrival.mean(),
            "median": summary.arrival.quantile(0.5),
            "lowest": summary.arrival.smallest if summary.arrival.seen else None,
        },
        "round_time_s": round_times(summary),
        "coherence": {
            "count": summary.mu.seen,
            "median": summary.mu.quantile(0.5),
            "lowest": summary.mu.smallest if summary.mu.seen else None,
        },
        "lost": summary.lost,
        "frozen": [
            {"peer": f.peer, "from_s": f.t, "until_s": f.until_t} for f in summary.faults if f.name in FREEZES
        ],
        "faults": [
            {"name": f.name, "peer": f.peer, "from_s": f.t, "until_s": f.until_t, "detail": f.detail}
            for f in summary.faults
        ],
        "per_peer": [peer_figures(p) for p in summary.peers.values()],
        "persons": {} if board is None else dict(zip(board.persons, board.samples, strict=False)),
        "epochs": [
            {
                "epoch": epoch,
                "samples": samples,
                "missed": used.missed[1],
                "missed_least": used.missed[0],
                "twice": used.twice[1],
                "twice_least": used.twice[0],
            }
            for (epoch, samples), used in sorted(summary.epochs.items())
        ],
        "links": [link_figures(link) for link in summary.links],
        "results": [
            {
                "name": r.name,
                "value": r.value,
                "unit": r.unit,
                "expected": r.expected,
                "tolerance": r.tolerance,
                "passed": r.passed,
                "detail": r.detail,
            }
            for r in summary.results
        ],
        "errors": summary.errors,
        "damage": summary.damage,
    }


def round_times(summary: Summary) -> dict[str, Any]:
    """Round times over all peers and rounds, and their ratios to the median."""
    sample = summary.round_s
    median, p95 = sample.quantile(0.5), sample.quantile(0.95)
    largest = sample.largest if sample.seen else None
    return {
        "count": sample.seen,
        "median": median,
        "p95": p95,
        "max": largest,
        "p95_over_median": p95 / median if median and p95 is not None else None,
        "max_over_median": largest / median if median and largest is not None else None,
    }


def peer_figures(peer: PeerFigures) -> dict[str, Any]:
    """One row of the table of peers."""
    return {
        "peer": peer.number,
        "state": peer.state,
        "rounds": peer.rounds,
        "missed": peer.missed,
        "misses": peer.misses,
        "expired": peer.expired,
        "arrived": peer.arrived / peer.rounds if peer.rounds else None,
        "round_median_s": peer.round_s.quantile(0.5),
        "steps": peer.steps,
        "samples": peer.samples,
        "bytes_sent": peer.bytes_sent,
        "bytes_received": peer.bytes_received,
        "datagrams_lost": peer.datagrams_lost,
        "sealed": peer.sealed,
        "refused": peer.refused,
        "relayed": peer.relayed,
        "accuracy": peer.accuracy,
        "loss": peer.loss,
        "losses_not_finite": peer.batch_losses_bad,
        "digest": peer.digest or None,
        "last_round": None if peer.last_round < 0 else peer.last_round,
    }


def link_figures(link: trace.Link) -> dict[str, Any]:
    """The way from one peer to another; None where nothing was measured."""
    return {
        "from": link.peer,
        "to": link.other,
        "datagrams": link.sent,
        "datagram_bytes": link.datagram_bytes or None,
        "through": None if link.through < 0 else link.through,
        "protocol": link.protocol,
        "lost": link.lost / link.sent if link.sent else None,
        "late_messages": link.late,
        "rate_bytes_per_s": link.rate_bytes_per_s or None,
        "rtt_s": link.rtt_s or None,
        "min_rtt_s": link.min_rtt_s or None,
        "held_s": link.held_s,
    }
