"""Live crews measure their links: on loopback, and in namespaces with lines of a set rate, delay and loss."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ragtag.app.probe.estimate import BAND, held
from ragtag.app.probe.links import Links, read_links
from tests.network.labs import environment, lab_of

PATIENCE_S = 110.0
RATE_BAND = 1.5
"""A rate is found within this factor of the one that was set: machines are busy with other things."""
MODULE = ("-m", "ragtag.app.probe.crew")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out


def started(*command: str, **environ: str) -> subprocess.Popen[str]:
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], env={**environment(), **environ}, **piped)


@pytest.mark.slow
def test_processes_that_a_launcher_starts(tmp_path: Path) -> None:
    run = started("-m", "ragtag", "run", "-n", "3", "--run-folder", str(tmp_path), *MODULE, "--slot", "0.2")
    code, out = ended(run)
    assert code == 0, out
    links = read_links(tmp_path)
    assert links is not None
    assert links.peers == (0, 1, 2)
    assert all(0 < way.rtt_s < 0.1 and way.rate_bytes_per_s > 1e6 for way in links.ways)
    assert links.tried is not None
    assert len(re.findall(r"\d -> \d: ", out)) == 6, "one peer says it"


@pytest.mark.slow
def test_each_machine_joins_by_a_token_and_is_told_the_same(tmp_path: Path) -> None:
    token = tmp_path / "crew.token"
    asked = [sys.executable, "-m", "ragtag", "invite", "--listen", "127.0.0.1"]
    token.write_text(
        subprocess.run(asked, capture_output=True, text=True, check=True, env=environment()).stdout
    )
    command = ("-m", "ragtag", "probe", "--crew", str(token), "--peers", "2", "--parameters", "20k", "--json")
    both = [started(*command) for _ in range(2)]
    told = []
    for process in both:
        code, out = ended(process)
        assert code == 0, out
        told.append(json.loads(out[out.index("{") :]))
    assert told[0]["crew"]["links"] == told[1]["crew"]["links"]
    assert len(told[0]["crew"]["links"]) == told[0]["peers"] == 2


@pytest.mark.slow
def test_a_crew_of_one_has_no_links() -> None:
    code, out = ended(started(*MODULE))
    assert code != 0
    assert "this peer is alone, and has no links" in out


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [{"rate_mbit": 20.0}, {"rate_mbit": 20.0, "delay_ms": 10.0, "loss": 0.01}, {"rate_mbit": 60.0}],
    ids=str,
)
def test_lines_of_a_set_rate_are_found_and_an_estimate_holds(line: dict[str, float], tmp_path: Path) -> None:
    n = 3
    with lab_of(n, **line) as lab:
        peers = []
        for peer in range(n):
            folder = tmp_path / str(peer)
            folder.mkdir()
            environ = {**environment(), **lab.environment(peer), "RAGTAG_RUN": str(folder)}
            piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            peers.append(lab.start(peer, [sys.executable, *MODULE], env={**os.environ, **environ}, **piped))
        for process in peers:
            code, out = ended(process)
            assert code == 0, out
    found = [read_links(tmp_path / str(peer)) for peer in range(n)]
    links = found[0]
    assert isinstance(links, Links)
    assert [one.ways for one in found if one is not None] == [links.ways] * n
    for peer in links.peers:
        assert 1 / RATE_BAND < links.rate(peer) / (line["rate_mbit"] * 1e6 / 8) < RATE_BAND
    for way in links.ways:
        least_s = 2e-3 * line.get("delay_ms", 0.0)
        assert 0.9 * least_s <= way.rtt_s < least_s + 0.01
    lost = sum(way.loss for way in links.ways) / len(links.ways)
    assert lost == pytest.approx(line.get("loss", 0.0), abs=0.015)
    both = held(links)
    assert both is not None
    assert max(both) < BAND * min(both)
