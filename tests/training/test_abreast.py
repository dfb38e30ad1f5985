"""Peers in virtual time that were away, or come late, get the crew's state as live ones do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from ragtag.core.faults import Crash, Faults, Freeze, Partition, Slow, Window
from ragtag.core.types import Noted, Outcome
from ragtag.optim.outer import Outer
from ragtag.protocols.crew.standing import END
from ragtag.schedules import Average, Compute, Decision, Progress, Skip
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport, Stuck
from ragtag.simulation.worlds.transfer import LINK_SHARE
from ragtag.training.align.plan import Align
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.abreast import Abreast
from ragtag.training.state.keeper import StateKeeper

STEP_S, LATE_S = 0.05, 1.23
ROUNDS = 42
AWAY = Freeze(2, 0.72, 1.0)
"""It misses twenty rounds, of which eight may be missed."""
GRADIENTS: dict[str, Any] = {"average": "gradients", "method": "allreduce", "align": False}
"""Of these rounds all members have the same mean, bit for bit, and nothing else makes replicas alike."""


@dataclass
class Trained:
    """What peers were after each of their rounds, and what was noted of the state."""

    models: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    momenta: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    heard: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    notes: list[tuple[float, int, Noted]] = field(default_factory=list)
    anchors: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: list[int | None] = field(default_factory=list)

    def said(self, peer: int) -> list[str]:
        return [note.what for _, who, note in self.notes if who == peer]

    def alike(self, peer: int, round_: int, other: int = 0) -> bool:
        return torch.equal(self.models[peer, round_], self.models[other, round_])


def train(
    *,
    n: int = 3,
    comes: dict[int, float] | None = None,
    keeps: bool = True,
    kept: Callable[[StateKeeper, CrewOptimizer], None] = lambda keeper, optimizer: None,
    rounds: int = ROUNDS,
    rate: float = 1e8,
    faults: dict[str, Any] | None = None,
    clients: int = 0,
    astray: int = -1,
    **options: Any,
) -> Trained:
    """Train a crew in virtual time.

    keeps: peers look back, as live ones do.
    astray: a peer whose parameters are other ones than all others' from its fourth step on.
    """
    found = Trained()
    lines = Faults(latency_s=0.001, rate_bytes_per_s=rate, **(faults or {}))
    cost = ComputeCost(STEP_S)
    crew = SimulatedCrew(n, lines, 3, cost=cost, check=True, comes=comes or {}, clients=clients)

    def body(peer: SimulatedTransport) -> int:
        torch.manual_seed(7 if peer.late else 0)
        model = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper = StateKeeper(peer.me, 3, lambda note: found.notes.append((peer.now_s(), peer.me, note)))
        keeper.serve(peer.shelf)
        abreast = Abreast(keeper, peer, peer)
        hooks: dict[str, Any] = {"on_ready": abreast.begin, "on_outcome": abreast.averaged} if keeps else {}
        optimizer = CrewOptimizer(sgd, peer, model=model, **(hooks | GRADIENTS | options))
        kept(keeper, optimizer)
        samples = torch.Generator().manual_seed(peer.me)
        while optimizer.outcome is None or optimizer.outcome.round < rounds:
            peer.compute()
            if peer.me == astray and optimizer.outcome is not None and optimizer.outcome.round == 3:
                nn.init.ones_(model[0].bias)
            x = torch.randn(8, 3, generator=samples)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            outcome = optimizer.outcome
            if outcome is not None and not optimizer._averaged.progress[1]:
                at = peer.me, outcome.round
                slots = [sgd.state[p]["momentum_buffer"] for p in model.parameters() if p in sgd.state]
                found.models[at] = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
                found.momenta[at] = torch.cat([slot.reshape(-1) for slot in slots]).clone()
                found.heard[at] = {p for p in range(n) if int(outcome.heard[0]) >> p & 1}
        for part in ("anchor", "momentum"):
            of = optimizer._averaged.outer_state.get(part, {})
            found.anchors.setdefault(peer.me, {})[part] = {name: one.tolist() for name, one in of.items()}
        return outcome.round if outcome is not None else -1

    found.ended = crew.run(body)
    return found


def test_one_that_was_frozen_is_in_step_again_bit_for_bit() -> None:
    found = train(faults={"freezes": (AWAY,)})
    assert found.said(2) == ["state", "in step"]
    assert found.alike(2, ROUNDS) and torch.equal(found.momenta[2, ROUNDS], found.momenta[0, ROUNDS])
    assert found.heard[0, ROUNDS] == {0, 1, 2}
    assert not train(faults={"freezes": (AWAY,)}, keeps=False).alike(2, ROUNDS), "else it stays apart"


def test_one_that_made_rounds_alone_was_away_since_the_last_one_with_others() -> None:
    """It had the time of one step to fetch the state, however long that takes, and kept stale momentum."""
    apart = Window(0.7, 1.7)
    faults = {"partitions": (Partition(frozenset({2}), apart),), "slow": (Slow(2, 3.0, apart),)}
    found = train(faults=faults, average="models", method="rps", align=True, rounds=38)
    assert {2} in [found.heard[2, round_] for round_ in range(13, 19)], "it went on alone"
    assert found.said(2) == ["state"]


def test_one_that_froze_amid_a_round_was_away_since_it_began_that_round() -> None:
    """It ends the round as it comes back, and had the time of one step to fetch the state."""
    frozen = Freeze(2, 0.733, 1.0)
    found = train(faults={"freezes": (frozen,)}, average="models", method="allreduce", align=True, rounds=50)
    assert found.said(2) == ["state"]


def test_clients_come_late_and_come_back_as_others_do() -> None:
    """They own nothing from the beginning, so the average of the others' rounds is whole."""
    found = train(faults={"freezes": (AWAY,)}, clients=1)
    assert found.said(2) == ["state", "in step"] and found.alike(2, ROUNDS)
    found = train(n=4, comes={3: LATE_S}, clients=2)
    assert found.alike(3, ROUNDS) and found.alike(2, ROUNDS) and found.heard[0, ROUNDS] == {0, 1, 2, 3}


@pytest.mark.parametrize("astray", [0, 1, 3, 4])
def test_the_state_is_that_of_most_replicas(astray: int) -> None:
    """It was that of whichever donor came first: one that is apart from all others got a second like it."""
    found = train(n=5, faults={"freezes": (AWAY,)}, align=Align(every=1000), astray=astray)
    others = [peer for peer in range(5) if peer not in (2, astray)]
    assert found.said(2) == ["state", "in step"] and not found.alike(astray, ROUNDS, others[0])
    assert all(found.alike(2, ROUNDS, peer) for peer in others)
    assert torch.equal(found.momenta[2, ROUNDS], found.momenta[others[0], ROUNDS])


def test_what_counts_the_crews_steps_is_told_of_those_that_it_missed() -> None:
    """K-FAC of a peer that came back averaged its factors a step after the others, who waited for it."""

    class Counts:
        def __init__(self, optimizer: CrewOptimizer) -> None:
            self.optimizer, self.steps, self.told = optimizer, -1, 0

        def state_dict(self) -> dict[str, Any]:
            outcome = self.optimizer.outcome
            return {"steps": -1 if outcome is None else outcome.round}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

        def went_on(self, steps: int) -> None:
            self.told = steps

    counts: dict[int, Counts] = {}

    def kept(keeper: StateKeeper, optimizer: CrewOptimizer) -> None:
        counts[keeper.me] = Counts(optimizer)
        keeper.keep(counts=counts[keeper.me])

    found = train(faults={"freezes": (AWAY,)}, kept=kept)
    detail = next(note.detail for _, who, note in found.notes if who == 2 and note.what == "in step")
    since = counts[2].told
    assert since > 0 and f"the state of round {counts[2].steps} and the steps of {since} rounds" in detail
    assert counts[0].told == counts[1].told == 0


def test_what_counts_the_crews_steps_is_told_of_few_that_it_missed() -> None:
    """K-FAC of a peer that left out a few rounds averaged its factors at other steps than all others."""
    told = dict.fromkeys(range(3), 0)

    class Counts:
        def __init__(self, me: int) -> None:
            self.me = me

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("so few are not fetched")

        def went_on(self, steps: int) -> None:
            told[self.me] += steps

    def kept(keeper: StateKeeper, optimizer: CrewOptimizer) -> None:
        keeper.keep(counts=Counts(keeper.me))

    found = train(faults={"freezes": (Freeze(2, 0.72, 0.3),)}, kept=kept)
    for peer in range(3):
        own = sum(who == peer for who, _ in found.models)
        assert own + told[peer] == ROUNDS + 1
    assert told[0] == told[1] == 0 < told[2]


def test_one_that_missed_few_rounds_fetches_nothing() -> None:
    assert train(faults={"freezes": (Freeze(2, 0.72, 0.3),)}).notes == []


def test_a_run_is_decided_by_its_seed() -> None:
    one, other = (train(faults={"freezes": (AWAY,)}) for _ in range(2))
    assert one.notes == other.notes
    assert all(torch.equal(model, other.models[at]) for at, model in one.models.items())


def test_newcomers_are_in_step_before_they_give_and_then_count() -> None:
    found = train(n=5, comes={3: LATE_S, 4: LATE_S + 0.1}, align=Align(every=4))
    for late in (3, 4):
        assert found.said(late) == ["state", "in step"]
        first = min(round_ for peer, round_ in found.models if peer == late)
        assert first > LATE_S / STEP_S - 2, "its first round is one of the crew's"
        assert found.alike(late, first), "that another comes spoils a round for all"
        assert found.alike(late, ROUNDS)
    assert found.heard[0, ROUNDS] == {0, 1, 2, 3, 4}
    assert found.ended == [ROUNDS] * 5


OUTER: dict[str, Any] = {"average": "models", "outer": Outer(0.7, 0.6), "every": 2, "align": True}


@pytest.mark.parametrize(
    ("late", "how"),
    [(3, {"n": 4, "comes": {3: LATE_S}}), (2, {"faults": {"freezes": (Freeze(2, 0.72, 1.6),)}})],
    ids=["a newcomer", "away"],
)
def test_where_models_are_averaged_it_gets_the_others_anchor_and_momentum(
    late: int, how: dict[str, Any]
) -> None:
    """Its own would make its outer steps other ones than theirs, and so would a round that is in the state
    that came, taken once more.
    """
    found = train(**how, **OUTER)
    assert found.said(late) == ["state"]
    first = 1 + min(round_ for peer, round_ in found.models if peer == late and round_ > 10)
    rounds = [round_ for peer, round_ in found.models if peer == late and round_ > first]
    assert len(rounds) > 10 and all(found.alike(late, round_) for round_ in rounds)
    assert found.anchors[late] == found.anchors[0]
    apart = train(**how, **OUTER, keeps=False)
    assert not apart.alike(late, rounds[0])


def test_the_state_is_fetched_at_a_share_of_the_donors_lines() -> None:
    """With three megabytes beside the model and two donors, a tenth of 1e7 bytes/s each."""

    class Much:
        def __init__(self) -> None:
            self.values = torch.zeros(750_000)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    found = train(
        faults={"freezes": (AWAY,)},
        rate=1e7,
        rounds=90,
        kept=lambda keeper, optimizer: keeper.keep(much=Much()),
    )
    came_s = next(at_s for at_s, _, note in found.notes if note.what == "state")
    least_s = 3e6 / (2 * LINK_SHARE * 1e7)
    assert AWAY.at_s + AWAY.for_s + least_s <= came_s <= AWAY.at_s + AWAY.for_s + 1.5 * least_s + 6 * STEP_S
    assert found.said(2)[-1] == "in step" and found.alike(2, 90)


def test_a_donor_that_dies_or_is_cut_off_costs_no_state() -> None:
    """Peers 0 and 1 give; one dies while it does, and the line to the other is cut for a while."""
    back_s = AWAY.at_s + AWAY.for_s
    cut = Partition(frozenset({1}), Window(back_s + 0.1, back_s + 0.4))
    found = train(
        n=4,
        faults={"freezes": (AWAY,), "crashes": (Crash(0, back_s + 0.13),), "partitions": (cut,)},
        rounds=70,
    )
    assert found.ended[0] is None and found.said(2)[-1] == "in step"


def test_where_all_others_are_gone_it_goes_on_from_its_own_state() -> None:
    crashes = tuple(Crash(peer, 1.5) for peer in (0, 1))
    found = train(faults={"freezes": (AWAY,), "crashes": crashes}, rounds=80)
    assert found.ended == [None, None, 80]
    assert "state" not in found.said(2)


@pytest.mark.parametrize("options", [GRADIENTS, {"every": 2}], ids=["gradients", "models"])
def test_one_that_comes_when_the_others_are_at_their_end_has_what_they_end_with(
    options: dict[str, Any],
) -> None:
    """It waited for a round until they had left, and ended with its own weights. And a step more counts on
    from theirs: by gradients it began anew at 0, so a script went through all of them alone.
    """
    ends: dict[int, torch.Tensor] = {}
    took_s: list[float] = []
    rounds: list[int] = []
    every = options.get("every", 1)

    def body(peer: SimulatedTransport) -> None:
        torch.manual_seed(7 if peer.late else 0)
        model = nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper = StateKeeper(peer.me, 3, lambda note: None)
        keeper.serve(peer.shelf)
        abreast = Abreast(keeper, peer, peer)
        began_s = peer.now_s()
        hooks: dict[str, Any] = {"on_ready": abreast.begin, "on_outcome": abreast.averaged}
        optimizer = CrewOptimizer(sgd, peer, model=model, **hooks, **options)
        if peer.late:
            if optimizer._averaged.arrive is not None:
                optimizer._averaged.arrive()
            took_s.append(peer.now_s() - began_s)
        else:
            for _ in range(20):
                peer.compute()
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
        slots = [sgd.state[p]["momentum_buffer"] for p in model.parameters() if p in sgd.state]
        ends[peer.me] = torch.cat([t.detach().reshape(-1) for t in (*model.parameters(), *slots)])
        if peer.late:
            for _ in range(every):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
            rounds.append(optimizer.outcome.round if optimizer.outcome is not None else -1)
        peer.post_soon(END, b"")
        while peer.notices(END).posts.keys() < {0, 1, 2}:
            assert peer.now_s() < 10.0, "the newcomer has not come to its end"
            keeper.offer_last()
            peer.pause(0.01)

    cost = ComputeCost(STEP_S)
    SimulatedCrew(3, Faults(latency_s=0.001, rate_bytes_per_s=1e8), 3, cost=cost, comes={2: 2.0}).run(body)
    assert len(ends[2]) == 8 and torch.equal(ends[2], ends[0])
    assert took_s[0] < 1.0
    assert rounds == [20 // every]


def test_peers_that_come_later_have_the_last_numbers() -> None:
    with pytest.raises(ValueError, match="the last numbers of 3"):
        SimulatedCrew(3, comes={1: 1.0})


def test_waiting_for_a_state_ends_where_nothing_is_left_to_happen() -> None:
    crew = SimulatedCrew(2)
    with pytest.raises(Stuck, match="peer 0 waits for what never comes"):
        crew.until(0, "for what never comes", lambda: False)
    assert not crew.until(0, "a second", lambda: False, crew.world.now_s + 1.0)
    assert crew.world.now_s == 1.0


@dataclass(frozen=True)
class Leaves:
    """Averages after every tenth step, but for one that a peer is away from."""

    away_at: int

    def decide(self, progress: Progress) -> Decision:
        if progress.step % 10:
            return Compute()
        return Skip() if progress.step == self.away_at else Average()


def test_a_peer_that_left_an_average_out_begins_the_one_after() -> None:
    """It began the one that it had left out, whose owners were past it, and was a round behind in all that
    followed: heard too late, and waited for.
    """
    began: dict[tuple[int, int], int] = {}
    missed: list[tuple[int, ...]] = []

    def body(peer: SimulatedTransport) -> float:
        model = nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = Leaves(20 if peer.me == 3 else 0)

        def over(outcome: Outcome) -> None:
            began[peer.me, optimizer._averaged.progress[0]] = outcome.round
            missed.append(outcome.missed)

        optimizer = CrewOptimizer(
            sgd, peer, model=model, schedule=schedule, outer=Outer(), on_outcome=over, method="rps"
        )
        for step in range(1, 81):
            peer.compute()
            if step == 20 and peer.me == 3:
                cut = Partition(frozenset({3}), Window(peer.now_s(), peer.now_s() + 9 * STEP_S))
                lines = replace(peer.crew.world.faults, partitions=(cut,))
                peer.crew.world.change_lines(lines)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return peer.now_s()

    lines = Faults(latency_s=0.01)
    ends_s = SimulatedCrew(4, lines, 3, cost=ComputeCost(STEP_S, sigma=0.1, seed=3)).run(body)
    assert [began[3, step] for step in (10, 30, 40, 80)] == [0, 2, 3, 7]
    assert (3, 20) not in began and began[0, 20] == 1
    assert sum(map(bool, missed)) <= 6, "the others waited for it in that round, and in the next at most"
    assert max(end_s for end_s in ends_s if end_s is not None) < 1.25 * 80 * STEP_S
