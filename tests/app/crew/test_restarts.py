"""A restart goes on from the newest checkpoint, whatever happened before: checkpoints never go backwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ragtag.core.types import Noted
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import capture
from ragtag.training.state.checkpoint import Checkpoints, NoWholeCheckpoint
from ragtag.training.state.checkpoint_file import HEADER_BYTES
from ragtag.training.state.keeper import StateKeeper
from ragtag.training.state.snapshot import Snapshot
from tests.training.simulated import TappedCrew


@dataclass
class Peer:
    """A process of a peer, whose rounds are its own from 0 on; ``steps_per_round``: how fast it is.

    Peers of one run go through their rounds together, so a crew of one each is enough.
    """

    me: int = 0
    steps_per_round: int = 1
    notes: list[Noted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Linear(1, 1)
        inner = torch.optim.SGD(self.model.parameters(), 0.1)
        self.optimizer = CrewOptimizer(inner, TappedCrew(1).transport(0), model=self.model, every=10**9)
        self.keeper = StateKeeper(self.me, 1, self.notes.append)
        self.keeper.take_in(self.optimizer._averaged)

    @property
    def step(self) -> int:
        return self.optimizer._averaged.progress[0]

    def rounds(self, n: int) -> None:
        for _ in range(n):
            for _ in range(self.steps_per_round):
                self.model(torch.ones(1, 1)).sum().backward()
                self.optimizer.step()
            self.optimizer.average()

    def save(self, folder: Path, keep: int = 3) -> Path:
        return self.keeper.save(folder, keep)

    def resume(self, folder: Path) -> int:
        found = self.keeper.resume(folder)
        return 0 if found is None else found.step


def newest(folder: Path) -> str:
    found = Checkpoints(folder).latest()
    assert found is not None
    assert found.path is not None
    assert found.progress == found.snapshot.progress
    return found.path.name


def train(folder: Path, saves: Sequence[int], peers: Sequence[Peer]) -> None:
    """All resume; then, after each so many rounds, all save."""
    for peer in peers:
        peer.resume(folder)
    for rounds in saves:
        for peer in peers:
            peer.rounds(rounds)
        for peer in peers:
            peer.save(folder)


def test_each_restart_goes_on_where_the_run_before_ended(tmp_path: Path) -> None:
    resumed = []
    for rounds in (10, 6, 6, 6):
        peer = Peer()
        resumed.append(peer.resume(tmp_path))
        for _ in range(rounds // 2):
            peer.rounds(2)
            peer.save(tmp_path)
    assert resumed == [0, 10, 16, 22]
    assert newest(tmp_path) == "peer-00-step-000028.ragtag"


def test_a_run_that_is_cut_early_loses_nothing(tmp_path: Path) -> None:
    train(tmp_path, [5], [Peer()])
    Peer().resume(tmp_path)  # cut before its first round
    resumed = Peer()
    assert resumed.resume(tmp_path) == 5
    resumed.save(tmp_path)  # cut before its first round, and it has saved
    resumed = Peer()
    assert resumed.resume(tmp_path) == 5
    resumed.rounds(1)
    resumed.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000006.ragtag"


def test_rounds_count_and_steps_do_not_in_a_crew_of_unequal_speeds(tmp_path: Path) -> None:
    train(tmp_path, [4], [Peer(0), Peer(1, steps_per_round=10)])
    assert newest(tmp_path) == "peer-01-step-000040.ragtag"
    slow, fast = Peer(0), Peer(1, steps_per_round=10)
    train(tmp_path, [3], [slow, fast])
    slow.rounds(1)  # the fast one is gone
    slow.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000044.ragtag"
    assert Peer(0).resume(tmp_path) == 44


def test_a_crew_that_restarts_on_some_machines_only(tmp_path: Path) -> None:
    train(tmp_path, [9, 9], [Peer(me) for me in range(4)])
    train(tmp_path, [2], [Peer(1)])
    assert newest(tmp_path) == "peer-01-step-000020.ragtag"
    train(tmp_path, [1], [Peer(me) for me in range(4)])
    assert newest(tmp_path) == "peer-03-step-000021.ragtag"


def test_a_peer_that_resumes_from_what_its_own_crew_has_just_saved(tmp_path: Path) -> None:
    first, slow = Peer(0), Peer(1)
    train(tmp_path, [30], [first])
    slow.resume(tmp_path)  # it was not there when the others began
    slow.rounds(2)
    slow.save(tmp_path)
    first.rounds(2)
    first.save(tmp_path)
    slow.rounds(5)
    slow.save(tmp_path)
    first.rounds(6)
    first.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000038.ragtag", "they count alike again"


def test_an_older_one_restored_by_removing_the_newer_ones(tmp_path: Path) -> None:
    train(tmp_path, [5, 5, 5], [Peer()])
    for step in (10, 15):
        (tmp_path / f"peer-00-step-{step:06d}.ragtag").unlink()
    peer = Peer()
    assert peer.resume(tmp_path) == 5
    peer.rounds(2)
    peer.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000007.ragtag"


def test_an_older_one_taken_from_another_folder_after_a_run_that_diverged(tmp_path: Path) -> None:
    good, here = tmp_path / "good", tmp_path / "here"
    train(here, [5], [Peer(0), Peer(1)])
    shutil.copytree(here, good)
    train(here, [5, 5, 5], [Peer(0), Peer(1)])
    peers = [Peer(0), Peer(1)]
    for peer in peers:
        assert peer.resume(good) == 5
    for peer in peers:
        peer.rounds(1)
        peer.save(here)
        assert newest(here) == f"peer-{peer.me:02d}-step-000006.ragtag"
    for peer in peers:
        peer.rounds(1)
        peer.save(here)
    assert newest(here) == "peer-01-step-000007.ragtag"
    assert Peer(0).resume(here) == 7


def test_a_run_that_begins_from_nothing_in_a_folder_that_is_in_use(tmp_path: Path) -> None:
    train(tmp_path, [5, 5], [Peer(me) for me in range(3)])
    peer = Peer(0)  # and it does not resume
    peer.rounds(1)
    peer.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000001.ragtag"


def test_what_is_newer_and_damaged_does_not_come_back(tmp_path: Path) -> None:
    train(tmp_path, [5, 5], [Peer(0), Peer(1)])
    for me in range(2):
        path = tmp_path / f"peer-{me:02d}-step-000010.ragtag"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    peer = Peer(0)
    assert peer.resume(tmp_path) == 5
    assert [note.what for note in peer.notes] == ["damaged checkpoint"] * 2 + ["resumed"]
    peer.rounds(1)
    peer.save(tmp_path)
    peer = Peer(1)
    assert peer.resume(tmp_path) == 6
    assert [note.what for note in peer.notes] == ["resumed"], "what is older is not looked at"


@pytest.mark.parametrize("years", [-30, 30])
def test_clocks_do_not_matter(tmp_path: Path, years: int) -> None:
    train(tmp_path, [5], [Peer()])
    train(tmp_path, [5], [Peer()])
    path = tmp_path / "peer-00-step-000010.ragtag"
    at_s = path.stat().st_mtime + years * 365 * 86_400
    os.utime(path, (at_s, at_s))
    assert Peer().resume(tmp_path) == 10


def test_folders_of_their_own_compare(tmp_path: Path) -> None:
    """Each machine has a folder; one was away for a run. Who has come further is told by ``progress``."""
    folders = [tmp_path / "0", tmp_path / "1"]
    peers = [Peer(0), Peer(1, steps_per_round=9)]
    for peer, folder in zip(peers, folders, strict=True):
        train(folder, [10], [peer])
    train(folders[0], [3], [Peer(0)])
    found = [Checkpoints(folder).latest() for folder in folders]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].progress > found[1].progress
    assert found[0].step < found[1].step
    newcomer, donor = Peer(1), Peer(0)
    donor.resume(folders[0])
    donor.rounds(2)
    newcomer.resume(folders[1])
    state = capture(donor.optimizer._averaged, round=1, before=donor.keeper._before)
    newcomer.keeper._load(newcomer.optimizer._averaged, Snapshot.from_bytes(state.to_bytes()))
    newcomer.rounds(2)
    newcomer.save(folders[1])
    donor.save(folders[0])
    both = [Checkpoints(folder).latest() for folder in folders]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].progress.rounds == both[1].progress.rounds
    assert both[0].progress > found[0].progress


def test_what_is_given_before_the_first_round_leaves_no_count_of_rounds() -> None:
    """Peers whose folders differ take what one resumes; a newcomer of later asks for rounds as they are."""
    peer, shelf = Peer(), Shelf(threading.Lock())
    peer.keeper.serve(shelf)
    shelf.ask("ann", 3)
    for _ in range(20):
        peer.keeper.offer_now()
    assert shelf.given("ann") is not None and shelf.round == 19
    peer.keeper.offered()
    assert shelf.round == -1 and shelf.n_snapshots == 0


def test_checkpoints_of_the_first_version_are_read_and_counted_on(tmp_path: Path) -> None:
    train(tmp_path, [7], [Peer()])
    path = tmp_path / "peer-00-step-000007.ragtag"
    from ragtag.training.state import checkpoint_file as module

    data = path.read_bytes()
    body = data[:8] + (1).to_bytes(4, "little") + data[12 : HEADER_BYTES - 16]
    path.write_bytes(body + module._check(body) + data[HEADER_BYTES:])
    peer = Peer()
    assert peer.resume(tmp_path) == 7
    peer.rounds(1)
    peer.save(tmp_path)
    assert newest(tmp_path) == "peer-00-step-000008.ragtag"


@dataclass
class Run:
    """Who takes part, and resumes; after how many rounds each who saves; what befalls files after that."""

    peers: set[int]
    resume: bool
    saves: list[tuple[int, set[int]]]
    keep: int
    damaged: set[int]
    removed: set[int]


PEERS, FILES = st.sets(st.integers(0, 2), min_size=1), st.sets(st.integers(0, 8), max_size=2)
SAVES = st.lists(st.tuples(st.integers(0, 3), PEERS), max_size=3)
RUNS = st.lists(st.builds(Run, PEERS, st.booleans(), SAVES, st.integers(1, 3), FILES, FILES), max_size=5)


@settings(deadline=None, max_examples=60)
@given(RUNS)
def test_the_newest_is_of_the_run_and_the_round_that_was_saved_last(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Run]
) -> None:
    """Whoever took part and saved, resumed or not, whatever was damaged or removed in between."""
    folder = tmp_path_factory.mktemp("runs")
    for run in runs:
        peers = {me: Peer(me, steps_per_round=1 + me) for me in run.peers}
        for peer in peers.values() if run.resume else ():
            with contextlib.suppress(NoWholeCheckpoint):
                peer.resume(folder)
        fresh: set[str] = set()
        for rounds, savers in run.saves:
            for peer in peers.values():
                peer.rounds(rounds)
            fresh = set() if rounds else fresh
            for me in sorted(savers & run.peers):
                fresh.add(peers[me].save(folder, run.keep).name)
                assert newest(folder) in fresh
        there = sorted(folder.iterdir())
        for path in (there[at] for at in run.damaged if at < len(there)):
            path.write_bytes(path.read_bytes()[:-3])
        for path in (there[at] for at in run.removed if at < len(there)):
            path.unlink()
