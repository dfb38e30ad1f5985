"""Selections in real processes: by-passed on all peers or on none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed
from ragtag.training.exchange.bypass import WINDOW

WORKER = Path(__file__).with_name("sparse_worker.py")


def run(n: int, steps: int, whole_from: int) -> tuple[list[dict[int, bool]], set[str], int]:
    """By peer: round number and whether it was sent whole; the hashes of the peers' weights at the end; how
    many rounds a deadline ended.
    """
    events: list[Event] = []
    result = launch(n, [str(WORKER), str(steps), str(whole_from)], on_event=events.append)
    errors = [event.text for event in events if isinstance(event, Printed) and event.error]
    assert [end.status for end in result.ends] == [0] * n, errors
    rounds: list[dict[int, bool]] = [{} for _ in range(n)]
    weights, expired = set(), 0
    for event in events:
        if not isinstance(event, Printed) or event.error:
            continue
        kind, *rest = event.text.split()
        if kind == "round":
            rounds[event.peer][int(rest[0])] = rest[1] == "1"
            expired += int(rest[2])
        elif kind == "ended":
            weights.add(rest[0])
    return rounds, weights, expired


@pytest.mark.slow
@pytest.mark.parametrize("whole_from", [-1, 20])
def test_no_round_is_split_and_replicas_are_one(whole_from: int) -> None:
    rounds, weights, expired = run(3, 5 * WINDOW, whole_from)
    together = set.intersection(*(set(one) for one in rounds))
    assert len(together) > 4 * WINDOW
    split = [at for at in sorted(together) if len({one[at] for one in rounds}) > 1]
    assert split == []
    if whole_from >= 0:  # said to pay in the second window: done from the fourth on, at the latest
        assert all(rounds[0][at] for at in together if at >= 3 * WINDOW)
    if not expired and all(len(one) == 5 * WINDOW for one in rounds):  # nobody missed anything
        assert len(weights) == 1
