"""A node over many rounds: deadlines, silence, death, freezing, catching up, and how it refuses misuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.types import (
    PEERS_MAX,
    SEATS_MAX,
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Expired,
    Floats,
    Joined,
    Left,
    Measured,
    MessageKey,
    Met,
    Noted,
    Offer,
    Outcome,
    Post,
    Run,
    Send,
    Tell,
    Timer,
    nobodys,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.central.channel import centre
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.budgets import APART, LEAP, Budgets
from ragtag.protocols.crew import standing
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import CATCH_UP, HEADROOM, Channel, Node
from ragtag.protocols.rounds.allreduce import AllReduce, direct, ring
from ragtag.protocols.rounds.asking import HERE, QUESTION, question
from ragtag.protocols.rounds.base import GATHER, SCATTER, Patience, blob_message, whole_message
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.rps import RPS, rps, rps_repair
from ragtag.protocols.rounds.stages import Stages
from tests.protocols.centres import Each
from tests.protocols.harness import TINY, World, mean_of_heard, members, vectors

SCATTERING = pytest.mark.parametrize("method", [rps, rps_repair, direct], ids=lambda m: m.name)


def values(n: int, n_chunks: int) -> Callable[[int, int], Floats]:
    return lambda peer, round_: vectors(n, n_chunks, "v", round_)[peer]


def heard(outcome: Outcome) -> set[int]:
    """All peers in any chunk of an outcome."""
    return {peer for chunk in outcome.heard for peer in members(chunk)}


def noted(world: World, me: int) -> list[tuple[str, int]]:
    return [(note.what, note.peer) for peer, note in world.notes if peer == me]


# -- Death


@SCATTERING
def test_a_dead_peer_costs_one_deadline_and_is_named(method: Averager) -> None:
    world = World(4, method, 20, probe_s=0.05)
    world.dead[3] = 0.0
    world.rounds(6, values(4, 20))
    for me in range(3):
        first, *others = world.outcomes[me]
        assert first.expired
        assert first.missed == (3,)
        assert first.total_s <= 2 * HEADROOM * method.patience * 0.05 + 1e-9
        for outcome in others:  # silent in the last round: not waited for in this one
            assert outcome.waited_for == tuple(sorted({0, 1, 2} - {me}))
            assert not outcome.expired
            assert heard(outcome) == {0, 1, 2}
        assert noted(world, me) == [("silent", 3)]


def test_a_dead_peers_block_goes_to_a_live_one_after_two_silent_rounds() -> None:
    """Until then nobody owns it, and everyone keeps its own values there; from then on all is averaged."""
    n, n_chunks = 4, 20
    world = World(n, rps, n_chunks)
    world.dead[3] = 0.0
    world.rounds(6, values(n, n_chunks))
    layout = layout_of(n_chunks, n)
    for round_ in range(6):
        block = rotating_owners(1, round_, n, frozenset(range(n))).index(3)
        for me in range(3):
            averaged = world.outcomes[me][round_].averaged.copy()
            theirs = averaged[layout.spans[block]]
            assert theirs.all() if round_ >= 2 else not theirs.any()
            averaged[layout.spans[block]] = True
            assert averaged.all()


def test_a_peer_that_dies_in_the_middle_of_a_round() -> None:
    """Its copies may have come and its average not: whatever there is, is what `heard` says."""
    for dies_s in (0.0005, 0.0021, 0.0041):
        world = World(5, rps, 23)
        world.dead[2] = dies_s
        world.rounds(4, values(5, 23))
        for me in (0, 1, 3, 4):
            assert len(world.outcomes[me]) == 4
            for round_, outcome in enumerate(world.outcomes[me]):
                want = mean_of_heard(outcome, vectors(5, 23, "v", round_))
                np.testing.assert_allclose(outcome.mean, want, rtol=0, atol=2e-6)
            assert heard(world.outcomes[me][-1]) == {0, 1, 3, 4}


def test_the_last_one_goes_on_alone() -> None:
    world = World(3, rps, 7)
    world.dead.update({1: 0.0, 2: 0.0})
    world.rounds(5, values(3, 7))
    outcomes = world.outcomes[0]
    assert [outcome.expired for outcome in outcomes] == [True, False, False, False, False]
    for round_, outcome in enumerate(outcomes):
        assert np.array_equal(outcome.mean, vectors(3, 7, "v", round_)[0])


@SCATTERING
def test_a_peer_that_would_wait_much_longer_goes_on_with_the_others(method: Averager) -> None:
    """Each learns its own deadline; what most have given up nobody waits for."""
    world = World(5, method, 20, probe_s=0.05)
    patient = Channel(method, TINY, 20, 5.0, 2.5 * world.latency_s, 0.02)
    world.nodes[0].configure(0, patient)
    world.dead[4] = 0.0
    outcome = world.once(vectors(5, 20))[0]
    assert outcome.total_s < 4 * HEADROOM * method.patience * 0.05
    assert (outcome.expired, outcome.missed) == (True, (4,))
    assert heard(outcome) == {0, 1, 2, 3}


def test_one_owner_that_goes_on_alone_cuts_nobody_off() -> None:
    world = World(5, rps, 20, probe_s=0.5)
    hasty = Channel(rps, TINY, 20, 0.001, 2.5 * world.latency_s)
    world.nodes[1].configure(0, hasty)  # gives up before anything can come
    slow = 0.1  # peer 4 is late for all of them
    world.carry = lambda source, run: [(slow if source == 4 else 0.0, run)]
    for peer in (0, 2, 3):
        outcome = world.once(vectors(5, 20))[peer] if peer == 0 else world.outcomes[peer][0]
        assert 4 not in outcome.missed
        assert 4 in heard(outcome)


@SCATTERING
def test_a_line_cut_one_way_costs_no_deadline_in_every_round(method: Averager) -> None:
    """Peer 2 does not hear peer 3, deals its blocks to others, and sends it no copies; the rest hear both.

    Were peer 3 to wait for those copies, each round would last as long as its deadline (1.5 s and more in
    all, 5 s by all-reduce).
    """
    world = World(6, method, 40)
    world.carry = lambda source, run: [] if (source, run.peer) == (3, 2) else [(0.0, run)]
    world.rounds(40, values(6, 40))
    for me in (0, 1, 4, 5):
        last = world.outcomes[me][-1]
        assert last.started_s + last.total_s < 1.0
        share = [float(outcome.averaged.mean()) for outcome in world.outcomes[me]]
        assert np.mean(share) > 0.9
    assert {2, 3} <= set().union(*(heard(outcome) for outcome in world.outcomes[0][-5:]))


@SCATTERING
def test_who_was_told_that_a_message_comes_no_more_waits_for_nobody_that_is_a_round_ahead(
    method: Averager,
) -> None:
    """Peer 0 does not hear peer 2, and ends its rounds without it.

    If peer 2 took no notice of answers, it would wait in each round for those that have left it, and the
    others for it in the next: up to .11 to .14 s.
    """
    world = World(4, method, 40)
    world.carry = lambda source, run: [] if (source, run.peer) == (2, 0) else [(0.0, run)]
    world.rounds(40, values(4, 40), pause_s=0.01)
    assert max(outcome.total_s for outcomes in world.outcomes for outcome in outcomes[10:]) < 0.07


@SCATTERING
def test_a_round_ends_at_once_when_the_missing_peer_is_known_to_have_left(method: Averager) -> None:
    world = World(3, method, 9, probe_s=10.0)
    world.dead[2] = 0.0
    for peer in (0, 1):
        world.push(0.02, peer, Left(2))
    for outcome in world.once(vectors(3, 9)):
        assert outcome.total_s == pytest.approx(0.02, abs=3 * world.latency_s)
        assert not outcome.expired


def test_a_wait_for_what_never_came_is_no_measure_of_how_long_shares_take() -> None:
    """Peer 2 is dead, and is known to have left after 20 ms: the others' shares came long before."""
    world = World(3, rps, 9, probe_s=10.0)
    world.dead[2] = 0.0
    for peer in (0, 1):
        world.push(0.02, peer, Left(2))
    assert all(outcome.scatter_s >= 0.02 for outcome in world.once(vectors(3, 9)))
    for node in world.nodes[:2]:
        machine = node.channels[0]
        assert isinstance(machine, Rounds)
        assert machine.budgets.scatter.typical_s() <= 2 * world.latency_s


# -- Freezing


def frozen_world(until_s: float, n_rounds: int = 40) -> World:
    """Peer 3 of 4 stands still from 20 ms on; rounds of the others take about 5 ms."""
    world = World(4, rps, 20, floor_s=0.01)
    world.frozen[3] = (0.02, until_s)
    world.rounds(n_rounds, values(4, 20))
    return world


def test_a_frozen_peer_comes_back_to_the_newest_round() -> None:
    world = frozen_world(until_s=0.12)
    rounds = [outcome.round for outcome in world.outcomes[3]]
    gaps = [b - a for a, b in pairwise(rounds)]
    assert sum(gap > 1 for gap in gaps) >= 1
    assert max(gaps) > CATCH_UP
    assert ("skipped", 3) in noted(world, 3)
    for me in range(3):
        assert ("silent", 3) in noted(world, me)
        assert ("heard again", 3) in noted(world, me)
    together = {outcome.round: outcome for outcome in world.outcomes[0]}
    both = [together[r] for r in rounds if r in together]
    assert heard(both[-1]) == {0, 1, 2, 3}


def first_back(world: World) -> int:
    rounds = [outcome.round for outcome in world.outcomes[3]]
    return next(b for a, b in pairwise(rounds) if b - a > 1)


def test_after_a_long_absence_its_first_values_weigh_nothing() -> None:
    world = frozen_world(until_s=0.12)
    back = first_back(world)
    sent = [
        effect.run
        for _, peer, _, effects in world.log
        for effect in effects
        if peer == 3 and isinstance(effect, Send) and effect.run.key.stage == SCATTER
    ]
    assert all((run.weight == 0).all() and not run.heard.any() for run in sent if run.key.round == back)
    assert all((run.weight == 1).all() for run in sent if run.key.round != back)
    for outcomes in world.outcomes[:3]:
        for outcome in outcomes:
            if outcome.round == back:
                assert 3 not in heard(outcome)


def test_nor_does_it_own_a_block_if_its_last_round_was_the_first() -> None:
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])
    for peer in (1, 2):
        node.step(0.9, message(peer, 30, GATHER, 0, 2))
    node.step(1.0, Average(0, vectors(3, 6)[0], 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and rounds.active == 30
    assert set(rounds.rounds[30].spec.owners) == {1, 2}


def test_one_that_was_away_owns_its_block_where_the_others_send_it_their_shares() -> None:
    """They have heard of it meanwhile: what it had sent before it stood still. Else each waits for another's
    average of the block, up to the deadline.
    """
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])
    node.step(0.9, message(1, 30, SCATTER, 0, 2))
    node.step(1.0, Average(0, vectors(3, 6)[0], 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and rounds.active == 30
    assert set(rounds.rounds[30].spec.owners) == {0, 1, 2}


@pytest.mark.parametrize("until_s", [0.08, 0.1, 0.12, 0.15])
def test_after_a_long_absence_the_others_average_comes_whole(until_s: float) -> None:
    """It owned a block of that round, as it saw it, and took nobody's average of it."""
    world = frozen_world(until_s)
    (first,) = (o for o in world.outcomes[3] if o.round == first_back(world))
    assert first.averaged.all() and heard(first) == {0, 1, 2}


def test_after_a_short_absence_they_weigh_as_ever() -> None:
    world = frozen_world(until_s=0.045)
    rounds = [outcome.round for outcome in world.outcomes[3]]
    assert 1 < max(b - a for a, b in pairwise(rounds)) <= CATCH_UP + 1
    back = first_back(world)
    for _, peer, _, effects in world.log:
        for effect in effects:
            if peer == 3 and isinstance(effect, Send) and effect.run.key == (0, back, SCATTER, 0):
                assert (effect.run.weight == 1).all()


@pytest.mark.parametrize("method", [rps, rps_repair], ids=lambda m: m.name)
def test_a_peer_that_joins_late_begins_in_the_newest_round_with_full_weight(method: Averager) -> None:
    """It skipped nothing that it had a part in, and is with the others after rounds, not deadlines."""
    world = World(3, method, 9)
    again = values(3, 9)

    def on_done(peer: int, outcome: Outcome) -> None:
        if outcome.round < 120:
            world.average(peer, again(peer, outcome.round), after_s=0.001)

    world.on_done = on_done
    for peer in range(3):
        world.average(peer, again(peer, 0), after_s=0.2 * (peer == 2))
    world.run()
    first = world.outcomes[2][0].round
    assert first > CATCH_UP
    sent = [
        effect.run
        for _, peer, _, effects in world.log
        for effect in effects
        if peer == 2 and isinstance(effect, Send) and effect.run.key[1:3] == (first, SCATTER)
    ]
    assert sent
    assert all((run.weight == 1).all() for run in sent)
    soon = [outcome for outcome in world.outcomes[0] if first + 5 <= outcome.round < 120]
    assert soon
    assert all(heard(outcome) == {0, 1, 2} for outcome in soon)


def test_freezing_costs_the_others_one_deadline() -> None:
    world = frozen_world(until_s=0.12)
    for me in range(3):
        assert sum(outcome.expired for outcome in world.outcomes[me]) <= 3
        assert max(outcome.total_s for outcome in world.outcomes[me]) <= 0.15


# -- Late, stale and foreign runs


def hand(n: int = 3, n_chunks: int = 6, method: Averager = rps) -> Node:
    """Node 0 of a crew, driven by hand."""
    node = Node(0, n, seed=1)
    node.configure(0, Channel(method, TINY, n_chunks, probe_s=0.1, rtt_s=0.01))
    return node


def message(
    peer: int, round_: int, stage: int, block: int, k: int, *, channel: int = 0, fill: float = 1.0
) -> Arrived:
    payload = np.full((k, TINY.elements), fill, np.float32).view(np.uint8)
    weight, bits = np.ones(k, np.float32), np.full(k, 1 << (peer % 64), np.uint64)
    run = Run(peer, MessageKey(channel, round_, stage, block), 0, k, payload, weight, bits, ended=True)
    return Arrived((run,))


def outcome_of(effects: list[Effect]) -> Outcome | None:
    return next((effect.outcome for effect in effects if isinstance(effect, Done)), None)


def finish(node: Node, now_s: float, own: Floats, channel: int = 0) -> Outcome:
    """A round that nobody else takes part in, ended by its timers."""
    effects = node.step(now_s, Average(channel, own, 1.0))
    timers = [effect for effect in effects if isinstance(effect, Arm)]
    while (outcome := outcome_of(effects)) is None:
        arm = timers.pop(0)
        effects = node.step(arm.at_s, Expired(arm.timer))
        timers += [effect for effect in effects if isinstance(effect, Arm)]
    return outcome


def test_late_runs_change_no_outcome() -> None:
    node = hand()
    own = vectors(3, 6)[0]
    outcome = finish(node, 0.0, own)
    before = (outcome.mean.tobytes(), outcome.weight.tobytes(), outcome.heard.tobytes())
    for stage in (SCATTER, GATHER):
        for block in range(3):
            assert outcome_of(node.step(1.0, message(1, 0, stage, block, 2, fill=9.0))) is None
    assert (outcome.mean.tobytes(), outcome.weight.tobytes(), outcome.heard.tobytes()) == before


def test_a_late_run_lengthens_the_next_deadline() -> None:
    """A peer that is alive and slower than the deadline is waited for longer, not cut off for good."""
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])
    without, _ = hand_after_a_miss().channels[0].budgets_s()
    node.step(0.9, message(1, 0, SCATTER, 0, 2))
    node.step(1.0, Average(0, vectors(3, 6)[0], 1.0))
    assert node.channels[0].budgets_s()[0] > 1.5 * without


def test_lateness_counts_in_full_up_to_a_share_of_what_this_peer_computes() -> None:
    """Peers that compute for seconds end tenths of one apart, however quick their lines are."""

    def next_s(computed_s: tuple[float, ...], late_s: float) -> float:
        budgets, now_s = Budgets(Channel(rps, fp32, 6, 0.001, 0.001)), 0.0
        for number, pause_s in enumerate(computed_s):
            now_s += pause_s
            budgets.begin(number, now_s, 0.0, None, ())
            budgets.learn(replace(done, round=number), (), (done.scatter_s, done.gather_s))
        budgets.late(now_s + late_s, len(computed_s) - 1)
        return budgets.begin(len(computed_s), now_s + computed_s[-1], 0.0, None, ()).scatter_s

    ones = np.ones(6, np.float32)
    done = nobodys(0, np.zeros((6, 1), np.float32), ones, np.zeros(6, np.uint64), None)
    assert next_s((1.0, 1.0, 1.0), 0.2) == pytest.approx(HEADROOM * 0.2)
    assert next_s((1.0, 1.0, 1.0), 0.9) == pytest.approx(HEADROOM * APART)
    assert next_s((1.0, 1.0, 100.0), 30.0) == pytest.approx(HEADROOM * APART)  # it has saved its model
    assert next_s((0.0, 0.0, 0.0), 0.2) == pytest.approx(HEADROOM * LEAP * 0.001)


def test_no_stage_is_shorter_than_the_round_trip_to_the_middle_peer() -> None:
    """A single one may be of a busy peer."""
    budgets = Budgets(Channel(rps, fp32, 6, 0.001, 0.001))
    assert budgets.next_s((0.3, 9.0, 0.1)) == budgets.next_s((0.3,)) == (0.3, 0.3)
    assert budgets.next_s((0.3, 9.0, 0.1), trip_s=0.4, line_s=0.1)[0] == pytest.approx(HEADROOM * 0.5)


def test_with_a_quorum_an_average_is_due_where_its_peer_goes_on_meanwhile() -> None:
    budgets = Budgets(Channel(RPS(quorum=2), fp32, 6, 0.001, 0.001))
    waits = budgets.begin(0, 0.0, 0.0, None, ())
    assert waits.left_s == math.inf
    due = budgets.begin(1, 1.0, 0.0, None, (), overlap_s=0.5)
    assert due.scatter_s == pytest.approx(0.5 - budgets.usual_gather_s) and due.left_s == 0.0
    assert due.gather_s == waits.gather_s < due.scatter_s and due.cycle_s == math.inf
    without = Budgets(Channel(RPS(), fp32, 6, 0.001, 0.001))
    without.begin(0, 0.0, 0.0, None, ())
    assert without.begin(1, 1.0, 0.0, None, (), overlap_s=0.5).cycle_s == 1.0


def test_peers_that_wait_for_each_other_teach_no_more_than_peers_of_one_round_are_apart() -> None:
    """In every other round a share comes just before the deadline."""
    budgets, now_s, usual_s = Budgets(Channel(rps, fp32, 6, 0.001, 0.001)), 0.0, 0.001
    ones = np.ones(6, np.float32)
    done = nobodys(0, np.zeros((6, 1), np.float32), ones, np.zeros(6, np.uint64), None)
    for number in range(40):
        deadline_s = budgets.begin(number, now_s, 0.0, None, ()).scatter_s
        took_s = deadline_s if number % 2 else usual_s
        outcome = replace(done, round=number, waited_for=(1,), scatter_s=took_s)
        budgets.learn(outcome, (), (took_s, took_s))
        now_s += took_s + usual_s
    assert budgets.next_s(())[0] == pytest.approx(HEADROOM * LEAP * (usual_s + usual_s))


def hand_after_a_miss() -> Node:
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])
    return node


def test_runs_of_another_channel_or_from_outside_the_crew_change_nothing() -> None:
    node = hand()
    own = vectors(3, 6)[0]
    begun = node.step(0.0, Average(0, own, 1.0))
    for peer in (0, 3, 7, 63, 1000):  # oneself, and peers that are none
        for stage in (SCATTER, GATHER):
            for round_ in (0, 1, 50):
                assert node.step(0.001, message(peer, round_, stage, 0, 2, fill=7.0)) == []
    assert node.step(0.001, message(1, 0, SCATTER, 0, 2, channel=9)) == []
    effects: list[Effect] = []
    for arm in [effect for effect in begun if isinstance(effect, Arm)]:
        effects += node.step(arm.at_s, Expired(arm.timer))
    for arm in [effect for effect in effects if isinstance(effect, Arm)]:
        effects += node.step(arm.at_s, Expired(arm.timer))
    outcome = outcome_of(effects)
    assert outcome is not None
    assert np.array_equal(outcome.mean, own)
    assert finish(node, 1.0, own).round == 1  # a stray's round number is no reason to skip


def test_a_batch_of_runs_is_taken_as_one_by_one() -> None:
    """Of two rounds, two channels, strays between: the driver hands over what one read brought."""
    single, batch = hand(), hand()
    for node in (single, batch):
        node.configure(1, Channel(rps, TINY, 6, probe_s=0.1, rtt_s=0.01))
        for channel in (0, 1):
            node.step(0.0, Average(channel, vectors(3, 6)[0], 1.0))
    runs = [
        run
        for peer in (1, 5, 2)
        for channel in (0, 1)
        for stage in (SCATTER, GATHER)
        for block in range(3)
        for run in message(peer, 0, stage, block, 2, channel=channel, fill=peer).runs
    ]
    one_by_one = [effect for run in runs for effect in single.step(0.01, Arrived((run,)))]
    at_once = batch.step(0.01, Arrived(runs))
    done = [
        [e.outcome.mean.tobytes() for e in effects if isinstance(e, Done)]
        for effects in (one_by_one, at_once)
    ]
    assert len(done[0]) == 2
    assert done[0] == done[1]


def test_the_memory_of_rounds_ahead_is_bounded() -> None:
    """A flood of round numbers does not make a node keep a machine for each."""
    node = hand()
    for round_ in range(200):
        node.step(0.0, message(1, round_, SCATTER, 0, 2))
    assert finish(node, 0.1, vectors(3, 6)[0]).round == 199


def test_timers_of_rounds_that_are_over_are_ignored() -> None:
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])
    for name in ("scatter", "gather", "repair", "round", "unheard of"):
        for round_ in (0, 1, 77):
            assert node.step(1.0, Expired(Timer(0, round_, name))) == []
    assert node.step(1.0, Expired(Timer(5, 0, "scatter"))) == []


# -- Who is there


def test_a_peer_that_left_is_neither_waited_for_nor_an_owner_until_it_joins() -> None:
    node = hand()
    node.step(0.0, Left(2))
    assert node.gone == {2}
    assert node.live == {0, 1}
    begun = node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    owners = {e.run.peer for e in begun if isinstance(e, Send) and e.run.key.stage == SCATTER}
    assert owners == {1}
    node.step(0.0, Joined(2))
    assert node.live == {0, 1, 2}


def test_what_was_measured_of_a_line_holds_until_its_peer_leaves() -> None:
    """A post is said again after a round trip, as it was told."""
    node = hand()
    node.step(0.0, Measured(1, 0.3, 0.2, 1e6))
    crew = node.crew
    assert (crew.rtt_s, crew.shortest_s, crew.rate_bytes_per_s) == ({1: 0.3}, {1: 0.2}, {1: 1e6})
    posted = node.step(0.0, Post(5, b"mine"))
    assert 0.3 in [arm.at_s for arm in posted if isinstance(arm, Arm)]
    node.step(0.0, Left(1))
    assert (crew.rtt_s, crew.shortest_s, crew.rate_bytes_per_s) == ({}, {}, {})


def test_a_meeting_of_64_tells_all_and_one_of_65_some() -> None:
    for n, told in ((64, True), (65, False)):
        effects = Node(0, n, 1).step(0.0, Tell(7, b"mine", 9.0))
        to = {effect.run.peer for effect in effects if isinstance(effect, Send)}
        assert to and (to == set(range(1, n))) is told


def test_that_a_peer_left_is_noted_with_its_seat() -> None:
    assert [e for e in hand().step(0.0, Left(2)) if isinstance(e, Noted)] == [Noted("left", 2)]


@pytest.mark.parametrize("said", [Tell(7, b"mine", 9.0), Post(5, b"mine")])
def test_what_is_told_or_posted_is_said_again_to_peers_that_do_not_answer(said: Tell | Post) -> None:
    node = hand()
    first = node.step(0.0, said)
    again = [arm for arm in first if isinstance(arm, Arm) and arm.at_s < 9.0]
    more = [e for arm in again for e in node.step(arm.at_s, Expired(arm.timer))]
    sent = [{e.run.peer for e in effects if isinstance(e, Send)} for effects in (first, more)]
    assert sent == [{1, 2}, {1, 2}]


def test_a_message_of_a_round_long_over_does_not_show_that_its_sender_takes_part() -> None:
    node = hand()
    for round_ in range(4):
        finish(node, float(round_), vectors(3, 6)[0])
        node.step(round_ + 0.9, message(2, round_, SCATTER, 0, 2))
    assert node.live == {0, 2}
    effects = node.step(9.0, message(1, 0, SCATTER, 0, 2))
    assert not [e for e in effects if isinstance(e, Noted)] and node.live == {0, 2}
    node.step(9.0, message(1, 4, SCATTER, 0, 2))
    assert node.live == {0, 1, 2}


def test_silence_is_counted_and_forgotten() -> None:
    node = hand()
    own = vectors(3, 6)[0]
    for round_ in range(3):
        finish(node, float(round_), own)
        assert [node.silent_rounds(peer) for peer in (1, 2)] == [round_ + 1] * 2
    assert node.live == {0}
    effects = node.step(9.0, message(1, 3, SCATTER, 0, 2))
    assert [(e.what, e.peer) for e in effects if isinstance(e, Noted)] == [("heard again", 1)]
    assert node.silent_rounds(1) == 0
    assert node.live == {0, 1}


def test_a_meeting_tells_for_whom_it_waits() -> None:
    node = hand()
    assert node.awaited(7) == set()
    node.step(0.0, Tell(7, b"mine", 9.0))
    assert node.awaited(7) == {1, 2} and node.awaited(8) == set()
    node.step(0.1, Left(2))
    assert node.awaited(7) == {1}


@pytest.mark.parametrize(
    ("there", "left", "waits_for"),
    [(None, set(), set()), ({0, 1}, set(), {1}), ({0, 1, 2}, {2}, {1}), ({2}, set(), {2})],
)
def test_a_meeting_waits_for_those_that_are_said_to_be_there_though_silent(
    there: set[int] | None, left: set[int], waits_for: set[int]
) -> None:
    node = hand()
    finish(node, 0.0, vectors(3, 6)[0])  # nothing comes from either
    for peer in left:
        node.step(1.0, Left(peer))
    told = node.step(1.0, Tell(7, b"mine", 9.0, there=None if there is None else frozenset(there)))
    assert {effect.run.peer for effect in told if isinstance(effect, Send)} == waits_for
    assert any(isinstance(effect, Met) for effect in told) is not bool(waits_for)


def test_a_step_has_one_number_on_all_its_channels() -> None:
    """What one channel has heard of counts for those that follow it in the step."""
    node, own = hand(), vectors(3, 6)[0]
    node.configure(1, Channel(rps, TINY, 6, probe_s=0.1, rtt_s=0.01))
    for round_ in range(2):
        assert [finish(node, float(round_), own, channel).round for channel in (0, 1)] == [round_] * 2
    for peer in (1, 2):
        node.step(2.9, message(peer, 6, SCATTER, 0, 2))
    assert [finish(node, 3.0, own, channel).round for channel in (0, 1)] == [6, 6]


def test_channels_do_not_silence_each_other() -> None:
    """Parameters and buffers are averaged side by side: a round of one says nothing of the other."""
    world = World(4, rps, 20)
    for node in world.nodes:
        node.configure(1, Channel(rps, TINY, 3, 0.05, 0.005, 0.02))
    again = values(4, 20)
    counts = dict.fromkeys(((peer, channel) for peer in range(4) for channel in (0, 1)), 0)

    def on_done(peer: int, outcome: Outcome) -> None:
        counts[peer, outcome.channel] += 1
        if counts[peer, outcome.channel] < 10:
            rows = again(peer, counts[peer, outcome.channel])[: 20 if outcome.channel == 0 else 3]
            world.push(world.now_s + 0.001, peer, Average(outcome.channel, rows, 1.0))

    world.on_done = on_done
    for peer in range(4):
        world.push(0.0, peer, Average(0, again(peer, 0), 1.0))
        world.push(0.0, peer, Average(1, again(peer, 0)[:3], 1.0))
    world.run()
    assert set(counts.values()) == {10}
    assert world.notes == []
    assert all(heard(o) == {0, 1, 2, 3} for outcomes in world.outcomes for o in outcomes)


def test_a_peer_that_others_have_averaged_with_in_later_rounds_is_not_waited_for() -> None:
    """One block, and views of who owns it that differ: peer 2 sends its copies to peer 1 only."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(direct, TINY, 1, probe_s=100.0, rtt_s=0.01))
    began = node.step(0.0, Average(0, vectors(3, 1)[0], 1.0))
    assert not any(isinstance(effect, Done) for effect in began)
    payload = TINY.encode(vectors(3, 1)[1])
    one, both = np.ones(1, np.float32), np.array([0b110], np.uint64)
    for block in range(3):
        later = Run(1, MessageKey(0, 2, GATHER, block), 0, 1, payload, one, both, None, True)
        began += node.step(0.5, Arrived((later,)))
    (done,) = [effect.outcome for effect in began if isinstance(effect, Done)]
    assert done.waited_for == (1, 2) and done.total_s == pytest.approx(0.5)


def reduced(source: int, number: int, heard: int) -> Arrived:
    """What a peer made of the only block (0 of 3) in a round."""
    payload = TINY.encode(vectors(3, 1)[1])
    key = MessageKey(0, number, GATHER, 0)
    run = Run(source, key, 0, 1, payload, np.ones(1, np.float32), np.array([heard], np.uint64), None, True)
    return Arrived((run,))


def average_of(source: int, number: int) -> Arrived:
    """What a peer of eight made of one of eight blocks in a round."""
    payload, rolls = TINY.encode(vectors(8, 1)[source]), np.array([1 << source], np.uint64)
    key = MessageKey(0, number, GATHER, source)
    return Arrived((Run(source, key, 0, 1, payload, np.ones(1, np.float32), rolls, None, True),))


def owner_of_all() -> Node:
    """Peer 0 of 3 in its first round; it owns the only block, and hears nothing of the others."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(direct, TINY, 1, probe_s=100.0, rtt_s=0.01))
    assert not any(isinstance(e, Done) for e in node.step(0.0, Average(0, vectors(3, 1)[0], 1.0)))
    return node


def outcomes_of(effects: list[Effect]) -> list[Outcome]:
    return [effect.outcome for effect in effects if isinstance(effect, Done)]


def test_who_takes_itself_for_the_owner_of_a_block_sends_no_share_of_it_and_is_not_waited_for() -> None:
    node = owner_of_all()
    assert outcomes_of(node.step(0.1, reduced(1, 0, 0b010))) == []  # peer 2 may still
    effects = node.step(0.2, reduced(2, 0, 0b100))
    (outcome,) = outcomes_of(effects)
    assert outcome.missed == () and heard(outcome) == {0}
    assert {e.run.peer for e in effects if isinstance(e, Send)} == {1, 2}  # what it made of the block itself


def test_nor_is_it_where_that_came_before_the_round_began() -> None:
    node = owner_of_all()
    for peer in (1, 2):
        node.step(0.1, reduced(peer, 0, 1 << peer))
        node.step(0.2, reduced(peer, 1, 1 << peer))
    assert len(outcomes_of(node.step(0.3, Average(0, vectors(3, 1)[0], 1.0)))) == 1


def test_a_peer_that_asks_in_a_later_round_has_left_this_one() -> None:
    node = owner_of_all()
    for peer in (1, 2):
        effects = node.step(0.1, Arrived((question(peer, MessageKey(0, 2, 0, 0)),)))
        assert any(isinstance(e, Send) and e.run.key.stage == HERE for e in effects)
    (outcome,) = outcomes_of(effects)
    assert outcome.total_s == pytest.approx(0.1)


@pytest.mark.parametrize(("tell", "over"), [(3, False), (4, True)])
def test_shares_that_went_to_another_owner_are_not_waited_for_once_half_of_them_have_told(
    tell: int, over: bool
) -> None:
    """One that begins a round long after the others had it, takes itself for an owner, and they did not. One
    peer alone is not believed: it could cut all owners' rounds short.
    """
    node = Node(0, 8, 1)
    node.configure(0, Channel(direct, TINY, 8, probe_s=100.0, rtt_s=0.01))
    node.step(0.0, Average(0, vectors(8, 8)[0], 1.0))
    key, payload = MessageKey(0, 0, GATHER, 0), TINY.encode(vectors(8, 1)[1])
    effects: list[Effect] = []
    for peer in range(1, 1 + tell):
        told = whole_message(peer, key, payload, np.ones(1, np.float32), np.array([0xFE], np.uint64))
        effects += node.step(0.1, Arrived([told]))
    assert any(isinstance(e, Send) and e.run.key.stage == GATHER for e in effects) == over


def test_so_are_rows() -> None:
    node = Node(0, 3, 1)
    node.configure(0, Channel(gather, TINY, 3, probe_s=100.0, rtt_s=0.01))
    node.step(0.0, Offer(0, np.zeros((3, CHUNK_BYTES), np.uint8), 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and isinstance(rounds.rounds[0], Stages)
    (mine,) = rounds.rounds[0].content.mine
    rows, rolls = np.zeros((1, CHUNK_BYTES), np.uint8), np.array([0b110], np.uint64)
    told = whole_message(1, MessageKey(0, 0, GATHER, mine), rows, np.ones(1, np.float32), rolls)
    effects = node.step(0.1, Arrived([told]))
    assert any(isinstance(e, Send) and e.run.key.stage == GATHER for e in effects)


@pytest.mark.parametrize(("weight", "number"), [(1.0, 4), (0.0, 3)])
def test_who_is_behind_begins_the_round_after_the_one_that_is_over_unless_it_only_takes(
    weight: float, number: int
) -> None:
    node = owner_of_all()
    for peer in (1, 2):
        node.step(0.1, reduced(peer, 2, 0b110))
    node.step(0.2, reduced(1, 3, 0b110))
    ended = node.step(0.3, Average(0, vectors(3, 1)[0], weight))
    ended += [e for peer in (1, 2) for e in node.step(0.4, reduced(peer, 9, 0b110))]
    assert [outcome.round for outcome in outcomes_of(ended)] == [number]


@pytest.mark.parametrize(("tell", "number"), [(1, 3), (3, 3), (4, 4), (7, 4)])
def test_a_round_is_left_out_only_where_half_of_the_owners_have_ended_it(tell: int, number: int) -> None:
    """One that is ahead of all others ends rounds alone. Those that took them for over left them out: half of
    64 peers came a round apart from the other half.
    """
    node = Node(0, 8, 1)
    node.configure(0, Channel(direct, TINY, 8, probe_s=100.0, rtt_s=0.01))
    node.step(0.0, Average(0, vectors(8, 8)[0], 1.0))
    for peer in range(1, 8):
        node.step(0.1, average_of(peer, 2))  # they are two rounds ahead
    for peer in range(1, 1 + tell):
        node.step(0.2, average_of(peer, 3))
    node.step(0.3, Average(0, vectors(8, 8)[0], 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and rounds.active == number


@pytest.mark.parametrize(("seen", "seldom", "active"), [(3, True, 6), (4, True, 7), (4, False, 6)])
def test_who_begins_a_round_that_most_have_left_gives_in_the_one_in_which_they_are(
    seen: int, seldom: bool, active: int
) -> None:
    """They wait for it there. Where a channel averages at each step it comes to that in the next one; where
    it averages seldom, some steps later.
    """
    node = Node(0, 8, 1)
    for channel in (0, 1):
        node.configure(channel, Channel(direct, TINY, 8, probe_s=100.0, rtt_s=0.01))
    if seldom:
        node.step(0.0, Average(1, vectors(8, 8)[0], 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds)
    rounds.resume(5)  # its first values weigh nothing
    node.step(0.0, Average(0, vectors(8, 8)[0], 1.0))
    asked = (Arrived((question(peer, MessageKey(0, 7, SCATTER, 0)),)) for peer in range(1, 1 + seen))
    effects = [effect for event in asked for effect in node.step(0.1, event)]
    assert rounds.active == active and not outcomes_of(effects)
    shares = [e.run for e in effects if isinstance(e, Send) and e.run.key.stage == SCATTER]
    assert {run.key.round for run in shares} == ({7} if active == 7 else set())
    assert all((run.weight == 0).all() for run in shares)


@pytest.mark.parametrize(
    ("method", "ask", "active"),
    [
        (direct, Average(0, vectors(8, 8)[0], 1.0), 7),
        (direct, Average(0, vectors(8, 8)[0], 1.0, due=6), 6),
        (gather, Offer(0, np.zeros((1, CHUNK_BYTES), np.uint8), 1.0), 6),
    ],
    ids=["of no other round", "due", "rows"],
)
def test_what_belongs_to_a_round_of_another_channel_is_not_moved_on(
    method: Averager, ask: Average | Offer, active: int
) -> None:
    """Its peer would begin the next before its time: from then on all would wait for each other in each."""
    node = Node(0, 8, 1)
    node.configure(0, Channel(method, TINY, 8, probe_s=100.0, rtt_s=0.01))
    node.configure(1, Channel(direct, TINY, 8, probe_s=100.0, rtt_s=0.01))
    node.step(0.0, Average(1, vectors(8, 8)[0], 1.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds)
    rounds.resume(5)
    node.step(0.0, ask)
    for peer in range(1, 6):
        node.step(0.1, Arrived((question(peer, MessageKey(0, 7, SCATTER, 0)),)))
    assert rounds.active == active


@pytest.mark.parametrize(("newest", "waits"), [(5, True), (6, False), (60, False)])
def test_in_a_round_that_its_trainer_numbers_and_all_have_left_nobody_is_waited_for(
    newest: int, waits: bool
) -> None:
    """One that froze before it compared replicas came back to a comparison of long ago, until a deadline."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(gather, TINY, 6, probe_s=100.0, rtt_s=0.01))
    rows = np.zeros((1, CHUNK_BYTES), np.uint8)
    for peer in (1, 2):
        ones, bits = np.ones(1, np.float32), np.array([1 << peer], np.uint64)
        run = whole_message(peer, MessageKey(0, newest, SCATTER, peer), rows, ones, bits)
        node.step(0.0, Arrived((run,)))
    effects = node.step(0.0, Offer(0, rows, 1.0, number=4))
    assert bool(outcomes_of(effects)) is not waits


@pytest.mark.parametrize("away", [True, False])
def test_who_owns_blocks_of_a_round_that_is_not_begun_yet_follows_from_what_is_known_now(away: bool) -> None:
    """Peers that heard of a round before they began it had other owners than the rest, and waited."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(direct, TINY, 6, probe_s=0.1, rtt_s=0.01))
    node.crew.elsewhere = lambda channel: frozenset({1} if not away else ())
    node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    node.crew.elsewhere = lambda channel: frozenset({1} if away else ())
    node.step(0.01, message(2, 1, SCATTER, 0, 2))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and rounds.active == 0
    assert (1 in rounds.rounds[0].spec.owners) is away
    assert (1 in rounds.rounds[1].spec.owners) is not away


@pytest.mark.parametrize(
    ("behind", "apart"), [({7: 4}, {1}), ({0: standing.AWAY}, {1}), ({0: 4}, set()), ({}, set())]
)
def test_a_peer_that_says_that_it_is_elsewhere_is_not_waited_for(
    behind: dict[int, int], apart: set[int]
) -> None:
    posting, node = Node(1, 2, 1), Node(0, 2, 1)
    node.configure(0, Channel(direct, TINY, 6, probe_s=0.1, rtt_s=0.01))
    sent = posting.step(0.0, Post(standing.TOPIC, standing.encode(behind)))
    node.step(0.0, Arrived(tuple(replace(e.run, peer=1) for e in sent if isinstance(e, Send))))
    assert node.crew.elsewhere(0) == apart
    (outcome,) = outcomes_of(node.step(1.0, Average(0, vectors(2, 6)[0], 1.0))) or [None]
    assert (outcome is not None) == bool(apart)


def test_who_begins_too_late_again_and_again_leaves_a_round_out() -> None:
    node, often = owner_of_all(), 5
    numbers: list[int] = []
    for number in range(often + 1):
        told = [] if number == 0 else node.step(number - 0.1, reduced(1, number, 0b110))
        begun = [] if number == 0 else node.step(number, Average(0, vectors(3, 1)[0], 1.0))
        rest = [e for peer in (1, 2) for e in node.step(number + 0.1, reduced(peer, number, 0b110))]
        numbers += [outcome.round for outcome in outcomes_of(told + begun + rest)]
    assert numbers == list(range(often))
    ended = [e for peer in (1, 2) for e in node.step(9.0, reduced(peer, 99, 0b110))]
    assert [outcome.round for outcome in outcomes_of(ended)] == [often + 1]


# -- Deadlines


def early(others_after_s: float, deadline_s: float | None = None) -> Outcome:
    """What comes of a peer's first round, with a deadline of 75 ms, when the four others begin later."""
    world = World(5, rps, 20, probe_s=0.05)
    for peer, given in enumerate(vectors(5, 20)):
        world.average(peer, given, after_s=0.0 if peer == 0 else others_after_s, deadline_s=deadline_s)
    return world.run().outcomes[0][0]


def test_where_most_have_not_come_by_the_deadline_a_peer_is_early_and_waits_once_more() -> None:
    outcome = early(0.1)
    assert not outcome.expired and outcome.missed == () and outcome.averaged.all()
    assert heard(outcome) == set(range(5))
    assert 0.1 < outcome.total_s < 2 * HEADROOM * 0.05


def test_it_waits_no_more_than_once() -> None:
    outcome = early(1.0)
    assert outcome.expired and outcome.missed == (1, 2, 3, 4) and not outcome.averaged[0]
    assert outcome.scatter_s == pytest.approx(2 * HEADROOM * 0.05)


def test_who_is_early_does_not_wait_beyond_a_callers_deadline() -> None:
    assert early(0.1, deadline_s=0.06).total_s <= 0.06 + 1e-9
    assert early(1.0, deadline_s=0.16).scatter_s == pytest.approx(0.16 - HEADROOM * 0.05)


def test_the_first_round_of_a_channel_has_as_long_as_was_computed_since_peers_met_on_another() -> None:
    """After 10 s of rounds on channel 0 the others come to the first one of channel 1 only after a second."""
    n, rounds = 4, 100
    world = World(n, rps, 20)
    for node in world.nodes:
        node.configure(1, Channel(rps, TINY, 20, 0.05, 0.005, 0.02))
    own, ended = vectors(n, 20), []

    def on_done(peer: int, outcome: Outcome) -> None:
        ended.append(outcome)
        if outcome.channel == 0 and outcome.round < rounds:
            world.average(peer, own[peer], after_s=0.1)
        elif outcome.channel == 0:
            world.push(world.now_s + 0.1 + 1.0 * (peer > 0), peer, Average(1, own[peer], 1.0))

    world.on_done = on_done
    for peer in range(n):
        world.average(peer, own[peer])
    world.run()
    first = next(
        outcome for outcome in ended if outcome.channel == 1 and outcome.started_s < world.now_s - 0.5
    )
    assert first.started_s > 10.0 and first.missed == (1, 2, 3)
    assert 0.1 < first.total_s < 0.5


def after_a_freeze(frozen: tuple[int, ...], gave: bool, apart_s: float = 0.01) -> list[Outcome]:
    """Rounds of nine peers that begin one after the other; in the last one some freeze, when they have given
    their copies or before. What the others make of it.
    """
    n, last = 9, 12
    world = World(n, rps_repair, 20, floor_s=0.004, probe_s=0.1)
    again = values(n, 20)

    def on_done(peer: int, outcome: Outcome) -> None:
        at, begins_s = len(world.outcomes[peer]), apart_s * peer
        if at <= last:
            world.average(peer, again(peer, at), after_s=begins_s)
            if at == last and peer in frozen:
                from_s = world.now_s + begins_s + (1e-6 if gave else -1e-6)
                world.frozen[peer] = (from_s, from_s + 5.0)

    world.on_done = on_done
    for peer in range(n):
        world.average(peer, again(peer, 0), after_s=apart_s * peer)
    world.run()
    return [world.outcomes[peer][last] for peer in range(n) if peer not in frozen]


@pytest.mark.parametrize("frozen", [(3,), (0, 4, 6)])
def test_who_freezes_when_it_has_given_its_share_costs_no_scatter_deadline(frozen: tuple[int, ...]) -> None:
    """It is asked whether it is there, after 6 ms (a gather's budget), and has 10 ms to answer."""
    for outcome in after_a_freeze(frozen, gave=True):
        assert outcome.missed == frozen and heard(outcome) == set(range(9))
        if outcome.scatter_s > 0:  # the last to begin; in a first stage of no length nobody was asked
            assert outcome.gather_s <= 0.016 + 1e-9


@pytest.mark.parametrize("frozen", [(8,), (7, 8), (0, 1), (0, 1, 2)])
def test_who_freezes_before_it_has_given_anything_costs_no_scatter_deadline(frozen: tuple[int, ...]) -> None:
    """They are asked every 16 ms. The first one begins 160 ms before the last one, and its deadline is 1.5
    times what such rounds take. The last one begins when all are in but those that froze: it asks, too.
    """
    living = [peer for peer in range(9) if peer not in frozen]
    for peer, outcome in zip(living, after_a_freeze(frozen, gave=False, apart_s=0.02), strict=True):
        assert outcome.missed == frozen and heard(outcome) == set(living)
        assert outcome.scatter_s <= 0.02 * (8 - peer) + 2 * 0.016 + 0.004


@pytest.mark.parametrize("loss", [0.1, 0.2])
def test_who_only_begins_late_is_asked_and_waited_for_though_datagrams_are_lost(loss: float) -> None:
    """Peer 8 begins 10 ms after the last of the others in each round, and 40 ms after it in the last one."""
    n, last = 9, 20
    world = World(n, rps_repair, 20, floor_s=0.004, loss=loss)
    again = values(n, 20)

    def on_done(peer: int, outcome: Outcome) -> None:
        at = len(world.outcomes[peer])
        if at <= last:
            world.average(peer, again(peer, at), after_s=0.01 * peer + 0.03 * (at == last and peer == 8))

    world.on_done = on_done
    for peer in range(n):
        world.average(peer, again(peer, 0), after_s=0.01 * peer)
    world.run()
    asked = sum(
        isinstance(e, Send) and e.run.key.stage == QUESTION and e.run.peer == 8 and e.run.key.round == last
        for _, _, _, effects in world.log
        for e in effects
    )
    assert asked >= 4  # those whose deadline is longer than a question and its answer take
    first = world.outcomes[0][last]
    assert heard(first) == set(range(n)) and first.missed == ()


def test_where_most_freeze_when_they_have_given_their_share_they_are_asked_later() -> None:
    """More likely the others find out that a peer is silent, for as long as a question and its answer take:
    after that time, 16 ms, they are asked, and have 10 ms to answer. The deadline is above 70 ms.
    """
    outcomes = after_a_freeze((0, 1, 2, 3, 4), gave=True)
    assert all(outcome.missed == (0, 1, 2, 3, 4) for outcome in outcomes)
    assert outcomes[-1].gather_s == pytest.approx(0.026)


def test_who_answers_late_again_and_again_is_soon_given_the_time_it_takes() -> None:
    """A busy machine: answers take 60 ms where round trips tell of 4. Until then some are ahead of others."""
    n, rounds = 9, 40
    world = World(n, rps_repair, 20, floor_s=0.004, probe_s=0.2)
    world.carry = lambda source, run: [(0.06 if run.key.stage == HERE else 0.0, run)]
    again = values(n, 20)

    def on_done(peer: int, outcome: Outcome) -> None:
        if len(world.outcomes[peer]) < rounds:
            world.average(peer, again(peer, outcome.round + 1), after_s=0.01 * peer)

    world.on_done = on_done
    for peer in range(n):
        world.average(peer, again(peer, 0), after_s=0.01 * peer)
    world.run()
    missed = [bool(outcome.missed) for outcome in world.outcomes[0]]
    assert any(missed[:4]) and not any(missed[20:])
    assert world.nodes[0].channels[0].patience.factor > 4


def test_patience_grows_with_those_given_up_too_early_and_only_with_them() -> None:
    patience = Patience()
    for peer in (1, 2):
        patience.gave_up(3, peer, 5.0)
    patience.answered(4.0, 1, 3)  # it was there
    assert patience.factor == 2
    patience.answered(6.0, 2, 3)  # later than the deadline: that would have ended without it, too
    assert patience.factor == 2
    patience.answered(6.0, 2, 3)
    assert 1.9 < patience.factor < 2
    for number in range(400):
        patience.answered(7.0, 1, number)
    assert patience.factor == 1


@pytest.mark.parametrize("stage", [QUESTION, HERE])
def test_who_asks_or_answers_unasked_changes_nothing(stage: int) -> None:
    """Nor does it count as taking part: a node answers though its trainer may hang."""
    node = hand()
    own = vectors(3, 6)[0]
    for round_ in range(3):
        finish(node, float(round_), own)
    effects = node.step(5.0, Arrived([blob_message(1, MessageKey(0, 3, stage, 0), b"")]))
    answers = [e.run.key.stage for e in effects if isinstance(e, Send)]
    assert answers == ([HERE] if stage == QUESTION else []) and len(effects) == len(answers)
    assert node.silent_rounds(1) == 3
    assert node.step(5.0, Arrived([blob_message(7, MessageKey(0, 3, stage, 0), b"")])) == []  # no member


@SCATTERING
def test_a_callers_deadline_bounds_the_round(method: Averager) -> None:
    world = World(3, method, 9, probe_s=100.0)
    world.dead[2] = 0.0
    for outcome in world.once(vectors(3, 9), deadline_s=0.06):
        assert outcome.expired
        assert outcome.total_s <= 0.06 + 1e-9


def test_the_first_deadline_is_the_probes_and_later_ones_follow_the_line() -> None:
    world = World(4, rps, 20, probe_s=3.0, floor_s=0.0)
    assert world.nodes[0].channels[0].budgets_s() == pytest.approx((3 * HEADROOM, 3 * HEADROOM))
    world.rounds(40, values(4, 20))
    for node in world.nodes:
        assert max(node.channels[0].budgets_s()) <= HEADROOM * 4 * world.latency_s


# -- Misuse


def test_two_averages_at_once() -> None:
    node = hand()
    node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    with pytest.raises(RuntimeError, match="round 0 of channel 0 is not done yet"):
        node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))


def test_a_channel_that_is_not_configured() -> None:
    with pytest.raises(KeyError, match="channel 4 is not configured"):
        hand().step(0.0, Average(4, vectors(3, 6)[0], 1.0))


@pytest.mark.parametrize("shape", [(5, 4), (6, 5), (24,), (6, 4, 1)])
def test_values_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"values of shape .* on a channel of \(6, 4\)"):
        hand().step(0.0, Average(0, np.zeros(shape, np.float32), 1.0))  # type: ignore[arg-type]


def test_after_misuse_the_node_works() -> None:
    node = hand()
    with pytest.raises(ValueError, match="values of shape"):
        node.step(0.0, Average(0, vectors(3, 5)[0], 1.0))
    assert finish(node, 0.0, vectors(3, 6)[0]).round == 0


@pytest.mark.parametrize(
    ("me", "n", "what"),
    [
        (0, 0, "a crew of 0"),
        (0, SEATS_MAX + 1, "a crew of 1025 peers: a crew has 1 to 1024"),
        (3, 3, "peer 3 of 3"),
    ],
)
def test_impossible_crews(me: int, n: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Node(me, n, 0)


def test_the_largest_crew_that_averages_directly_is_64() -> None:
    assert PEERS_MAX == 64
    assert Node(63, 64, 0).live == frozenset(range(64))


@pytest.mark.parametrize(
    "method",
    [rps, RPS(repair=True), direct, AllReduce(), ring, gather, centre("every", Each())],
    ids=lambda m: m.name,
)
def test_what_averages_directly_says_the_way_out_of_64_seats(method: Averager) -> None:
    node = Node(70, 71, 0)
    with pytest.raises(ValueError, match=r"71 seats, and '.*' averages 64 at most; larger .*Moshpit\(group="):
        node.configure(0, Channel(method, TINY, 5, 0.1, 0.01))
    node.configure(0, Channel(Moshpit(8), TINY, 5, 0.1, 0.01))
    assert node.room == SEATS_MAX


def test_a_crew_that_averages_directly_lets_nobody_into_a_65th_seat() -> None:
    node = Node(0, 64, 0)
    node.configure(0, Channel(Moshpit(8), TINY, 5, 0.1, 0.01))
    node.configure(9, Channel(rps, TINY, 5, 0.1, 0.01, passing=True))
    assert node.room == SEATS_MAX  # a probe decides nothing
    node.configure(1, Channel(rps, TINY, 5, 0.1, 0.01))
    assert node.room == PEERS_MAX
    (note,) = node.step(0.0, Joined(64))
    assert isinstance(note, Noted) and (note.what, note.peer) == ("refused", 64)
    assert node.n == 64 and 64 not in node.live


def test_a_probe_ends_where_the_crew_grows_beyond_64() -> None:
    node = Node(0, 64, 0)
    node.configure(0, Channel(Moshpit(8), TINY, 5, 0.1, 0.01))
    node.configure(9, Channel(rps, TINY, 5, 0.1, 0.01, passing=True))
    own = vectors(1, 5)[0]
    asked = node.step(0.0, Average(9, own, 1.0))
    node.step(0.0, Joined(64))
    assert node.n == 65 and 64 in node.live
    timers = [e for e in asked if isinstance(e, Arm)]
    outcome = None
    while outcome is None:  # the round under way ends by its deadlines
        timer = timers.pop(0)
        effects = node.step(timer.at_s, Expired(timer.timer))
        timers += [e for e in effects if isinstance(e, Arm)]
        outcome = outcome_of(effects)
    with pytest.raises(RuntimeError, match="the crew has grown to 65 seats; larger crews average in groups"):
        node.step(1.0, Average(9, own, 1.0))
    late = TINY.encode(own[:1])
    run = whole_message(3, MessageKey(9, 1, SCATTER, 0), late, np.ones(1, np.float32), np.ones(1, np.uint64))
    assert node.step(1.0, Arrived((run,))) == []


def test_a_channel_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        hand().configure(1, Channel(rps, TINY, 0, 0.1, 0.01))


def test_a_ring_of_one_and_alone_in_a_crew() -> None:
    for method in (rps, rps_repair, direct, ring):
        node = Node(0, 1, 0)
        node.configure(0, Channel(method, TINY, 5, 0.1, 0.01))
        own = vectors(1, 5)[0]
        outcome = outcome_of(node.step(0.0, Average(0, own, 1.0)))
        assert outcome is not None
        assert np.array_equal(outcome.mean, own)


# -- Peers set aside


def test_a_round_does_not_wait_for_who_is_set_aside_and_takes_what_it_sends() -> None:
    n, n_chunks = 4, 20
    aside = frozenset({3})
    world = World(n, rps, n_chunks)
    of = values(n, n_chunks)
    turns = [0] * n

    def ask(peer: int, at_s: float) -> None:
        world.push(at_s, peer, Average(0, of(peer, turns[peer]), 1.0, None, aside))
        turns[peer] += 1

    def again(peer: int, outcome: Outcome) -> None:
        if peer == 3 and len(world.outcomes[3]) < 5:  # late: it takes an average, then gives to the next one
            ask(3, world.now_s + 0.4 * (len(world.outcomes[3]) % 2))
        if peer != 3 and len(world.outcomes[peer]) < 40:
            ask(peer, world.now_s + 0.02)

    world.on_done = again
    for peer in range(n):
        ask(peer, 0.0)
    world.run()
    with_it = 0
    for peer in range(3):
        assert len(world.outcomes[peer]) == 40
        for outcome in world.outcomes[peer]:
            assert outcome.waited_for == tuple(sorted({0, 1, 2} - {peer}))
            assert not outcome.expired
            assert outcome.averaged.all()  # the slow one owns no block
            assert {0, 1, 2} <= heard(outcome)
            with_it += 3 in heard(outcome)
        assert noted(world, peer) == []  # neither silent nor heard again
    assert with_it == 2 * 3
    assert noted(world, 3) == []
    for outcome in world.outcomes[3]:
        assert outcome.averaged.all()


def test_who_is_set_aside_and_dies_costs_one_deadline_once_it_is_expected_again() -> None:
    world = World(4, rps, 20, probe_s=0.05)
    world.dead[3] = 0.0
    aside = [frozenset({3})] * 3 + [frozenset[int]()] * 4
    of, turns = values(4, 20), [0] * 4

    def ask(peer: int, outcome: Outcome | None = None) -> None:
        if turns[peer] < len(aside):
            world.push(
                world.now_s + 0.001, peer, Average(0, of(peer, turns[peer]), 1.0, None, aside[turns[peer]])
            )
            turns[peer] += 1

    world.on_done = ask
    for peer in range(3):
        ask(peer)
    world.run()
    for peer in range(3):
        assert [outcome.expired for outcome in world.outcomes[peer]] == [False] * 3 + [True] + [False] * 3
        assert noted(world, peer) == [("silent", 3)]


def test_where_all_are_set_aside_blocks_have_owners_all_the_same() -> None:
    world = World(3, rps, 7)
    everybody = frozenset(range(3))
    for peer in range(3):
        world.push(0.0, peer, Average(0, values(3, 7)(peer, 0), 1.0, None, everybody))
    world.run()
    for peer in range(3):
        assert world.outcomes[peer][0].waited_for == ()


def test_the_peer_whose_copies_ended_the_wait_is_named() -> None:
    world = World(3, rps, 7, probe_s=1.0)
    for peer, at_s in ((0, 0.0), (1, 0.0), (2, 0.1)):
        world.push(at_s, peer, Average(0, values(3, 7)(peer, 0), 1.0))
    world.run()
    for peer in (0, 1):
        assert world.outcomes[peer][0].last == 2
