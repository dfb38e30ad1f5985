"""What a peer's trace has of steps, samples, loss and accuracy: by itself, and by what a script tells."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.crew import logbook
from ragtag.app.crew.crew import Crew
from ragtag.app.crew.logbook import ALONE_AFTER
from ragtag.app.environment import VARIABLES, Place
from ragtag.app.report import build_report, report_json
from ragtag.app.terminal.peers import PeerTable
from ragtag.app.tracefile import TraceWriter, read_run
from ragtag.core import trace
from ragtag.core.channels import channel_of
from ragtag.core.types import Audited
from ragtag.protocols.rounds.robust import TrimmedMean
from ragtag.training.state.whole import Finished, Stand
from tests.core.test_arrival import outcome

STEP_S = 0.1
BATCH = 4


class Clock:
    """Time goes on by what a step takes, and only then."""

    now_s = 1000.0

    def step(self) -> None:
        self.now_s += STEP_S


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """This process is a launched crew of one whose trace is in ``tmp_path``."""
    for name in (*VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = Place(0, 1, "otters", run_folder=tmp_path, peers=(("127.0.0.1", 4000),))
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    clock = Clock()
    now = SimpleNamespace(time=time.time, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(logbook, "time", now)
    return clock


class Crowd:
    """A driver of a crew that takes persons. said: what each peer has told, as its process told it."""

    def __init__(self) -> None:
        self.whose = {0: ("alice", 10), 1: ("bob", 11), 2: ("alice", 12)}
        self.said: dict[int, bytes] = {}
        self.posted: list[int] = []

    def persons(self) -> dict[int, tuple[str, int]]:
        return dict(self.whose)

    def post(self, topic: int, blob: bytes) -> None:
        self.posted.append(msgspec.msgpack.decode(blob)[1])

    def posts(self, topic: int) -> dict[int, bytes]:
        return dict(self.said)

    def says(self, peer: int, process: int, samples: int) -> None:
        self.said[peer] = msgspec.msgpack.encode((process, samples))


def test_samples_are_summed_by_person_over_processes_that_come_and_go(clock: Clock, tmp_path: Path) -> None:
    crowd, drawn = Crowd(), 0
    writer = TraceWriter(tmp_path / "peer-00.jsonl")
    book = logbook.Logbook(Place(0, 3, "otters"), crowd, writer, 0.0, {}, lambda: drawn)  # type: ignore[arg-type]
    for second in range(25):
        clock.now_s = 2000.0 + second
        drawn = 10 * second
        crowd.says(1, 11, 7 * second)
        if second == 12:
            crowd.whose[2] = "bob", 13  # the seat is another's now, and has still what alice told there
        elif second < 12:
            crowd.says(2, 12, 1000 + second)
        book.record_persons()
    crowd.said[1] = b"noise"
    book.record_persons(0.0)
    writer.close()
    found = records(tmp_path, trace.Leaderboard)
    assert [round(record.t) for record in found] == [2000, 2010, 2020, 2024]
    assert found[-1].persons == ["alice", "bob"]
    assert found[-1].samples == [240 + 1011, 7 * 24] and found[-1].processes == [2, 1]
    assert crowd.posted == [0, 10, 20, 30, 40, 50, 70, 90, 100, 130, 170, 200, 240]
    page = build_report(tmp_path).read_text()
    assert report_json(tmp_path)["persons"] == {"alice": 1251, "bob": 168}
    assert "<h2>Persons</h2>" in page and "<td>alice</td>" in page and "1,251" in page


def test_the_last_samples_of_a_process_count_though_it_is_gone_when_they_are_looked_at(
    clock: Clock, tmp_path: Path
) -> None:
    crowd = Crowd()
    writer = TraceWriter(tmp_path / "peer-00.jsonl")
    book = logbook.Logbook(Place(0, 3, "otters"), crowd, writer, 0.0, {}, lambda: 0)  # type: ignore[arg-type]
    crowd.says(2, 12, 0)
    book.record_persons()
    crowd.says(2, 12, 6)  # it says so as it goes
    who, _ = crowd.whose.pop(2)
    clock.now_s += 1
    book.record_persons(0.0)
    writer.close()
    last = records(tmp_path, trace.Leaderboard)[-1]
    assert dict(zip(last.persons, last.samples, strict=True))[who] == 6


def test_processes_without_end_stay_in_their_persons_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "PROCESSES_MAX", 8)
    sums = logbook.Contributions()
    for process in range(100):
        sums.hear(f"p{process % 3}", process, msgspec.msgpack.encode((process, 2)))
        sums.hear(f"p{process % 3}", process, msgspec.msgpack.encode((process, 1)))
    told = sums.told(0.0, 0)
    assert told.samples == [68, 66, 66] and told.processes == [34, 33, 33]
    assert len(sums._of) == 8


def test_what_a_guard_made_of_shares_is_told_every_ten_seconds_and_at_the_end(
    clock: Clock, tmp_path: Path
) -> None:
    def judged(round_: int, liar_far: float) -> Any:
        audited = Audited((1, 2), (100, 300), (0.0, 1.0), (1.0, liar_far), (0, 3), 1)
        return SimpleNamespace(round=round_, judged=audited, channel=channel_of("model"))

    with ragtag.join() as crew:
        book = crew._peer.log
        for round_ in range(3):
            book.record_guard(judged(round_, 10.0 * (1 + round_)))
        book.record_guard(SimpleNamespace(round=3, judged=None, channel=0))
        clock.now_s += 11
        book.record_guard(judged(4, 40.0))
        book.record_guard(judged(5, 7.0))
    found = records(tmp_path, trace.Guarded)
    assert [(record.round, record.rounds, record.short) for record in found] == [(4, 4, 4), (5, 1, 1)]
    assert (found[0].peers, found[0].values, found[0].capped) == ([1, 2], [400, 1200], [0, 12])
    assert (found[0].cut, found[0].far) == ([0, 1], [1, 25])
    html = build_report(tmp_path).read_text()
    assert "<h2>Guard</h2>" in html
    assert "Chunks without an average, since too few shares came: 5." in html


def test_that_there_are_too_few_peers_for_a_guard_is_said_once_and_when_that_is_over(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = SimpleNamespace(node=SimpleNamespace(live=frozenset(range(5))))
    writer = TraceWriter(tmp_path / "peer-00.jsonl")
    book = logbook.Logbook(Place(0, 5, "otters"), crowd, writer, 0.0, {}, lambda: 0)  # type: ignore[arg-type]

    def round_(peers: int, averaged: bool) -> None:
        crowd.node.live = frozenset(range(peers))
        book.record_guarded(TrimmedMean(0.2), replace(outcome([{0}]), averaged=np.array([averaged])))

    for peers, averaged in ((5, True), (5, False), (3, True), (2, False), (2, False), (1, False), (3, False)):
        round_(peers, averaged)
    assert (
        caplog.text.count("unguarded as 2 peers are left: 1 may lie, and an average takes the shares of 3")
        == 1
    )
    assert "guarded again" not in caplog.text, "no average has come yet"
    round_(4, True)
    round_(4, True)
    writer.close()
    notes = records(tmp_path, trace.Note)
    assert [note.what for note in notes] == ["unguarded", "guarded again"]
    assert notes[1].detail == "by averages of 4 peers"


def test_a_peer_ends_at_the_round_up_to_which_it_kept_up(clock: Clock, tmp_path: Path) -> None:
    """Rounds that it added alone, after others went on without it, make what the others have no older."""
    with ragtag.join() as crew:
        crew._peer.log.record_leave(
            False, [Stand("ab", current=9, round=12), Stand("cd", current=8, round=8)]
        )
    (leave,) = records(tmp_path, trace.Leave)
    assert leave.round == 9


@pytest.mark.parametrize("peers", [(0,), (0, 2)])
def test_a_peer_that_ends_with_others_does_not_end_alone(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, peers: tuple[int, ...]
) -> None:
    """Its last rounds were alone, and at the end it has met the others."""
    with ragtag.join() as crew:
        for heard in [{0, 2}, *[{0}] * ALONE_AFTER]:
            crew._peer.log.record_round(replace(outcome([heard]), waited_for=(), missed=()))
        clock.now_s += 5.0
        crew._peer._tell_finished(Finished("ab", peers=peers))
    whats = [note.what for note in records(tmp_path, trace.Note)]
    with_others = len(peers) > 1
    assert [what for what in whats if what.endswith("alone")] == ["alone", "no longer alone"][
        : 1 + with_others
    ]
    assert f"spent {ALONE_AFTER} of its 4 rounds alone" in caplog.text
    assert ("and ends alone" in caplog.text) is not with_others
    assert ("and 5.0 s: peer 2 is heard" in caplog.text) is with_others


def train(crew: Crew, clock: Clock, steps: int, tell: Any = None, closure: bool = False) -> None:
    """So many steps, ``STEP_S`` each; ``tell(loss)`` after each."""
    model = torch.nn.Linear(3, 1)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, every=7)
    loader = DataLoader(TensorDataset(torch.ones(steps * BATCH, 3)), batch_size=BATCH)
    for at, (inputs,) in enumerate(crew.split(loader)):
        clock.step()

        def loss_of(inputs: torch.Tensor = inputs, at: int = at) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean() * 0.0 + at
            loss.backward()
            return loss

        if closure:
            optimizer.step(loss_of)
        else:
            loss = loss_of()
            optimizer.step()
            if tell is not None:
                tell(loss)


def records(folder: Path, kind: type) -> list[Any]:
    return [record for record in read_run(folder).records() if isinstance(record, kind)]


def test_each_comparison_of_replicas_is_told_once_the_last_one_too(tmp_path: Path, clock: Clock) -> None:
    """It ends with the round after the one after which it began."""
    with ragtag.join() as crew:
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = crew.optimizer(sgd, model=model, average="gradients", align=ragtag.Align(every=4))
        for _ in range(12):
            clock.step()
            optimizer.zero_grad()
            model(torch.ones(BATCH, 3)).sum().backward()
            optimizer.step()
    found = records(tmp_path, trace.Align)
    first = found[0].round
    assert [(record.round, record.channel) for record in found] == [
        (first, "model"), (first + 4, "model"), (first + 8, "model")
    ]  # fmt: skip


def test_steps_and_samples_are_counted_by_themselves_at_a_bounded_rate(tmp_path: Path, clock: Clock) -> None:
    with ragtag.join() as crew:
        train(crew, clock, 100)
    found = records(tmp_path, trace.Step)
    assert 100 * STEP_S * 1.5 <= len(found) <= 100 * STEP_S * 2 + 2
    assert (found[0].step, found[0].samples) == (1, BATCH)
    assert (found[-1].step, found[-1].samples) == (100, 100 * BATCH)
    assert all(step.loss is UNSET for step in found)
    (left,) = records(tmp_path, trace.Leave)
    assert (left.steps, left.samples) == (100, 100 * BATCH)
    (peer,) = report_json(tmp_path)["per_peer"]
    assert (peer["steps"], peer["samples"]) == (100, 100 * BATCH)


@pytest.mark.parametrize("closure", [False, True])
def test_a_loss_is_told_by_log_or_by_a_closure(tmp_path: Path, clock: Clock, closure: bool) -> None:
    with ragtag.join() as crew:
        train(crew, clock, 50, lambda loss: crew.log(loss=loss, accuracy=0.5), closure)
    found = [step for step in records(tmp_path, trace.Step) if step.loss is not UNSET]
    assert 50 * STEP_S * 1.5 <= len(found) <= 50 * STEP_S * 2 + 2
    assert all(step.loss in (step.step - 1, step.step - 2) for step in found)  # that of the newest batch told
    assert found[-1].loss == 49
    looks = records(tmp_path, trace.Eval)
    assert (len(looks) > 0) is not closure
    assert all(look.accuracy == 0.5 and look.model == "own" for look in looks)


def test_what_a_script_logs_itself_is_not_counted_twice(tmp_path: Path, clock: Clock) -> None:
    with ragtag.join() as crew:
        train(crew, clock, 30, lambda loss: crew.log_step(float(loss), BATCH))
        crew.log_eval(0.75, loss=1.5, n=10)
    found = records(tmp_path, trace.Step)
    own = [step for step in found if step.loss is not UNSET]
    assert [(step.step, step.samples, step.loss) for step in own] == [
        (at + 1, (at + 1) * BATCH, at) for at in range(30)
    ]
    assert len(found) - len(own) <= 1  # before the script had logged anything
    (left,) = records(tmp_path, trace.Leave)
    assert (left.steps, left.samples) == (30, 30 * BATCH)
    (look,) = records(tmp_path, trace.Eval)
    assert (look.step, look.accuracy, look.loss) == (30, 0.75, 1.5)


def test_two_optimizers_in_a_step_count_one(tmp_path: Path, clock: Clock) -> None:
    with ragtag.join() as crew:
        for step in range(10):
            for number in range(1 + step % 2):  # the second one steps half as often
                crew._peer.log.stepped(number)
    (left,) = records(tmp_path, trace.Leave)
    assert left.steps == 10


@pytest.mark.parametrize("figure", ["0.5", torch.ones(3), [1.0], torch.ones(0)])
def test_a_figure_is_one_number(clock: Clock, figure: Any) -> None:
    with ragtag.join() as crew:
        for name in ("loss", "accuracy"):
            with pytest.raises(
                TypeError, match=f"{name} is a .*; it is a number, or a tensor of one element"
            ):
                crew.log(**{name: figure})
        with pytest.raises(ValueError, match=r"accuracy is 97\.5; it is a share from 0 to 1"):
            crew.log(accuracy=97.5)


def test_a_step_without_a_loss_is_neither_good_nor_bad_news() -> None:
    def step(n: int, **loss: Any) -> trace.Record:
        return trace.decode(trace.encode(trace.Step(t=float(n), peer=0, step=n, samples=n, **loss)))

    peers = PeerTable(1)
    row = peers.row(0)
    peers.feed(step(1, loss=2.0))
    peers.feed(step(2))
    assert (row.step, list(row.losses), row.loss_bad) == (2, [2.0], False)
    peers.feed(step(3, loss=math.nan))
    peers.feed(step(4))
    assert (row.step, row.loss_bad) == (4, True)
