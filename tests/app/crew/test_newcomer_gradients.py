"""Who comes late to a crew of real processes that averages gradients has the members' model, and keeps it."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.invitation.token import kept_token
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Place, notes, until

SCRIPT = """
import os, time
import numpy as np, torch, ragtag
torch.set_num_threads(1)
stop, pause_s = os.environ["STOP"], float(os.environ.get("PAUSE_S", "0.01"))
jumps = os.environ.get("JUMPS_AT")
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(len(os.environ.get("LATE", "")))  # a newcomer's own weights are others
    model = torch.nn.Sequential(torch.nn.Linear(50, 800), torch.nn.Tanh(), torch.nn.Linear(800, 10))
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = crew.optimizer(inner, averager=ragtag.AllReduce(), average="gradients", model=model)
    print("seat", crew.rank, "pid", os.getpid(), flush=True)
    draw = torch.Generator().manual_seed(crew.rank)
    models, said = {}, None
    while not os.path.exists(stop):
        optimizer.zero_grad()
        inputs = torch.randn(8, 50, generator=draw)
        (model(inputs) - inputs[:, :10].sin()).square().mean().backward()
        optimizer.step()
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        if jumps and crew.rank == 0 and optimizer.outcome.round >= int(jumps):
            jumps = None  # it believes a number that somebody has made up
            crew._peer.transport._driver.node.channels[optimizer._averaged.channel].highest += 1000
        models[optimizer.outcome.round] = vector[::19].copy()
        heard = bin(int(np.bitwise_or.reduce(optimizer.outcome.heard)))
        if heard != said:
            print("heard", heard, flush=True)
            said = heard
        time.sleep(pause_s)
    np.savez(f"models-{crew.rank}.npz", **{str(r): m for r, m in models.items()})
"""


@pytest.fixture
def place(place: Place) -> Place:
    (place.folder / "train.py").write_text(SCRIPT)
    return place


def models(folder: Path, peer: int) -> dict[int, np.ndarray]:
    """A peer's parameters (each 19th) after each of its rounds."""
    with np.load(folder / f"models-{peer}.npz") as file:
        return {int(round_): file[round_] for round_ in file.files}


def rounds(folder: Path, peer: int) -> list[int]:
    """Those that a peer's trace tells of."""
    records = read_run(folder).records()
    return [r.round for r in records if isinstance(r, trace.Round) and r.peer == peer]


def arrived(folder: Path, peer: int) -> int:
    """Wait for a peer's word that it is in step; since which round."""

    def said() -> list[trace.Note]:
        return notes(folder, "in step", peer) + notes(folder, "not in step", peer)

    until(lambda: bool(said()), f"peer {peer} said whether it is in step")
    assert said()[-1].what == "in step", said()
    state, steps = re.findall(r"of round (\d+) and the steps of (\d+) rounds", said()[-1].detail)[-1]
    return int(state) + int(steps)


def arrived_at(folder: Path, peer: int) -> None:
    """Wait for a peer's word that it is in step, whatever made it so."""
    until(lambda: bool(notes(folder, "in step", peer)), f"peer {peer} is in step")


def some_rounds(folder: Path, peer: int, more: int = 50) -> None:
    """Wait until a peer has taken part in so many more."""
    first = max(rounds(folder, peer))
    until(lambda: max(rounds(folder, peer)) >= first + more, f"{more} more rounds of peer {peer}")


def require_as_near(folder: Path, late: int, members: tuple[int, ...], since: int) -> None:
    """When it arrives the late one is as near to the mean of the others as these are.

    What was lost on the way to it alone may cost a quarter of a step; a round that it lacks costs one.
    Later it is a member, and drifts as all do when somebody dies or comes.
    """
    found = {peer: models(folder, peer) for peer in (late, *members)}
    shared = sorted(set.intersection(*(set(of) for of in found.values())))
    first = [round_ for round_ in shared if round_ >= since][:3]
    assert len(first) == 3, (since, shared)
    over = []
    for round_ in first:
        mean = np.mean([found[peer][round_] for peer in members], axis=0)
        own = max(float(np.linalg.norm(found[peer][round_] - mean)) for peer in members)
        before = found[members[0]][max(r for r in found[members[0]] if r < round_)]
        step = float(np.linalg.norm(found[members[0]][round_] - before))
        off = float(np.linalg.norm(found[late][round_] - mean))
        over.append((off - (own + 0.25 * step), off, own, step))
    assert sorted(over)[1][0] <= 0.0, (late, first, over)


@pytest.mark.slow
def test_it_is_as_near_to_the_crews_mean_as_a_member(place: Place) -> None:
    crew = place.crew(2)
    joined = place.join(kept_token(place.run), LATE="yes")
    joined.says("heard 0b111")
    run = place.folder / "run-joined"
    since = arrived(run, 2)
    some_rounds(run, 2)
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    require_as_near(place.folder, 2, (0, 1), since)
    followed = [r for r in rounds(run, 2) if r not in models(place.folder, 2)]
    assert followed == sorted(set(followed)), "each round that it followed is told of once"


@pytest.mark.slow
def test_two_that_come_at_once_are_both_in_step(place: Place) -> None:
    crew = place.crew(2)
    names = ("one", "two")
    joined = [place.join(kept_token(place.run), name, LATE=name) for name in names]
    for peer in joined:
        peer.says("heard 0b1111")
    since = {}
    for seat in (2, 3):
        run = next(place.folder / f"run-{n}" for n in names if rounds(place.folder / f"run-{n}", seat))
        since[seat] = arrived(run, seat)
        some_rounds(run, seat)
    place.end()
    assert [peer.code() for peer in (crew, *joined)] == [0] * 3, crew.text
    for late in (2, 3):
        require_as_near(place.folder, late, (0, 1), since[late])


@pytest.mark.slow
def test_one_that_was_away_for_long_does_the_same_by_itself(place: Place) -> None:
    crew = place.crew(3)
    away = crew.pid(2)
    os.kill(away, signal.SIGSTOP)
    try:
        some_rounds(place.run, 0, 100)
    finally:
        os.kill(away, signal.SIGCONT)
    since = arrived(place.run, 2)
    some_rounds(place.run, 2)
    place.end()
    assert crew.code() == 0, crew.text
    require_as_near(place.folder, 2, (0, 1), since)


@pytest.mark.slow
def test_one_whose_seat_is_anothers_comes_in_anew(place: Place) -> None:
    crew = place.crew(3)
    away = crew.pid(2)
    os.kill(away, signal.SIGSTOP)
    try:
        until(lambda: notes(place.run, "declared dead"), "declared dead")
        joined = place.join(kept_token(place.run), LATE="yes")
        joined.says("heard 0b111")
    finally:
        os.kill(away, signal.SIGCONT)
    run = place.folder / "run-joined"
    since = {2: arrived(run, 2), 3: arrived(place.run, 3)}
    some_rounds(run, 2)
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    for late in (2, 3):
        require_as_near(place.folder, late, (0, 1), since[late])


# -- Nobody is ahead

STANDSTILL_S = 20.0
"""A third of how long each would wait for the others else (the crew's deadline)."""


COMPARED = 200
"""Rounds in which replicas are compared a few times, so that what a death in a round cost is put right."""


def standstill_s(folder: Path, peer: int) -> float:
    """The longest time between two rounds of a peer."""
    records = read_run(folder).records()
    ends_s = [r.t for r in records if isinstance(r, trace.Round) and r.peer == peer]
    return max(later - earlier for earlier, later in pairwise(ends_s))


def require_as_near_as_members(folder: Path, peers: tuple[int, ...]) -> None:
    """In their last rounds all have one model: they lie no further apart than a step."""
    found = {peer: models(folder, peer) for peer in peers}
    shared = sorted(set.intersection(*(set(of) for of in found.values())))
    off = []
    for before, last in list(pairwise(shared))[-5:]:
        mean = np.mean([of[last] for of in found.values()], axis=0)
        step = float(np.linalg.norm(found[peers[0]][last] - found[peers[0]][before]))
        off.append(max(float(np.linalg.norm(of[last] - mean)) for of in found.values()) / step)
    assert sorted(off)[2] <= 1.0, off


@pytest.mark.slow
def test_a_round_number_that_was_made_up_costs_no_standstill(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leave out a thousand rounds, so each takes itself for behind; and nobody is ahead."""
    monkeypatch.setenv("JUMPS_AT", "30")
    crew = place.crew(3)
    for peer in range(3):
        arrived_at(place.run, peer)
    some_rounds(place.run, 0, COMPARED)
    place.end()
    assert crew.code() == 0, crew.text
    assert max(rounds(place.run, 0)) > 1000
    assert max(standstill_s(place.run, peer) for peer in range(3)) < STANDSTILL_S
    require_as_near_as_members(place.folder, (0, 1, 2))


@pytest.mark.slow
def test_the_only_one_that_was_ahead_is_killed(place: Place) -> None:
    """The others have stood still; they hear how far it came, and then it is gone."""
    crew = place.crew(4)
    pids = [crew.pid(peer) for peer in range(4)]
    some_rounds(place.run, 3, 10)
    for pid in pids[:3]:
        os.kill(pid, signal.SIGSTOP)
    try:
        some_rounds(place.run, 3, 100)
    finally:
        for pid in pids[:3]:
            os.kill(pid, signal.SIGCONT)
    until(lambda: bool(notes(place.run, "skipped")), "one that stood still has heard of the fourth")
    os.kill(pids[3], signal.SIGKILL)
    for peer in range(3):
        some_rounds(place.run, peer, COMPARED)
    place.end()
    crew.code()
    for peer in range(3):
        woken = [note.t for note in notes(place.run, "skipped", peer)]
        assert standstill_s(place.run, peer) < STANDSTILL_S, woken
    require_as_near_as_members(place.folder, (0, 1, 2))
