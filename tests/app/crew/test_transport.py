"""How training reaches its crew, over drivers in one process: agreeing on a model, refusing, going on."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ragtag
from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults, Loss
from ragtag.core.schema import Schema, SchemaMismatch, TensorSpec
from ragtag.core.types import Average, Offer, OpenedTogether, Outcome
from ragtag.network.driver.driver import Driver, DriverFailed
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.crew.joining import Timed
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.rps import rps
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.samples.answers import Answers
from ragtag.training.samples.portion import Portion
from tests.app.drivers import Train, all_at_once, step, tiny, transports
from tests.network.crew import PATIENCE_S, Crew, until

GIVE_UP_S = 2.0
"""How long peers wait for one that a test leaves out on purpose."""


def schema_of(*shape: int, name: str = "weight", dtype: str = "float32") -> Schema:
    return Schema((TensorSpec("bias", (3,), "float32"), TensorSpec(name, shape, dtype)), "fp32", direct.name)


def joining(schema: Schema, rounds: int = 4) -> Train:
    """Configure channel 0, and average one's own number; the last outcome."""

    def work(transport: DriverTransport) -> Outcome:
        transport.configure(0, schema, direct, fp32)
        values = np.full((schema.n_chunks(fp32.elements), fp32.elements), transport.me, np.float32)
        return [transport.start(0, values, 1.0).wait() for _ in range(rounds)][-1]

    return work


# -- Alone


def test_alone_every_average_is_ones_own() -> None:
    solo = SoloTransport(3)
    schema = schema_of(400, 2)
    solo.configure(0, schema, direct, fp32)
    values = np.random.default_rng(1).standard_normal((schema.n_chunks(fp32.elements), fp32.elements))
    for _ in range(2):
        outcome = solo.start(0, values.astype(np.float32), 1.0).wait()
        np.testing.assert_array_equal(outcome.mean, values.astype(np.float32))
        assert outcome.heard.tolist() == [1] * len(values)
    assert (solo.me, solo.n, solo.live) == (0, 1, {0})


# -- Going on after an interrupt


def test_a_round_that_its_trainer_broke_off_ends_before_the_next_begins() -> None:
    """Ctrl-C in a notebook, amid a step: the next one raised "a round of channel ... is not done yet"."""
    schema = schema_of(400, 2)
    values = np.zeros((schema.n_chunks(fp32.elements), fp32.elements), np.float32)

    def train(transport: DriverTransport) -> Outcome:
        transport.configure(0, schema, direct, fp32)
        transport.start(0, values, 1.0)  # the interrupt comes before its wait() is over
        return transport.start(0, values, 1.0).wait()

    with Crew(2) as crew:
        came = all_at_once(transports(crew), train)
    assert [(one.round, one.heard.tolist()) for one in came.values()] == [(1, [0b11] * len(values))] * 2, came


# -- Agreeing


def test_three_peers_train_a_model_and_hold_the_same_bits() -> None:
    rank_inputs = [torch.randn(8, 4, generator=torch.Generator().manual_seed(peer)) for peer in range(3)]
    models = [tiny(seed=0) for _ in range(3)]
    started = [p.detach().clone() for p in models[0].parameters()]

    def train(transport: DriverTransport) -> list[Outcome]:
        model = models[transport.me]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = CrewOptimizer(sgd, transport, method=ragtag.AllReduce(), model=model)
        outcomes = []
        for _ in range(3):
            step(model, optimizer, rank_inputs[transport.me])
            assert optimizer.outcome is not None
            outcomes.append(optimizer.outcome)
        return outcomes

    with Crew(3) as crew:
        came = all_at_once(transports(crew), train)
    assert all(isinstance(outcomes, list) for outcomes in came.values()), came
    assert [o.heard.tolist() for outcomes in came.values() for o in outcomes] == [[0b111]] * 9
    for others in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(others[0], others[1])
        assert torch.equal(others[0], others[2])
    # and that is what one process comes to that averages by hand
    alone = [tiny(seed=0) for _ in range(3)]
    for _ in range(3):
        for model, inputs in zip(alone, rank_inputs, strict=True):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in alone), strict=True):
                mean = torch.stack(list(same)).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    for here, there, before in zip(models[0].parameters(), alone[0].parameters(), started, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
        assert not torch.equal(here, before)


@pytest.mark.parametrize("looks", [False, True])
def test_a_round_knows_for_how_long_its_trainer_went_on_beside_the_last(looks: bool) -> None:
    """Until it first looked whether the round is over, or waited for it, by the driver's clock."""
    asked: list[float] = []
    schema = schema_of(400, 2)
    values = np.zeros((schema.n_chunks(fp32.elements), fp32.elements), np.float32)

    def train(transport: DriverTransport) -> None:
        transport.configure(0, schema, direct, fp32)
        driver, clock_s = transport._driver, [0.0]
        average = driver.average

        def noted(ask: Average | Offer) -> Future[Outcome]:
            asked.append(ask.overlap_s)
            return average(ask)

        if transport.me == 0:
            driver.now_s, driver.average = lambda: clock_s[0], noted  # type: ignore[method-assign]
        for went_on_s in (0.5, 0.25, 0.0, 0.0):
            pending = transport.start(0, values, 1.0)
            clock_s[0] += went_on_s
            if looks:
                assert pending.over in (True, False)
                clock_s[0] += 8.0
            pending.wait()
            clock_s[0] += 8.0

    with Crew(2) as crew:
        came = all_at_once(transports(crew), train)
    assert came == {0: None, 1: None}
    assert asked == [0.0, 0.5, 0.25, 0.0]


def test_what_some_open_together_waits_for_no_others_and_these_own_nothing_of_it() -> None:
    """As at the end, where one peer trains on. ``PATIENCE_S`` would be over for it in vain."""
    schema = schema_of(400, 2)

    def work(transport: DriverTransport) -> tuple[float, Outcome]:
        first = joining(schema, rounds=1)(transport)
        began_s = time.monotonic()
        if transport.me == 0:
            return 0.0, first
        together = OpenedTogether(PATIENCE_S, frozenset({1, 2}))
        transport.configure(1, schema, direct, fp32, together=together)
        values = np.full((schema.n_chunks(fp32.elements), fp32.elements), transport.me, np.float32)
        found = transport.start(1, values, 1.0).wait()
        return time.monotonic() - began_s, found

    with Crew(3) as crew:
        came = all_at_once(transports(crew), work)
    for peer in (1, 2):
        took_s, outcome = came[peer]
        assert took_s < PATIENCE_S / 4
        assert outcome.heard.tolist() == [0b110] * len(outcome.heard)
        assert (outcome.mean == 1.5).all()


def test_a_peer_sees_that_others_have_begun_a_round() -> None:
    schema = schema_of(400, 2)
    values = np.zeros((schema.n_chunks(fp32.elements), fp32.elements), np.float32)
    with Crew(2) as crew:
        of = transports(crew)
        assert not of[0].newer(0), "it is not open yet"
        all_at_once(of, joining(schema, rounds=1))
        assert not of[0].newer(0)
        begun = of[1].start(0, values, 1.0)
        until(lambda: of[0].newer(0), "that peer 1 has begun")
        assert of[0].start(0, values, 1.0).wait().heard.tolist() == [0b11] * len(values)
        begun.wait()
        assert not of[0].newer(0) and not of[1].newer(0)


def test_ready_is_said_once_when_the_first_channel_is() -> None:
    with Crew(2) as crew:
        said: list[tuple[int, str]] = []
        of = {
            p: DriverTransport(d, PATIENCE_S, lambda method, p=p: said.append((p, method)))
            for p, d in crew.drivers.items()
        }
        schema, other = schema_of(4), schema_of(500, name="other")

        def two_channels(transport: DriverTransport) -> list[int]:
            transport.configure(0, schema, direct, fp32)
            seen = said.count((transport.me, direct.name))
            transport.configure(1, other, direct, fp32)
            return [seen, said.count((transport.me, direct.name))]

        assert all_at_once(of, two_channels) == {0: [1, 1], 1: [1, 1]}


def test_two_channels_of_one_schema_do_not_mix_and_none_is_opened_twice() -> None:
    """Two models of one architecture: their hashes of tensors are equal."""
    schema, names = schema_of(2000), {"a": 1.0, "b": 100.0}

    def work(transport: DriverTransport) -> list[set[float]]:
        for name in names:
            transport.configure(channel_of(name), schema, direct, fp32)
            with pytest.raises(ValueError, match="averaged under this name already"):
                transport.configure(channel_of(name), schema, direct, fp32)
        table = np.ones((schema.n_chunks(fp32.elements), fp32.elements), np.float32)
        seen: list[set[float]] = []
        for _ in range(4):
            # of both rounds at a time, and one peer begins them the other way round
            order = sorted(names, reverse=transport.me == 1)
            pending = {name: transport.start(channel_of(name), names[name] * table, 1.0) for name in order}
            outcomes = {name: pending[name].wait() for name in names}
            assert all(outcome.channel == channel_of(name) for name, outcome in outcomes.items())
            assert all((outcome.heard == 0b111).all() for outcome in outcomes.values())
            seen += [set(np.unique(outcome.mean).tolist()) for outcome in outcomes.values()]
        return seen

    with Crew(3) as crew:
        assert all_at_once(transports(crew), work) == {peer: [{1.0}, {100.0}] * 4 for peer in range(3)}


def test_no_probe_ends_while_others_still_need_repairs_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k opens two channels, K-FAC more. A peer that has gone on to the next still answers for the last.

    All probes had one channel, and opening it anew dropped what others had not got yet: of four peers one
    waited for it until the deadline, and three for that one, at one datagram in ten lost.
    """
    schemas = [schema_of(400, 200, name=f"weight-{at}") for at in range(6)]
    missed: list[tuple[int, ...]] = []

    def timed(outcome: Outcome, rtt_s: float) -> Timed:
        missed.append(outcome.missed)
        return Timed(max(outcome.scatter_s, outcome.gather_s), rtt_s, outcome.round)

    monkeypatch.setattr(Timed, "of", timed)

    def work(transport: DriverTransport) -> None:
        for at, schema in enumerate(schemas):
            transport.configure(channel_of(f"c{at}"), schema, direct, fp32)

    with Crew(4, faults=Faults(loss=Loss(0.1)), probe_s=2 * PATIENCE_S) as crew:
        assert set(all_at_once(transports(crew), work).values()) == {None}
    assert missed == [()] * (2 * len(schemas) * 4)


# -- Refusing


def test_a_peer_with_another_model_is_refused_by_the_name_of_its_first_tensor_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = schema_of(10, 20), schema_of(20, 10)
    with Crew(3) as crew, caplog.at_level(logging.WARNING, "ragtag"):
        of = transports(crew)
        came = all_at_once(of, {0: joining(ours), 1: joining(ours), 2: joining(theirs)})
        assert isinstance(came[2], SchemaMismatch)
        assert str(came[2]) == (
            "peer 2 averages something else than peers 0 and 1: tensor 1: 'weight' (20, 10) float32 here, "
            "(10, 20) float32 there. Build the same model, with the same averager and settings, on every peer"
        )
        for peer in (0, 1):
            assert came[peer].heard.tolist() == [0b011]
            assert (came[peer].mean == 0.5).all()
            assert of[peer].live == {0, 1}
    refused = [r.message for r in caplog.records if "peer 2 is refused" in r.message]
    assert len(refused) == 2
    assert all("tensor 1: 'weight' (10, 20) float32 here, (20, 10)" in message for message in refused)


def test_of_two_peers_both_raise() -> None:
    with Crew(2) as crew:
        came = all_at_once(transports(crew), {0: joining(schema_of(4)), 1: joining(schema_of(4, name="w"))})
    for peer in (0, 1):
        assert isinstance(came[peer], SchemaMismatch)
        here, there = ("weight", "w")[peer], ("weight", "w")[1 - peer]
        assert f"tensor 1: {here!r} (4,) float32 here, {there!r} (4,) float32 there" in str(came[peer])


def test_models_that_differ_in_dtype_or_averager_refuse_each_other() -> None:
    def by_model(dtype: torch.dtype, method: Any) -> Train:
        def work(transport: DriverTransport) -> None:
            model = tiny(dtype=dtype)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            CrewOptimizer(sgd, transport, method=method, model=model)

        return work

    for mine, yours, said in (
        ((torch.float32, rps), (torch.bfloat16, rps), "tensor 0: '0.weight' (5, 4) float32 here, (5, 4) bfl"),
        ((torch.float32, rps), (torch.float32, direct), f"averages by {rps.name}, the other {direct.name}"),
    ):
        with Crew(2) as crew:
            came = all_at_once(transports(crew), {0: by_model(*mine), 1: by_model(*yours)})
        assert isinstance(came[0], SchemaMismatch)
        assert isinstance(came[1], SchemaMismatch)
        assert said in str(came[0])


# -- Going on without


def test_a_peer_whose_parameter_is_nan_raises_its_name_and_the_others_go_on() -> None:
    models = [tiny() for _ in range(3)]

    def train(transport: DriverTransport) -> tuple[int, ...]:
        model = models[transport.me]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = CrewOptimizer(sgd, transport, method=direct, model=model)
        heard = []
        for at in range(10):
            if transport.me == 1 and at == 2:
                with torch.no_grad():
                    model[2].bias[1] = float("nan")
                try:
                    optimizer.step()
                finally:
                    crew.drivers[1].close(1.0)  # as a script that ends does
            step(model, optimizer, torch.ones(2, 4))
            assert optimizer.outcome is not None
            heard.append(int(optimizer.outcome.heard[0]))
        return tuple(heard)

    with Crew(3) as crew:
        came = all_at_once(transports(crew), train)
    assert isinstance(came[1], ragtag.NotFinite)
    assert "'2.bias'" in str(came[1])
    assert "1 of 2 values" in str(came[1])
    for peer in (0, 2):
        assert 0b101 in came[peer][2:]  # not in each: on a busy machine a deadline may be short
        assert not any(heard & 0b010 for heard in came[peer][2:])
        assert all(parameter.isfinite().all() for parameter in models[peer].parameters())


def test_a_peer_that_died_before_its_first_average_holds_nobody_up_for_longer_than_the_deadline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragtag.app.crew.transport._SAID_AFTER_S", GIVE_UP_S / 4)
    with Crew(3, absent=[2]) as crew, caplog.at_level(logging.WARNING, "ragtag"):
        of = transports(crew, GIVE_UP_S)
        began_s = time.monotonic()
        came = all_at_once(of, joining(schema_of(300, 20)))
        took_s = time.monotonic() - began_s
    for peer in (0, 1):
        assert came[peer].heard.tolist() == [0b011] * len(came[peer].heard)
        assert (came[peer].mean == 0.5).all()
    waiting = "waiting for peer 2 to make a model, as all do, for "
    assert sum(waiting in said for said in caplog.messages) == 2, "once each"
    assert "peer 2 has not made a model yet; going on without" in caplog.messages
    assert GIVE_UP_S <= took_s < PATIENCE_S


def test_who_left_before_it_was_known_for_a_member_is_absent_once_it_answers_nothing() -> None:
    """At the end of a short run two peers waited for it until their deadline."""
    notices = Notices(frozenset({1, 2, 3, 4}), {}, {}, silent=frozenset({1, 2, 3}))
    driver = SimpleNamespace(
        node=SimpleNamespace(me=0, gone=frozenset({1})),
        seats={0: "otter-0", 1: "otter-1", 2: "otter-2", 4: "otter-4"},
        notices=lambda topic: notices,
    )
    by_membership = DriverTransport(driver, GIVE_UP_S, entrance=object())  # type: ignore[arg-type]
    assert by_membership.absent(0) == {1, 3}, "2 is a member, and silent for now"
    driver.seats = {}
    assert DriverTransport(driver, GIVE_UP_S).absent(0) == {1, 2, 3}  # type: ignore[arg-type]


def test_a_wait_ends_when_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with Crew(2) as crew:
        of = transports(crew)
        all_at_once(of, joining(schema_of(4)))
        # no timer runs out from now on: the round lacks the other peer, and would end by its deadline
        monkeypatch.setattr(crew.drivers[0].engine, "_expire", lambda now_s: None)
        pending = of[0].start(0, np.zeros((1, fp32.elements), np.float32), 1.0, PATIENCE_S)
        closing = threading.Thread(target=crew.drivers[0].close, args=(0.0,))
        closing.start()
        with pytest.raises(DriverFailed, match="peer 0 has ended"):
            pending.wait()
        closing.join(PATIENCE_S)
        with pytest.raises(DriverFailed, match="has ended"):
            of[0].start(0, np.zeros((1, fp32.elements), np.float32), 1.0).wait()


def test_at_another_place_nothing_is_opened_that_all_opened_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came later never had it open: each such channel would cost the time that peers wait."""
    schema = schema_of(4)

    def work(transport: DriverTransport) -> DriverTransport:
        transport.configure(0, schema, direct, fp32)
        transport.configure(1, schema, direct, fp32, together=OpenedTogether(PATIENCE_S))
        return transport

    with Crew(2) as crew:
        transport = all_at_once(transports(crew), work)[0]
        assert isinstance(transport, DriverTransport)
        opened: list[int] = []
        monkeypatch.setattr(transport, "_open", lambda channel, *_: opened.append(channel))
        transport.moved(crew.drivers[0], SimpleNamespace(late=True))  # type: ignore[arg-type]
        assert opened == [0]
        transport.configure(1, schema, direct, fp32, together=OpenedTogether(PATIENCE_S))
        assert opened == [0, 1], "and it may be opened again"


def test_who_has_lost_its_seat_waits_for_nobodys_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears it any more; it goes on by itself until its next average, where it joins anew."""
    data = torch.utils.data.TensorDataset(torch.zeros(64, 1))
    with Crew(3) as crew:
        transport = DriverTransport(crew.drivers[0], PATIENCE_S)
        split = Portion(torch.utils.data.DataLoader(data, batch_size=8), 0, transport)
        first = iter(split)
        next(first)
        assert len(transport.live) == 3
        monkeypatch.setattr(Driver, "lost_seat", property(lambda driver: "seat 0 is p14's"))
        assert transport.live == {0}
        asked: list[bool] = []
        enough_know = Answers.enough_know

        def watched(answers: Answers, number: int) -> bool:
            enough = enough_know(answers, number)
            asked.append(enough and answers.all_know(number))
            return enough

        monkeypatch.setattr(Answers, "enough_know", watched)
        left = sum(len(batch[0]) for batch in first)
        assert left == 64 - 8 and asked and all(asked)
