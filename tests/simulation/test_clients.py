"""Clients in virtual time: they give and take, and own nothing while anybody else is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.faults import Crash, Faults, Freeze, Loss, OwnLine
from ragtag.core.types import Noted, Outcome
from ragtag.protocols.channel.at_once import UNOWNED
from ragtag.protocols.channel.averager import Averager, guarded
from ragtag.protocols.node import GONE_AFTER
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.named import NamedTensors
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.simulation.averaging import CHUNKS, ROUNDS, Train, averages

LATENCY_S, RATE = 0.001, 1e8
LINES = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE)
TRIMMED = guarded(ragtag.RPS(), ragtag.TrimmedMean(liars=0.2))


def crew(n: int, clients: int, faults: Faults = LINES, **options: object) -> SimulatedCrew:
    return SimulatedCrew(
        n, faults, seed=3, cost=ComputeCost(0.05), check=True, clients=clients,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def ran(sim: SimulatedCrew, train: Train) -> list[list[Outcome]]:
    return [outcomes for outcomes in sim.run(train) if outcomes is not None]


@pytest.mark.parametrize(
    "by",
    [
        ragtag.RPS(), ragtag.RPS(repair=True, quorum=4), ragtag.AllReduce(), TRIMMED,
        ragtag.RPS(shares="measured"), ragtag.AllReduce(shares="measured"),
    ],
    ids=lambda by: by.name + ("" if by.guard is None else ", guarded"),
)  # fmt: skip
def test_the_average_is_what_it_is_where_all_own_a_share(by: Averager) -> None:
    before, sim = ran(crew(6, 0), averages(by)), crew(6, 2)
    after = ran(sim, averages(by))
    for one, other in zip(before, after, strict=True):
        for expected, came in zip(one, other, strict=True):
            assert came.averaged.all() and (came.heard == 0b111111).all() and (came.weight == 6).all()
            np.testing.assert_array_equal(came.mean, expected.mean)
            assert came.missed == ()
    assert [len(rounds[0].waited_for) for rounds in after] == [
        5,
        5,
        5,
        5,
        4,
        4,
    ]  # clients owe clients nothing
    assert max(o.total_s for o in after[0]) < 1.25 * max(o.total_s for o in before[0])


def test_owners_cut_the_whole_evenly_among_them_and_a_client_sends_all_of_its_own_once() -> None:
    """An owner of a quarter sends three quarters of its own, and its quarter's average to five others."""
    chunk, moved = 1200, []
    for rounds in (ROUNDS, 2 * ROUNDS):
        sim = crew(6, 2)
        ran(sim, averages(ragtag.AllReduce(), rounds))
        lines = [sim.world.traffic(peer) for peer in range(6)]
        moved.append([[line.bytes_sent for line in lines], [line.bytes_received for line in lines]])
    sent, received = (np.array(moved[1]) - np.array(moved[0])) / ROUNDS / CHUNKS / chunk
    assert sent.tolist() == pytest.approx([0.75 + 5 / 4] * 4 + [1, 1], rel=0.1)
    assert received.tolist() == pytest.approx([0.75 + 5 / 4] * 4 + [1, 1], rel=0.1)


def test_a_client_on_a_slow_line_costs_what_its_line_takes_once() -> None:
    """As a full peer it sends its values and averages of its share; as a client its values alone. Its copies
    may leave for as long as averages may come, though it sees nobody else's.
    """
    slow = tuple(OwnLine(peer, rate_bytes_per_s=2e5, down_bytes_per_s=RATE) for peer in (4, 5))
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, lines=slow)
    full, client = (ran(crew(6, k, faults), averages(ragtag.AllReduce(), 16))[0][8:] for k in (0, 2))
    assert all(o.averaged.all() and (o.heard == 0b111111).all() for o in client)
    took = [float(np.median([o.total_s for o in rounds])) for rounds in (full, client)]
    assert took[1] < 0.8 * took[0] and took[1] == pytest.approx(CHUNKS * 1200 / 2e5, rel=0.25)


@pytest.mark.parametrize("by", [ragtag.RPS(), ragtag.AllReduce()], ids=lambda by: by.name)
def test_a_client_that_dies_is_missed_as_a_trainer_is(by: Averager) -> None:
    counts = {}
    for clients in (0, 2):
        calm = ran(crew(6, clients), averages(by))[0][2]
        dies = Crash(5, calm.started_s - 0.01)  # before it has given anything
        sim = crew(6, clients, Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, crashes=(dies,)))
        came = ran(sim, averages(by, 12))
        assert len(came) == 5
        for peer, rounds in enumerate(came):
            assert rounds[-1].averaged.all() and (rounds[-1].heard == 0b011111).all()
            missed = [o.round for o in rounds if 5 in o.missed]
            assert missed == ([2] if clients == 0 or peer < 4 else [])  # it owes a client nothing
        counts[clients] = [sum(not o.averaged.all() for o in rounds) for rounds in came]
    assert counts[2] == [0] * 5 and max(counts[0]) > 0  # with it goes a block, and with a client none


def test_an_owner_that_dies_leaves_its_block_to_another_owner() -> None:
    calm = ran(crew(6, 2), averages(ragtag.AllReduce()))[0][2]
    crash = Crash(1, calm.started_s + 0.3 * calm.total_s)
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, crashes=(crash,))
    sim = crew(6, 2, faults)
    came = ran(sim, averages(ragtag.AllReduce(), 12))
    for rounds in came:
        short = [o.round for o in rounds if not o.averaged.all()]
        assert 0 < len(short) <= 1 + GONE_AFTER and {peer for o in rounds for peer in o.missed} == {1}
        assert rounds[-1].averaged.all() and (rounds[-1].heard == 0b111101).all()
    np.testing.assert_array_equal(came[0][-1].mean, came[-1][-1].mean)


def test_one_owner_is_enough_and_a_frozen_one_comes_back() -> None:
    notes: list[tuple[int, Noted]] = []
    freeze = Freeze(0, 0.5, 0.3)
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, freezes=(freeze,))
    sim = crew(4, 3, faults, on_note=lambda peer, now_s, note: notes.append((peer, note)))
    came = ran(sim, averages(ragtag.RPS(), 30))
    for rounds in came:
        calm = [o for o in rounds if o.round < 9 or 20 <= o.round < 30]
        assert len(calm) >= 16 and all((o.heard == 0b1111).all() and o.averaged.all() for o in calm)
    said = [peer for peer, note in notes if note.what == UNOWNED]
    assert sorted(said) == [1, 2, 3]
    assert "start a peer that" in next(note.detail for _, note in notes if note.what == UNOWNED)


def test_where_the_last_owner_dies_clients_average_among_themselves_and_it_is_said() -> None:
    notes: list[tuple[int, Noted]] = []
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, crashes=(Crash(0, 0.5),))
    sim = crew(4, 3, faults, on_note=lambda peer, now_s, note: notes.append((peer, note)))
    came = ran(sim, averages(ragtag.AllReduce(), 24))
    assert len(came) == 3
    for rounds in came:
        assert all((o.heard == 0b1110).all() and o.averaged.all() for o in rounds[-6:])
    assert sorted(peer for peer, note in notes if note.what == UNOWNED) == [1, 2, 3]


@pytest.mark.parametrize("repair", [False, True])
def test_lost_datagrams_cost_chunks_and_none_with_repair(repair: bool) -> None:
    faults = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE, loss=Loss(0.05))
    came = ran(crew(6, 2, faults), averages(ragtag.RPS(repair=repair), 24))
    whole = [np.mean(np.bitwise_count(o.heard[o.averaged])) / 6 for rounds in came for o in rounds[12:]]
    assert np.mean(whole) > (0.99 if repair else 0.9)


def losses(peer: SimulatedTransport, **options: object) -> list[float]:
    """A peer that trains a small model. Returns what its weights add up to after each step."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    data = torch.Generator().manual_seed(peer.me)
    found = []
    for _ in range(12):
        peer.compute()
        optimizer.zero_grad()
        model(torch.randn(4, 40, generator=data)).square().mean().backward()
        optimizer.step()
        found.append(float(model.weight.double().sum()))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"average": "gradients", "compress": ragtag.TopK(0.1)},
        {"schedule": "asynchronous"},
        {"schedule": "softsync"},
        {"average": "gradients"},
    ],
    ids=str,
)
def test_rows_central_states_and_gradients_go_on_with_clients(options: dict[str, object]) -> None:
    full, some = (crew(5, k).run(lambda peer: losses(peer, **options)) for k in (0, 2))
    assert all(peer is not None and np.isfinite(peer).all() for peer in some)
    if "average" in options:  # replicas are alike, and all owners' sums what they were
        np.testing.assert_allclose(np.array(some), np.array(full), rtol=1e-5)


@pytest.mark.parametrize("averager", [ragtag.Moshpit(group=2), ragtag.AllReduce(ring=True)], ids=repr)
def test_what_has_no_owners_refuses_a_client_and_says_what_to_do(averager: Averager) -> None:
    with pytest.raises(ValueError, match=r"no owners of blocks, and this peer is a client.*Use RPS\(\)"):
        crew(4, 1).run(lambda peer: losses(peer, method=averager))


def test_no_named_tensor_is_a_clients_nor_does_it_stand_in_for_an_owner() -> None:
    def owners(peer: SimulatedTransport) -> set[int]:
        tensors = NamedTensors(peer, "codes", computed={f"t{i}": (30,) for i in range(12)})
        peer.pause(0.1)
        return {owner for pair in tensors.owners().values() for owner in pair}

    assert crew(5, 2).run(owners) == [{0, 1, 2}] * 5
    assert crew(3, 2).run(owners) == [{0}] * 3


def test_the_state_is_fetched_from_none() -> None:
    sim = crew(4, 2)

    def donors(peer: SimulatedTransport) -> list[int]:
        drawn: list[int] = []

        def draw(able: object) -> list[int]:
            drawn.extend(able)  # type: ignore[call-overload]
            return []

        need = None
        peer.ask(need, 1.0, behind=(), draw=draw, noted=lambda *_: None)  # type: ignore[arg-type]
        return drawn

    assert sim.run(donors) == [[1], [0], [0, 1], [0, 1]]


def test_all_clients_are_refused_at_once() -> None:
    for n in (1, 3):
        with pytest.raises(ValueError, match="one at least must own what is averaged"):
            SimulatedCrew(n, clients=n)
    with pytest.raises(ValueError, match="one at least"):
        SimulatedCrew(3, clients=4, auxiliaries=1)
    assert ran(crew(3, 3, auxiliaries=1), averages(ragtag.RPS()))[0][-1].averaged.all()
