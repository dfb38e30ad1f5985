"""Clients of crews of real processes: ``ragtag join TOKEN --client``, and RAGTAG_ROLE."""

from __future__ import annotations

import os
import signal

import pytest

from ragtag.app.invitation.invite import new_invitation
from ragtag.app.report.summarise import summarise
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Command, Place, notes, until


def joins(trace_of: Place, folder: str) -> list[trace.Join]:
    return [r for r in read_run(trace_of.folder / folder).records() if isinstance(r, trace.Join)]


def client(place: Place, token: str, name: str = "client", **env: str) -> Command:
    folder = str(place.folder / f"run-{name}")
    return place.command(name, "join", "--client", "-o", folder, token, "train.py", **env)


@pytest.mark.slow
def test_it_trains_and_owns_nothing_and_may_be_killed(wide: Place) -> None:
    crew = wide.crew(2, INPUTS="20000", RAGTAG_SEAL="on")
    joined = client(wide, str(wide.run), RAGTAG_SEAL="on", INPUTS="20000")
    joined.says("heard 0b111 live [0, 1, 2]")
    until(lambda: notes(wide.run, "takes part"), "they know of it")
    assert notes(wide.run, "takes part", 0)[0].detail.endswith(", a client")
    dies = client(wide, str(wide.run), "dies", RAGTAG_SEAL="on", INPUTS="20000")
    dies.says("heard 0b1111")
    os.kill(dies.pid(0), signal.SIGKILL)
    until(lambda: notes(wide.run, "declared dead"), "it is missed")
    wide.end()
    assert crew.code() == 0, crew.text
    assert joined.code() == 0, joined.text
    assert "2 peers hold the same model" in crew.text
    (mine,) = joins(wide, "run-client")
    assert mine.client and not any(join.client for join in joins(wide, "run"))
    figures = summarise(read_run(wide.folder / "run-client"))
    assert [p.number for p in figures.peers.values() if p.client] == [2]


@pytest.mark.slow
def test_it_begins_no_crew_and_is_told_at_once_where_only_clients_are_left(wide: Place) -> None:
    token = new_invitation("127.0.0.1", "otters").text
    waits = client(wide, token, "waits", INPUTS="20000")
    until(lambda: "nobody of crew 'otters' answers yet" in waits.text, "it begins no crew")
    first = wide.join(token, "first", INPUTS="20000")
    waits.says("heard 0b11")
    (wide.folder / "stop.0").touch()
    assert first.code() == 0, first.text
    until(lambda: notes(wide.folder / "run-waits", "no owner"), "it is alone with clients")
    late = client(wide, str(wide.folder / "run-waits"), "late", INPUTS="20000")
    assert late.code() == 1
    assert "all peers of crew 'otters' are clients" in late.text and "without --client" in late.text
    wide.end()
    assert waits.code() == 0, waits.text


@pytest.mark.slow
def test_a_script_may_say_so_itself_and_peers_of_a_launched_crew_hear_of_it(wide: Place) -> None:
    script = wide.folder / "train.py"
    said = "60.0, client=os.environ['RAGTAG_RANK'] == '2'"
    shows = "        print(sorted(crew._peer.driver.node.clients), flush=True)"
    script.write_text(script.read_text().replace("60.0", said).replace("        time.sleep(0.02)", shows))
    crew = wide.crew(3, INPUTS="20000")
    for peer in range(3):
        crew.says("[2]", peer)
    wide.end()
    assert crew.code() == 0 and "3 peers hold the same model" in crew.text
    assert {join.peer: join.client for join in joins(wide, "run")} == {0: False, 1: False, 2: True}
    rounds = [r for r in read_run(wide.run).records() if isinstance(r, trace.Round)]
    sent = {r.peer: r.bytes_sent / (r.round + r.of) for r in rounds}
    assert sent[2] < 0.85 * min(sent[0], sent[1])  # two thirds; of three full peers each sends as much


@pytest.mark.slow
def test_a_crew_that_is_all_clients_ends_at_once(wide: Place) -> None:
    crew = wide.command("crew", "run", "-n", "3", "-o", str(wide.run), "train.py", RAGTAG_ROLE="client")
    assert crew.code() == 1
    assert "are clients, which own nothing" in crew.text
