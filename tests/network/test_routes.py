"""Ways that are forbidden for a while: real routes in network namespaces, whole peers with membership."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import Lab
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.network.labs import environment
from tests.network.test_namespaces import N, lab

__all__ = ["lab"]

pytestmark = pytest.mark.root

DATA, MEMBERS = 4801, 4802
FORBIDDEN_S = 3.0
PATIENCE_S = 90.0
SCRIPT = """
import sys, time
import torch, ragtag
crew = ragtag.join(deadline_s=60)
model = torch.nn.Linear(64, 64)
with crew:
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    go_on = True
    while go_on:
        optimizer.step()
        time.sleep(0.01)
        print(bin(int(optimizer.outcome.heard[0])), flush=True)
        go_on = sys.stdin.readline() == "on\\n"
"""


def until_heard(peers: list[subprocess.Popen[str]], for_s: float, heard: str = "") -> None:
    """Have peers average for so long; or until, in one round of each, those are heard."""
    until_s = time.monotonic() + (PATIENCE_S if heard else for_s)
    while time.monotonic() < until_s:
        for peer in peers:
            assert peer.stdin is not None
            peer.stdin.write("on\n")
            peer.stdin.flush()
        lines = []
        for peer in peers:
            assert peer.stdout is not None
            lines.append(peer.stdout.readline().strip())
            assert lines[-1], peer.communicate()[1]
        if heard and set(lines) == {heard}:
            return
    assert not heard, f"not {heard} within {PATIENCE_S} s"


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("prohibit", marks=_SLOW),
        pytest.param("blackhole", marks=_SLOW),
        pytest.param("unreachable", marks=_SLOW),
    ],
)
def test_a_way_that_is_forbidden_for_three_seconds_loses_datagrams_and_ends_nobody(
    lab: Lab, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "peer.py").write_text(SCRIPT)
    hosts = lab.hosts
    env = {
        **environment(),
        "RAGTAG_SIZE": str(N),
        "RAGTAG_CREW": "otters",
        "RAGTAG_RUN": str(tmp_path),
        "RAGTAG_PEERS": ",".join(f"{host}:{DATA}" for host in hosts),
        "RAGTAG_MEMBERS": ",".join(f"{host}:{MEMBERS}" for host in hosts),
        "RAGTAG_KEY": bytes(range(32)).hex(),
    }
    everybody = bin((1 << N) - 1)
    peers = []
    try:
        command, pipe = [sys.executable, str(tmp_path / "peer.py")], subprocess.PIPE
        for peer in range(N):
            mine = {**env, "RAGTAG_RANK": str(peer)}
            process = lab.start(peer, command, env=mine, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            peers.append(process)
        for process in peers:  # the first round of each, which nobody asks for
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
        until_heard(peers, 0.0, everybody)
        lab.run(0, "ip", "route", "add", kind, f"{hosts[1]}/32")
        until_heard(peers, FORBIDDEN_S)
        lab.run(0, "ip", "route", "del", kind, f"{hosts[1]}/32")
        until_heard(peers, 0.0, everybody)
        for process in peers:
            assert process.stdin is not None
            process.stdin.write("off\n")
            process.stdin.flush()
        for process in peers:
            _, error = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, error
    finally:
        for process in peers:
            process.kill()
            process.communicate()
    records = list(read_run(tmp_path).records())
    notes = [(r.peer, r.what, r.other) for r in records if isinstance(r, trace.Note)]
    assert notes.count((0, "not sent", 1)) == 1
    assert notes.count((0, "membership not sent", 1)) == 1
    assert not [note for note in notes if note[0] != 0 and "sent" in note[1]]
