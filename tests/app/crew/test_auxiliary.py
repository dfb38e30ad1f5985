"""Auxiliaries of crews of real processes: ``ragtag join TOKEN --auxiliary``."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from ragtag.app.invitation.invite import new_invitation
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Command, Place, notes, until


def assisting(place: Place, token: str, name: str = "auxiliary", **env: str) -> Command:
    """An auxiliary that has told which peers are there."""
    joined = place.command(name, "join", "--auxiliary", "--json", token, **env)
    until(lambda: "averages" in joined.text or joined.process.poll() is not None, f"{name} averages")
    return joined


def told(command: Command) -> dict[str, object]:
    """What it printed at its end."""
    found: dict[str, object] = json.loads(command.text[command.text.index("{") :])
    return found


def knowing(place: Place) -> list[int]:
    """The peers that know of an auxiliary, each as often as one came."""
    return sorted(note.peer for note in notes(place.run, "assists"))


def rounds(place: Place, run: str = "run") -> list[trace.Round]:
    return [r for r in read_run(place.folder / run).records() if isinstance(r, trace.Round)]


@pytest.mark.slow
def test_it_owns_blocks_while_peers_come_and_ends_with_the_crew(wide: Place) -> None:
    crew = wide.crew(2, INPUTS="2000", RAGTAG_SEAL="on")
    auxiliary = assisting(wide, str(wide.run), RAGTAG_SEAL="on")
    for peer in (0, 1):
        until(lambda peer=peer: notes(wide.run, "assists", peer), "both know of it")
        (note,) = notes(wide.run, "assists", peer)
        assert note.other == 2 and not notes(wide.run, "takes part", peer)
    joined = wide.command(
        "joined", "join", "-o", str(wide.folder / "run-joined"), str(wide.run), "train.py",
        RAGTAG_SEAL="on", INPUTS="2000",
    )  # fmt: skip
    joined.says("heard 0b1011 live [0, 1, 3]")
    wide.end()
    assert (crew.code(), joined.code(), auxiliary.code()) == (0, 0, 0), crew.text + auxiliary.text
    done = told(auxiliary)
    assert (done["seat"], done["peers"], done["why"]) == (2, [0, 1, 3], "the crew has ended")
    assert isinstance(done["rounds"], int) and done["rounds"] > 10
    assert isinstance(done["bytes_received"], int) and done["bytes_received"] > 4000 * done["rounds"]
    assert "peer 3 (" in auxiliary.text and "is gone" in auxiliary.text
    for record in rounds(wide):
        assert 2 not in record.waited_for and record.contributors <= 3
    assert "2 peers hold the same model" in crew.text


@pytest.mark.slow
def test_one_that_is_killed_or_interrupted_costs_no_more_than_an_owner(wide: Place) -> None:
    crew = wide.crew(3, INPUTS="2000")
    killed = assisting(wide, str(wide.run), "killed")
    until(lambda: {0, 1, 2} <= set(knowing(wide)), "all know of it")
    known, run = knowing(wide), read_run(wide.run).run
    assert run is not None
    killed_t = time.time() - run.started_unix_s
    os.kill(killed.process.pid, signal.SIGKILL)
    until(lambda: {note.peer for note in notes(wide.run, "declared dead")} == {0, 1, 2}, "declared dead")
    dead_t = {note.peer: note.t for note in notes(wide.run, "declared dead")}
    stopped = assisting(wide, str(wide.run), "stopped")
    until(lambda: all(knowing(wide).count(p) > known.count(p) for p in range(3)), "all know of the next one")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.code() == 130, stopped.text
    assert told(stopped)["why"] == "interrupted"
    until(lambda: notes(wide.run, "has left"), "it said good-bye")
    wide.end()
    assert crew.code() == 0, crew.text
    assert not any("3]" in line for peer in range(3) for line in crew.lines(peer))  # nobody counts on it
    for peer in range(3):  # it owns no blocks after two rounds in which it was silent
        since = [r for r in rounds(wide) if r.peer == peer and killed_t < r.t < dead_t[peer]]
        assert sum(3 in r.missed for r in since) <= 2 < len(since)


@pytest.mark.slow
def test_it_may_wait_for_the_peer_that_begins_the_crew(wide: Place) -> None:
    token = new_invitation("127.0.0.1", "otters").text
    auxiliary = wide.command("auxiliary", "join", "--auxiliary", "--json", token)
    until(lambda: "nobody of crew 'otters' answers yet" in auxiliary.text, "it waits")
    first = wide.join(token, "first", INPUTS="2000")
    first.says("heard 0b1 live [0]")
    until(lambda: "values by allreduce" in auxiliary.text, "it found the first")
    second = wide.join(token, "second", INPUTS="2000")
    first.says("live [0, 2]")
    wide.end()
    assert (first.code(), second.code(), auxiliary.code()) == (0, 0, 0), first.text + auxiliary.text
    assert told(auxiliary)["peers"] == [0, 2]


@pytest.mark.slow
def test_a_crew_that_averages_in_groups_has_nothing_for_it(place: Place) -> None:
    script = place.folder / "train.py"
    script.write_text(script.read_text().replace("ragtag.AllReduce()", "ragtag.Moshpit(group=2)"))
    crew = place.crew(2)
    auxiliary = place.command("auxiliary", "join", "--auxiliary", str(place.run))
    assert auxiliary.code() == 1
    assert "the crew averages by moshpit" in auxiliary.text and "has no part" in auxiliary.text
    place.end()
    assert crew.code() == 0, crew.text
    assert not notes(place.run, "assists")
