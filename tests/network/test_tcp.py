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
from ragtag.app.report import report_json
from tests.network.labs import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]

N, SHUT = 4, 3
WHOLE, WITHIN_S = 5, 120.0
"""So many rounds in a row of all four, over ways that stay as they are, within so long."""

NO_UDP = """
table inet shut {
  chain out { type filter hook output priority 0; meta l4proto udp drop; }
  chain in { type filter hook input priority 0; meta l4proto udp drop; @IN@ }
}
"""
ONLY_OUT = "tcp flags & (syn | ack) == syn drop;"
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
            print(json.dumps({"over_tcp": found, "through": through}), flush=True)
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

    def await_ways(self, over_tcp: Sequence[Sequence[int]], through: Sequence[int] = ()) -> float:
        """Until all have whole rounds with just these ways over TCP, by lab's place; the seconds that it
        took."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + WITHIN_S:
            now = [told[-1]["over_tcp"] if told else None for told in self.told]
            if now == [list(ways) for ways in over_tcp]:
                return time.monotonic() - began_s
            assert all(peer.poll() is None for peer in self.peers), (now, self.told)
            time.sleep(0.05)
        raise AssertionError(f"{over_tcp} was wanted, and peers tell {self.told}")

    def end(self) -> None:
        (self.folder / "stop").touch()
        for peer in self.peers:
            assert peer.wait(WITHIN_S) == 0


@contextmanager
def crew_of(folder: Path, rules: str = "") -> Iterator[Crew]:
    """Four peers in a lab, of which the last has these rules of nftables from the beginning."""
    with lab_of(N) as lab:
        if rules:
            shut(lab, rules)
        yield Crew(lab, folder)


def shut(lab: Lab, rules: str = NO_UDP.replace("@IN@", "")) -> None:
    lab.run(SHUT, "nft", "-f", "-", stdin=rules)


NONE: list[list[int]] = [[]] * N


def test_where_udp_gets_through_nothing_goes_over_tcp(tmp_path: Path) -> None:
    with crew_of(tmp_path) as crew:
        crew.await_ways(NONE)
        crew.end()
    assert all(len(told) == 1 for told in crew.told), crew.told
    assert {link["protocol"] for link in report_json(tmp_path)["links"]} == {"udp"}


def test_a_peer_that_only_gets_out_and_only_by_tcp_joins_and_averages_with_all(tmp_path: Path) -> None:
    with crew_of(tmp_path, NO_UDP.replace("@IN@", ONLY_OUT)) as crew:
        print(crew.await_ways([[3], [3], [3], [0, 1, 2]]))
        crew.end()
