"""Peers to and from which no UDP gets through, in the lab (benchmarks/lab): each averages with all, over
TCP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.lab import Lab
from benchmarks.over_tcp import NO_UDP
from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.network.labs import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

N = 4
WHOLE, WITHIN_S = 5, 120.0
"""So many rounds in a row of all four, over ways that stay as they are, within so long."""

ONLY_OUT = """
table inet only {
  chain in { type filter hook input priority 0; tcp flags & (syn | ack) == syn drop; }
}
"""
OPEN = "delete table inet shut\n"

PEER = """
import json, os, time
from pathlib import Path
os.environ["RAGTAG_RUN"] = "@FOLDER@"
import torch
import ragtag
from tests.network.test_tcp import N, WHOLE, WITHIN_S

row = 0
def told(outcome):
    global row
    all_there = all(bool((outcome.heard >> peer & 1).any()) for peer in range(N))
    row = row + 1 if all_there and outcome.averaged.all() else 0

began_s = time.monotonic()
with ragtag.join(deadline_s=60.0) as crew:
    model = torch.nn.Linear(64, 64)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, on_outcome=told)
    driver, before, shown = crew._peer.driver, None, None
    while time.monotonic() < began_s + 4 * WITHIN_S and not Path("@FOLDER@/stop").exists():
        model(torch.randn(4, 64)).sum().backward()
        time.sleep(0.02)
        optimizer.step()
        found = sorted(way.peer for way in driver.directions() if way.streamed)
        if found != before:
            before, row = found, 0
        if row >= WHOLE and shown != found:
            shown = found
            through = [way.through for way in driver.directions() if way.through >= 0]
            print(json.dumps({"seat": crew.rank, "over_tcp": found, "through": through}), flush=True)
"""


class Crew:
    """Peers of a lab, as they tell of their ways: each time that rounds were whole over others than
    before."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.told: list[list[dict[str, Any]]] = [[] for _ in range(N)]
        self.peers = lab.joined(PEER.replace("@FOLDER@", str(folder)))
        self._readers = [Thread(target=self._read, args=(peer,), daemon=True) for peer in range(N)]
        for reader in self._readers:
            reader.start()

    def _read(self, peer: int) -> None:
        for line in self.peers[peer].stdout or ():
            self.told[peer].append(json.loads(line))

    def await_ways(self, over_tcp: Sequence[Sequence[int]]) -> list[list[int]]:
        """Until all have whole rounds while just these ways go over TCP; through whom which are relayed.

        over_tcp: for each place in the lab, places. So is what is returned.
        """
        until_s, now = time.monotonic() + WITHIN_S, list[dict[str, Any]]()
        while time.monotonic() < until_s:
            assert all(peer.poll() is None for peer in self.peers), self.told
            now = [told[-1] for told in self.told if told]
            if len(now) == N:
                place = {peer["seat"]: at for at, peer in enumerate(now)}
                if [sorted(place[one] for one in peer["over_tcp"]) for peer in now] == over_tcp:
                    return [[place[one] for one in peer["through"]] for peer in now]
            time.sleep(0.05)
        raise AssertionError(f"{over_tcp} was wanted, and peers tell {now}")

    def end(self) -> None:
        (self.folder / "stop").touch()
        for peer in self.peers:
            assert peer.wait(WITHIN_S) == 0

    def notes(self, at: int) -> list[trace.Note]:
        """What a peer has noted of ways, by place."""
        seat = self.told[at][0]["seat"]
        return [
            one for one in read_run(self.folder).records() if isinstance(one, trace.Note) and one.peer == seat
        ]


@contextmanager
def crew_of(folder: Path, rules: str = "", at: Sequence[int] = ()) -> Iterator[Crew]:
    """Four peers in a lab, of which some have these rules of nftables from the beginning."""
    with lab_of(N) as lab:
        for peer in at:
            lab.run(peer, "nft", "-f", "-", stdin=rules)
        yield Crew(lab, folder)


NONE: list[list[int]] = [[]] * N
LAST = [[3], [3], [3], [0, 1, 2]]


def test_where_udp_gets_through_nothing_goes_over_tcp(tmp_path: Path) -> None:
    with crew_of(tmp_path) as crew:
        crew.await_ways(NONE)
        crew.end()
    assert all(len(told) == 1 for told in crew.told), crew.told
    assert {link["protocol"] for link in report_json(tmp_path)["links"]} == {"udp"}
    assert "by TCP" not in {note.what for at in range(N) for note in crew.notes(at)}


def test_a_peer_that_only_gets_out_and_only_by_tcp_joins_and_averages_with_all(tmp_path: Path) -> None:
    with crew_of(tmp_path, NO_UDP + ONLY_OUT, [3]) as crew:
        assert crew.await_ways(LAST) == [[]] * N, "nobody relays"
        crew.end()
    seat = crew.told[3][0]["seat"]
    over = {
        (link["from"], link["to"]) for link in report_json(tmp_path)["links"] if link["protocol"] == "tcp"
    }
    assert over == {(seat, other) for other in range(N) if other != seat} | {
        (other, seat) for other in range(N) if other != seat
    }
    assert sum(note.what == "by TCP" for note in crew.notes(3)) >= 3


def test_two_that_only_get_out_reach_each_other_through_those_that_both_reach(tmp_path: Path) -> None:
    with crew_of(tmp_path, NO_UDP + ONLY_OUT, [2, 3]) as crew:
        through = crew.await_ways([[2, 3], [2, 3], [0, 1, 3], [0, 1, 2]])
        crew.end()
    assert [len(ways) for ways in through] == [0, 0, 1, 1] and {*through[2], *through[3]} <= {0, 1}


def test_udp_that_is_shut_off_in_mid_run_is_replaced_by_tcp_and_taken_up_again(tmp_path: Path) -> None:
    with crew_of(tmp_path) as crew:
        crew.await_ways(NONE)
        crew.lab.run(3, "nft", "-f", "-", stdin=NO_UDP)
        crew.await_ways(LAST)
        crew.lab.run(3, "nft", "-f", "-", stdin=OPEN)
        crew.await_ways(NONE)
        crew.end()
    assert [note.what for note in crew.notes(0) if note.what in ("by TCP", "reached")] == [
        "by TCP",
        "reached",
    ]
