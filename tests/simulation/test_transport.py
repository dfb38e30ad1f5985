"""Training code as users write it, in virtual time, with crashes, freezes and slow peers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.codecs.dense import fp32
from ragtag.core.faults import Crash, Faults, Freeze, Loss, OwnLine, Partition, Slow, Window
from ragtag.core.schema import Schema, SchemaMismatch, TensorSpec
from ragtag.core.types import Floats, Outcome, PeerSet
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.channel.averager import Averager, Channel
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.reduce import Values
from ragtag.protocols.rounds.robust import Shares
from ragtag.protocols.rounds.rps import rps
from ragtag.schedules import SSP, Partial
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import timeout_s
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport, Stuck
from ragtag.training.exchange.dense import Replica
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.tensors.layout import Part

STEP_S = 0.05


def crew(n: int, **faults: object) -> SimulatedCrew:
    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, **faults)  # type: ignore[arg-type]
    return SimulatedCrew(n, lines, seed=3, cost=ComputeCost(STEP_S), check=True)


def trained(peer: SimulatedTransport, steps: int = 20, **options: object) -> tuple[list[float], list[float]]:
    """The weights that it ends with, and when each step was over."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        peer,
        model=model,
        **options,  # type: ignore[arg-type]
    )
    samples = torch.Generator().manual_seed(peer.me)
    ended_s = []
    for _ in range(steps):
        peer.compute()
        x = torch.randn(8, 3, generator=samples)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        ended_s.append(peer.now_s())
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), ended_s


def test_a_probe_measures_lines_and_not_how_far_apart_meetings_end() -> None:
    """Where a hello is lost it is told again after .1 s, and one peer is so much later than the others."""

    def probed(peer: SimulatedTransport) -> list[float]:
        trained(peer, 1)
        channels = peer._node.channels.values()
        return [
            one.budgets.gather.probe_s
            for one in channels
            if isinstance(one, Rounds) and not one._channel.passing
        ]

    for seed in range(4):
        lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, loss=Loss(0.05))
        for found in SimulatedCrew(4, lines, seed=seed, cost=ComputeCost(STEP_S)).run(probed):
            assert found and max(found) < 0.01, "a few round trips of 2 ms"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"average": "gradients"},
        {"method": "moshpit=2"},
        {"method": "allreduce", "every": 3},
        {"compress": ragtag.TopK(0.5, bypass=False)},
        {"schedule": "softsync"},
    ],
    ids=str,
)
def test_it_learns_and_a_run_is_decided_by_its_seed(options: dict[str, object]) -> None:
    runs = [crew(3, loss=Loss(0.05)).run(lambda peer: trained(peer, **options)) for _ in range(2)]
    assert runs[0] == runs[1]
    for came in runs[0]:
        assert came is not None
        weights, ended_s = came
        assert torch.tensor(weights[:3]).sub(1.0).abs().max() < 0.75
        assert ended_s[-1] < 3 * 20 * STEP_S


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize(
    "more", [{}, {"method": ragtag.Moshpit(group=2)}, {"guard": ragtag.TrimmedMean(0.25)}]
)
def test_a_mean_that_is_off_is_found_whatever_the_codec(
    monkeypatch: pytest.MonkeyPatch, codec: str, more: dict[str, object]
) -> None:
    def train(peer: SimulatedTransport) -> object:
        return trained(peer, 3, codec=codec, **more)

    assert crew(4).run(train).count(None) == 0
    average, reduce = Values._average, Shares.reduce

    def off(self: Values, block: int) -> object:
        self._mean[self.spec.layout.spans[block]] *= 1.5
        return average(self, block)

    def beyond(self: Shares, block: int, mean: Floats, weight: Floats, heard: PeerSet) -> None:
        reduce(self, block, mean, weight, heard)
        mean *= 100.0

    monkeypatch.setattr(Values, "_average", off)
    monkeypatch.setattr(Shares, "reduce", beyond)
    with pytest.raises(InvariantBroken, match=r"a mean that is not|an average beyond"):
        crew(4).run(train)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_an_outcomes_mean_is_there_until_the_next_but_one_as_of_live_peers(codec: str) -> None:
    def train(peer: SimulatedTransport) -> list[bool]:
        outcomes: list[Outcome] = []
        means: list[bytes] = []

        def keep(outcome: Outcome) -> None:
            outcomes.append(outcome)
            means.append(outcome.mean.tobytes())

        trained(peer, 4, codec=codec, on_outcome=keep)
        return [outcome.mean.tobytes() == mean for outcome, mean in zip(outcomes, means, strict=True)]

    for kept in crew(3).run(train):
        assert kept == [False, False, True, True]


def test_computing_takes_as_long_as_the_cost_and_its_faults_say() -> None:
    slow = crew(3, slow=(Slow(2, 3.0),), freezes=(Freeze(1, 0.12, 0.5),))

    def train(peer: SimulatedTransport) -> list[float]:
        ended_s = []
        for _ in range(4):
            peer.compute()
            ended_s.append(round(peer.now_s(), 6))
        peer.pause(1.0)
        return [*ended_s, round(peer.now_s(), 6)]

    assert slow.run(train) == [
        [0.05, 0.1, 0.15, 0.2, 1.2],
        [0.05, 0.1, 0.65, 0.7, 1.7],
        [0.15, 0.3, 0.45, 0.6, 1.6],
    ]


def test_a_peer_that_crashes_stops_where_it_stands_and_the_others_go_on() -> None:
    said: list[str] = []

    def train(peer: SimulatedTransport) -> float:
        try:
            return trained(peer, 30)[1][-1]
        finally:
            said.append(f"peer {peer.me} ends at {peer.now_s():.2f} s")

    ends = crew(3, crashes=(Crash(1, 0.5),)).run(train)
    assert ends[1] is None
    assert said[0] == "peer 1 ends at 0.50 s"
    for at_s in (ends[0], ends[2]):
        assert at_s is not None and 30 * STEP_S <= at_s < 45 * STEP_S
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainer")]


def test_a_frozen_peer_comes_back_and_ends_with_the_others_model() -> None:
    ends = crew(3, freezes=(Freeze(2, 0.3, 0.6),)).run(lambda peer: trained(peer, 40))
    weights = [came[0] for came in ends if came is not None]
    assert len(weights) == 3
    spread = torch.tensor(weights)
    assert (spread - spread.mean(0)).abs().max() < 0.05


@pytest.mark.parametrize("schedule", [Partial(), SSP(2)], ids=repr)
def test_schedules_see_virtual_time(schedule: object) -> None:
    """A slow peer that steps at a tenth of the others' pace costs them little where none waits for it."""
    slow = crew(4, slow=(Slow(3, 10.0),))
    steps = {0: 60, 1: 60, 2: 60, 3: 6}
    ends = slow.run(lambda peer: trained(peer, steps[peer.me], schedule=schedule)[1][-1])
    fast_s = [at_s for at_s in ends[:3] if at_s is not None]
    pace = 60 * STEP_S
    assert max(fast_s) < (1.4 if isinstance(schedule, Partial) else 4.0) * pace


def test_errors_of_a_peer_come_out_and_end_all() -> None:
    def train(peer: SimulatedTransport) -> None:
        trained(peer, 3)
        if peer.me == 1:
            raise KeyError("mine")
        trained(peer, 3, name="more")

    with pytest.raises(KeyError, match="mine") as caught:
        crew(3).run(train)
    assert "peer 1 at " in caught.value.__notes__[0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainer")]

    def other(peer: SimulatedTransport) -> None:
        model = nn.Linear(3 + peer.me, 1)
        CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer, model=model)

    with pytest.raises(SchemaMismatch, match="weight"):
        crew(2).run(other)


def test_waiting_for_what_never_comes_is_said() -> None:
    lonely = crew(2)
    with pytest.raises(Stuck, match=r"peers wait: \{0: 'for a round of channel 7'"):
        lonely.run(lambda peer: lonely.outcome(peer.me, 7))


def test_outside_a_run_the_caller_drives_the_world() -> None:
    """A crew of one trains in its caller's thread, and sleeps in virtual time."""
    alone = crew(1)
    weights, ended_s = trained(alone.transport(0), 3)
    assert len(weights) == 4
    assert ended_s == pytest.approx([STEP_S, 2 * STEP_S, 3 * STEP_S])
    with pytest.raises(Stuck, match="peer 0 waits for channel 7"):
        alone.outcome(0, 7)


def test_a_line_is_timed_as_a_driver_would_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip of the line, and RFC 6298's margin for its jitter: four mean deviations."""
    assert timeout_s(Faults(latency_s=0.25)) == 0.5
    delays = np.random.default_rng(0).exponential(0.1, (200_000, 2)).sum(1)
    measured = 2 * 0.25 + delays.mean() + 4 * np.abs(delays - delays.mean()).mean()
    assert timeout_s(Faults(latency_s=0.25, jitter_s=0.1)) == pytest.approx(measured, rel=0.01)
    jittery = crew(1, jitter_s=0.002)
    opened: list[Channel] = []
    configure = jittery.nodes[0].configure

    def noted(number: int, channel: Channel, now_s: float = 0.0) -> None:
        opened.append(channel)
        configure(number, channel, now_s)

    monkeypatch.setattr(jittery.nodes[0], "configure", noted)
    trained(jittery.transport(0), 1)
    assert opened
    assert {channel.rtt_s for channel in opened} == {timeout_s(jittery.world.faults)}


def test_peers_alike_soon_average_whole() -> None:
    """On lines of a tenth of a millisecond, in steps of a second that differ by three hundredths."""
    n, seeds, rounds, missed = 8, 4, 12, np.zeros(12)

    def train(transport: SimulatedTransport) -> None:
        def told(outcome: Outcome) -> None:
            if outcome.round < rounds:
                missed[outcome.round] += len(outcome.missed)

        optimizer = CrewOptimizer(
            torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), transport, on_outcome=told
        )
        for _ in range(rounds):
            transport.compute()
            optimizer.step()

    for seed in range(seeds):
        SimulatedCrew(n, Faults(latency_s=1e-4), seed, cost=ComputeCost(1.0, sigma=0.03)).run(train)
    share = missed / (n * (n - 1) * seeds)
    assert share[1:4].mean() < 0.03
    assert share[1:].mean() < 0.02


@pytest.mark.parametrize("method", [direct, rps], ids=lambda method: method.name)
def test_a_peer_across_a_long_line_is_in_rounds_again_after_a_cut(method: Averager) -> None:
    """Nodes are told how far it is, as drivers tell them: rounds of the others are shorter than its line."""
    n, far = 4, 3
    cut = Partition(frozenset({far}), Window(1.0, 2.0))
    lines = Faults(
        latency_s=0.0004, partitions=(cut,), rate_bytes_per_s=1e8, lines=(OwnLine(far, 1e8, 0.04),)
    )
    rounds = SimulatedCrew(n, lines, seed=3, cost=ComputeCost(0.01), check=True)

    def train(peer: SimulatedTransport) -> list[tuple[float, bool]]:
        values, whole = torch.full((8,), float(peer.me)), list[tuple[float, bool]]()
        part = Replica([Part("values", "parameter", lambda: values)], peer, method, fp32)
        while peer.now_s() < 4.0:
            peer.compute()
            whole.append((peer.now_s(), bool((part.average().heard == (1 << n) - 1).all())))
        return whole

    for seen in rounds.run(train):
        assert seen is not None
        assert not any(whole for at_s, whole in seen if 1.3 < at_s < 1.9)
        # what begins last may be without one that has ended
        assert np.mean([whole for at_s, whole in seen if 3.0 < at_s < 3.9]) > 0.95


@pytest.mark.parametrize("latency_s", [1e-4, 0.05])
def test_peers_that_come_one_after_the_other_over_slow_lines_average_all_together(latency_s: float) -> None:
    """The first one's rounds are over at once, and a round of four takes .6 s of the lines.

    By what its own rounds had taken each peer went on before another's copies could come, and none was in
    any average of the others in the seconds after.
    """
    lines = Faults(latency_s=latency_s, rate_bytes_per_s=2.5e6)
    comes = {1: 0.5, 2: 0.6, 3: 1.0}
    crew = SimulatedCrew(4, lines, seed=3, cost=ComputeCost(0.005, sigma=0.1), check=True, comes=comes)
    schema = Schema((TensorSpec("values", (250_000,), "float32"),), fp32.name, rps.name)

    def body(peer: SimulatedTransport) -> list[float]:
        peer.configure(1, schema, rps, fp32)
        if peer.late:
            peer.take_part(1, -1)
        values, whole = np.zeros((schema.n_chunks(fp32.elements), fp32.elements), np.float32), list[float]()
        while peer.now_s() < 6.0:
            peer.compute()
            outcome = peer.start(1, values, 1.0).wait()
            if peer.now_s() > 3.5:
                whole.append(float(np.mean(outcome.heard == 0b1111)))
        return whole

    for whole in crew.run(body):
        assert whole is not None and len(whole) >= 2 and np.mean(whole) > 0.9, whole
