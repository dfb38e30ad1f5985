"""What catching up needs of a live crew: to hear when others begin, and to get their state or the reason."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.app.crew.donors import LiveDonors
from ragtag.app.crew.transport import DriverTransport
from ragtag.codecs.dense import fp32
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Noted
from ragtag.network.driver.driver import DriverFailed
from ragtag.protocols.crew.standing import NO_STATE
from ragtag.protocols.membership.roster import Card, Holder
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.transfer.types import Fetched
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.abreast import Abreast
from ragtag.training.state.capture import capture
from ragtag.training.state.keeper import CrewsState, StateKeeper
from tests.network.crew import PATIENCE_S, Crew, values_of
from tests.training.fake_transport import FakeCrew

KEY = bytes(32)


def optimizer_of(model: nn.Module, average: str = "gradients") -> CrewOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return CrewOptimizer(inner, FakeCrew(1).transport(0), average=average, model=model)


def test_it_hears_when_another_has_begun() -> None:
    schema = Schema((TensorSpec("weight", (300,), "float32"),), "fp32", direct.name)
    values = np.zeros((schema.n_chunks(fp32.elements), fp32.elements), np.float32)
    with Crew(2) as crew, ThreadPoolExecutor(2) as pool:
        first, second = (DriverTransport(crew.drivers[peer], PATIENCE_S) for peer in (0, 1))
        list(pool.map(lambda t: t.configure(0, schema, direct, fp32), (first, second)))
        assert not first.await_newer(0, 0.05), "nobody has"
        heard = pool.submit(first.await_newer, 0, PATIENCE_S)
        pending = second.start(0, values, 1.0)
        assert heard.result(PATIENCE_S)
        first.start(0, values, 0.0).wait()
        pending.wait()
        assert not first.await_newer(0, 0.05), "that round is over"
        waits = pool.submit(first.await_newer, 0, PATIENCE_S)
        crew.drivers[0].close(1.0)
        with pytest.raises(DriverFailed):
            waits.result(PATIENCE_S)
        with pytest.raises(DriverFailed):
            first.await_newer(0, PATIENCE_S)


def test_peers_that_are_all_behind_do_not_wait_for_each_other() -> None:
    """The ones with the newest state go on; the other one hears of them, and follows."""
    with Crew(3) as crew, ThreadPoolExecutor(3) as pool:
        transports = [DriverTransport(crew.drivers[peer], PATIENCE_S) for peer in range(3)]
        for transport, round_ in zip(transports, (8, 9, 9), strict=True):
            transport.standing.behind(0, round_)
        began_s = time.monotonic()
        heard = [pool.submit(transport.await_newer, 0, PATIENCE_S) for transport in transports]
        assert [future.result(PATIENCE_S) for future in heard[1:]] == [False, False]
        assert [transport.standing.ahead(0) for transport in transports] == [True, False, False]
        for transport in transports[1:]:
            transport.standing.abreast(0)
        rounds = [crew.ask(peer, values_of(peer, crew.n_chunks)) for peer in (1, 2)]
        assert heard[0].result(PATIENCE_S), "somebody is ahead of it, and begins a round"
        crew.ask(0, values_of(0, crew.n_chunks), 0.0).result(PATIENCE_S)
        assert all(future.result(PATIENCE_S).averaged.all() for future in rounds)
        assert time.monotonic() - began_s < PATIENCE_S / 4


def test_without_what_follows_there_is_nothing_to_do() -> None:
    keeper, donors = StateKeeper(0, 0, lambda note: None), LiveDonors(KEY, dict)
    with pytest.raises(RuntimeError, match="make the crew's optimizer first"):
        keeper.asking(donors, tuple)
    with Crew(1) as crew:
        abreast = Abreast(keeper, DriverTransport(crew.drivers[0], PATIENCE_S), donors)
        for average in (None, "models"):
            if average is not None:
                keeper.take_in(optimizer_of(nn.Linear(2, 2), average)._averaged)
            with pytest.raises(RuntimeError, match="it has nothing to follow"):
                abreast.catch_up(new=True, state_round=NO_STATE)


@pytest.mark.parametrize(
    ("average", "says"),
    [
        ("gradients", "no member gives its state"),
        ("models", "no member gives its state; averages bring the model"),
    ],
)
def test_where_nobody_gives_the_state_the_note_says_what_that_means(average: str, says: str) -> None:
    notes: list[Noted] = []
    keeper = StateKeeper(3, 0, notes.append)
    keeper.take_in(optimizer_of(nn.Linear(2, 2), average)._averaged)
    assert keeper.asking(LiveDonors(KEY, dict), tuple)(1.0).result(PATIENCE_S) is None
    assert notes == [Noted("no state", 3, says)]


def test_a_state_of_another_model_changes_nothing_and_is_named() -> None:
    notes: list[Noted] = []
    keeper = StateKeeper(3, 0, notes.append)
    model = nn.Linear(2, 2)
    keeper.take_in(optimizer_of(model)._averaged)
    before = model.weight.detach().clone()
    other = capture(optimizer_of(nn.Linear(2, 5))._averaged, round=7)
    fetched = Fetched(bytearray(), 7, 7, {7: 3, 6: 1}, True, {"peer-0": 4}, {}, 0, 0.1)
    state = CrewsState(other, fetched)
    assert (state.round, state.mixed) == (7, True)
    assert not keeper.put(state)
    assert torch.equal(before, model.weight)
    assert [note.what for note in notes] == ["no state"] and "weight" in notes[0].detail
    own = CrewsState(capture(optimizer_of(nn.Linear(2, 2))._averaged, round=7), fetched)
    assert keeper.put(own) and [note.what for note in notes] == ["no state", "state"]


def test_a_state_is_asked_for_by_another_thread_without_touching_the_model() -> None:
    notes: list[Noted] = []
    keeper = StateKeeper(0, 0, notes.append)
    model = nn.Linear(2, 2)
    keeper.take_in(optimizer_of(model)._averaged)
    with socket.create_server(("127.0.0.1", 0)) as gone:  # nobody listens there any more
        port = gone.getsockname()[1]
    holder = Holder("peer-1", 0, Card(3, 1, 0, 0, True, "127.0.0.1", 1, port, 2, 0))
    asked = keeper.asking(LiveDonors(KEY, lambda: {1: holder}), tuple)
    del keeper.first.inner.param_groups[:]  # what it needs it has asked the trainer's thread for
    assert asked(PATIENCE_S).result(PATIENCE_S) is None
    assert notes[-1].what == "no state" and "nobody listens" in notes[-1].detail
