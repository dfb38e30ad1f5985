"""What comes no more is not waited for: its sender has ended the round, or takes another for an owner."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.core.types import (
    Arrived,
    Average,
    Effect,
    Event,
    Expired,
    Floats,
    MessageKey,
    Outcome,
    Run,
    Send,
)
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.far_rounds import JUMP_MAX
from ragtag.protocols.crew.joining import LAST_PROBE
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.asking import HERE, NEVER, QUESTION, question
from ragtag.protocols.rounds.base import GATHER, SCATTER, blob_message, whole_message
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.protocols.rounds.stages import Stages
from tests.protocols.harness import TINY, World, vectors

N, LAST, ODD = 4, 12, 10
METHODS = pytest.mark.parametrize("method", [rps, rps_repair, direct], ids=lambda m: m.name)


def one_odd_round(method: Averager, late_s: float) -> World:
    """Peers of which the last begins 200 ms after the others, so that their deadlines are 300 ms and more.

    In round ``ODD`` what peer 3 made of its block comes to peer 0 so much later.
    """
    world = World(N, method, 8, floor_s=0.004, probe_s=0.3)
    own = vectors(N, 8)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        odd = run.key.round == ODD and run.key.stage == GATHER and (source, run.peer) == (3, 0)
        return [(late_s if odd else 0.0, run)]

    def again(peer: int, outcome: Outcome) -> None:
        if len(world.outcomes[peer]) <= LAST:
            world.average(peer, own[peer], after_s=0.1 + 0.2 * (peer == 3))

    world.carry, world.on_done = carry, again
    for peer in range(N):
        world.average(peer, own[peer], after_s=0.2 * (peer == 3))
    return world.run()


def whole(outcome: Outcome, peers: Iterable[int] = range(N)) -> bool:
    """Whether all values of these peers are in."""
    each = sum(1 << peer for peer in peers)
    return bool((outcome.heard & each == each).all())


@METHODS
def test_what_a_peer_sent_that_has_ended_the_round_is_not_waited_for_until_the_deadline(
    method: Averager,
) -> None:
    world = one_odd_round(method, late_s=10.0)
    odd, after = world.outcomes[0][ODD], world.outcomes[0][ODD + 1]
    assert odd.missed == (3,) and not whole(odd)
    assert (
        odd.total_s - odd.scatter_s < 0.06
    )  # a gather's budget and an answer's: 16 ms, with the patience of all-reduce 50
    assert whole(after) and after.round == ODD + 1


@METHODS
def test_and_that_lengthens_no_deadline(method: Averager) -> None:
    calm, odd = one_odd_round(method, 0.0), one_odd_round(method, 10.0)
    for of_calm, of_odd in zip(
        calm.nodes[0].channels[0].budgets_s(), odd.nodes[0].channels[0].budgets_s(), strict=True
    ):
        assert of_odd == pytest.approx(of_calm, rel=0.2)


@METHODS
def test_what_was_on_its_way_and_comes_while_an_answer_may_take_counts(method: Averager) -> None:
    """It is asked for 4 ms (a gather's budget) after the others' have come; the answer may take 10."""
    outcome = one_odd_round(method, late_s=0.01).outcomes[0][ODD]
    assert whole(outcome) and outcome.missed == ()


@METHODS
def test_who_does_not_answer_costs_the_time_of_an_answer_however_patient_the_averager_is(
    method: Averager,
) -> None:
    """Rounds take 84 ms, as one of two peers begins 50 ms after the other; then the third falls silent."""
    world, own = World(3, method, 8, floor_s=0.004, probe_s=0.3), vectors(3, 8)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        silent = source == 2 and run.key.round >= ODD
        return [] if silent else [(0.03 if run.key.stage == GATHER else 0.0, run)]

    def again(peer: int, outcome: Outcome) -> None:
        if len(world.outcomes[peer]) <= LAST:
            world.average(peer, own[peer], after_s=0.1 + 0.05 * (peer == 1))

    world.carry, world.on_done = carry, again
    for peer in range(3):
        world.average(peer, own[peer])
    world.run()
    calm, odd = world.outcomes[0][ODD - 1 : ODD + 1]
    assert odd.missed == (2,)
    assert odd.total_s < 2 * calm.total_s


# -- Questions of the next round

METHOD_N = pytest.mark.parametrize(("method", "n"), [(rps, 2), (direct, 2), (direct, 3), (direct, 4)])


def one_round_behind(method: Averager, n: int, late_s: float) -> World:
    """Peers of which the last begins 200 ms after the others. In round ``ODD`` all averages come to peer 0 so
    much later, while the others begin the next round, and ask it for its shares.
    """
    world, own = World(n, method, 8, floor_s=0.004, probe_s=0.3), vectors(n, 8)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        odd = run.key.round == ODD and run.key.stage == GATHER and run.peer == 0
        return [(late_s if odd else 0.0, run)]

    def again(peer: int, outcome: Outcome) -> None:
        if len(world.outcomes[peer]) <= LAST:
            world.average(peer, own[peer], after_s=0.1 + 0.2 * (peer == n - 1))

    world.carry, world.on_done = carry, again
    for peer in range(n):
        world.average(peer, own[peer], after_s=0.2 * (peer == n - 1))
    return world.run()


@METHOD_N
def test_who_lacks_all_averages_asks_once_it_sees_others_in_the_next_round(method: Averager, n: int) -> None:
    """Until its deadline it would hold the others up, to which it says that it is there (up to 2.4 s)."""
    world = one_round_behind(method, n, late_s=100.0)
    odd, after = world.outcomes[0][ODD : ODD + 2]
    assert odd.missed == tuple(range(1, n))
    asks = n > 2 and method is direct  # else the only other one is seen in the next round 200 ms later
    assert odd.gather_s < (0.13 if asks else 0.4), "others begin 100 and 300 ms later, and ask once they wait"
    assert (after.heard == (1 << n) - 1).all()
    assert all(world.outcomes[peer][ODD + 1].total_s < 0.4 for peer in range(n))


@METHOD_N
def test_what_comes_after_the_first_question_counts(method: Averager, n: int) -> None:
    """A question, or the answer to one, may overtake what left before it, which is longer."""
    world = one_round_behind(method, n, late_s=100.0)

    def asks(event: Event, effects: list[Effect]) -> bool:
        """Whether the others ask, or this peer does, which has seen that they are in the next round."""
        theirs = isinstance(event, Arrived) and event.runs[0].key[1:3] == (ODD + 1, QUESTION | SCATTER)
        own = [effect.run.key for effect in effects if isinstance(effect, Send)]
        return theirs or any(key[1:3] == (ODD, QUESTION | GATHER) for key in own)

    asked_s = next(at_s for at_s, peer, event, effects in world.log if peer == 0 and asks(event, effects))
    odd = world.outcomes[0][ODD]
    late_s = asked_s - odd.started_s - odd.scatter_s + 0.008  # a gather's budget later it is too late
    odd = one_round_behind(method, n, late_s).outcomes[0][ODD]
    assert odd.missed == ()
    assert (odd.heard == (1 << n) - 1).all()


def test_peers_in_a_ring_of_cuts_find_out_after_what_the_middle_round_takes() -> None:
    """Each does not hear the one before it. By longer rounds, which that wait has made, they would teach each
    other to wait: three times as long in the mean of these crews.
    """
    medians = []
    for n, seed in itertools.product((4, 5), (1, 2)):
        draw = generator(seed, "ring of cuts", n)
        world, own = World(n, rps, 8, seed=seed, latency_s=0.0004, probe_s=0.01, floor_s=0.002), vectors(n, 8)

        def carry(source: int, run: Run, world: World = world, n: int = n) -> list[tuple[float, Run]]:
            return [] if world.now_s >= 1.0 and run.peer == (source + 1) % n else [(0.0, run)]

        def again(
            peer: int,
            outcome: Outcome,
            world: World = world,
            own: list[Floats] = own,
            draw: np.random.Generator = draw,
        ) -> None:
            if world.now_s < 4.0:
                world.average(peer, own[peer], after_s=draw.uniform(0.05, 0.075))

        world.carry, world.on_done = carry, again
        for peer in range(n):
            world.average(peer, own[peer], after_s=0.005 * draw.random())
        world.run()
        medians.append(median(o.total_s for of in world.outcomes for o in of if o.started_s > 2.0))
    assert fmean(medians) < 0.34 * 0.0625, "a part of a step"


# -- What is answered


def answers(effects: list[Effect]) -> list[int]:
    return [effect.run.key.stage for effect in effects if isinstance(effect, Send)]


def founder(method: Averager = direct) -> Node:
    """Peer 0 of 3, in no round yet, with a channel of six chunks."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(method, TINY, 6, probe_s=100.0, rtt_s=0.01))
    return node


def asked(node: Node, round_: int, stage: int, block: int, peer: int = 1) -> list[int]:
    return answers(node.step(1.0, Arrived([question(peer, MessageKey(0, round_, stage, block))])))


def test_a_round_that_is_skipped_is_over_as_one_that_has_ended() -> None:
    node = founder()
    assert asked(node, 0, SCATTER, 1) == [HERE]
    node.resume(0, 4)
    assert [asked(node, number, SCATTER, 1) for number in (3, 4, 5, 6)] == [[NEVER], [NEVER], [HERE], [HERE]]
    early = blob_message(2, MessageKey(0, 7, SCATTER, 0), b"")
    node.step(1.0, Arrived([early]))  # the next round that begins here is 7
    assert [asked(node, number, SCATTER, 1) for number in (5, 6, 7)] == [[NEVER], [NEVER], [HERE]]
    node.step(1.0, Average(0, vectors(3, 6)[0], 1.0))
    assert [asked(node, number, SCATTER, 1) for number in (6, 7, 8)] == [[NEVER], [HERE], [HERE]]


def test_a_question_tells_which_round_the_others_are_in_but_for_one_that_is_made_up() -> None:
    node = founder()
    assert not node.newer(0)
    assert asked(node, JUMP_MAX + 1, SCATTER, 1) == [HERE] and not node.newer(0)
    assert asked(node, 6, SCATTER, 1) == [HERE] and node.newer(0)
    node.step(1.0, Average(0, vectors(3, 6)[0], 0.0))
    rounds = node.channels[0]
    assert isinstance(rounds, Rounds) and rounds.active == 6


def test_who_takes_another_for_the_owner_of_a_block_says_so() -> None:
    """Whether it is asked for its share, or for what it made of the block; but not before it has begun."""
    node = founder()
    node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    machine = node.channels[0].rounds[0]
    assert isinstance(machine, Stages)
    owners = machine.spec.owners
    assert sorted(owners) == [0, 1, 2]
    for block, owner in enumerate(owners):
        assert asked(node, 0, SCATTER, block, peer=1) == [HERE if owner == 1 else NEVER]
        assert asked(node, 0, GATHER, block, peer=1) == [HERE if owner == 0 else NEVER]
        assert asked(node, 1, GATHER, block, peer=1) == [HERE]
    grown = MessageKey(0, 0, GATHER, 1 << 6 | 1)  # a block of another cut
    assert answers(node.step(1.0, Arrived([question(1, grown)]))) == [HERE]
    assert asked(node, 0, 5, 0) == []  # no stage that one may ask for


def test_a_block_that_goes_elsewhere_costs_its_question_and_the_others_are_still_awaited() -> None:
    """Peer 0 takes 1 and 2 for owners of a block each; both say what is to be said of what it lacks."""
    node = founder()
    sent = node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    machine = node.channels[0].rounds[0]
    assert isinstance(machine, Stages)
    mine, of_1, of_2 = (machine.spec.owners.index(owner) for owner in range(3))
    share = next(e.run for e in sent if isinstance(e, Send) and e.run.key.block == of_1)

    def arrives(peer: int, stage: int, block: int) -> list[Effect]:
        return node.step(0.01, Arrived([replace(share, peer=peer, key=MessageKey(0, 0, stage, block))]))

    arrives(1, SCATTER, mine)
    waiting, lacking = machine.waiting, {(2, SCATTER, mine)}
    assert waiting.owed == lacking
    asks_s = waiting._next[1]
    machine.step(asks_s, Expired(machine.spec.timer("ask scatter")))
    answers_s = waiting._next[1]
    node.step(
        0.02, Arrived([blob_message(2, MessageKey(0, 0, NEVER, of_1), b"")])
    )  # not what it was asked for
    assert waiting.never == set()
    node.step(0.02, Arrived([blob_message(2, MessageKey(0, 0, NEVER, mine), b"")]))
    assert waiting.never == lacking == waiting.owed
    machine.step(asks_s, Expired(machine.spec.timer("answer scatter")))  # of an earlier question
    assert waiting.owed == lacking
    machine.step(answers_s, Expired(machine.spec.timer("answer scatter")))
    assert waiting.owed == {(1, GATHER, of_1), (2, GATHER, of_2)}
    assert machine.lesson().in_vain == {2} and waiting.missed() == (2,)


def test_what_others_made_of_ones_own_block_speaks_for_those_that_they_name_and_for_no_others() -> None:
    """Peers 2 and 3 do not hear peer 1, and reduce its block, with 4's share. Peer 0 gives peer 1 its own."""
    n = 5
    node = Node(1, n, seed=1)
    node.configure(0, Channel(rps_repair, TINY, n, probe_s=100.0, rtt_s=0.01))
    node.step(0.0, Average(0, vectors(n, n)[1], 1.0))
    machine = node.channels[0].rounds[0]
    assert isinstance(machine, Stages)
    mine = machine.spec.owners.index(1)
    assert {peer for peer, _, _ in machine.waiting.owed} == {0, 2, 3, 4}
    weight, heard = np.full(1, 3.0, np.float32), np.array([0b11100], np.uint64)
    for teller, left in ((2, {0, 3, 4}), (3, {0})):
        made = TINY.encode(vectors(n, 1)[teller])
        run = whole_message(teller, MessageKey(0, 0, GATHER, mine), made, weight, heard)
        node.step(0.01, Arrived([run]))
        assert {peer for peer, _, _ in machine.waiting.owed} == left


PROBE_S = 60.0
"""How long peers wait for each other at most, as they open a channel."""


def probing(among: dict[int, frozenset[int]], begins: dict[int, float], away: int | None = None) -> World:
    """Two probes each, of peers that came from a meeting; each begins them so late, or is dead.

    among: those that a peer counts on, where not all.
    away: one that hears nothing before it begins.
    """
    world = World(N, rps_repair, 8, probe_s=PROBE_S)
    for node in world.nodes:
        there = among.get(node.me)
        node.configure(0, Channel(rps_repair, TINY, 8, PROBE_S, 5e-3, passing=True, among=there))
    own = vectors(N, 8)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round < LAST_PROBE:
            world.average(peer, own[peer], deadline_s=PROBE_S)

    def carry(_: int, run: Run) -> list[tuple[float, Run]]:
        return [] if run.peer == away and world.now_s < begins[run.peer] else [(0.0, run)]

    world.carry = carry
    world.on_done, world.dead = again, dict.fromkeys(set(range(N)) - begins.keys(), 0.0)
    for peer, after_s in begins.items():
        world.average(peer, own[peer], after_s=after_s, deadline_s=PROBE_S)
    return world.run()


@pytest.mark.parametrize("late_s", [0.001, 0.005, 0.5])
def test_a_probe_without_those_that_have_done_with_theirs_ends_within_some_seconds(late_s: float) -> None:
    """A peer was away as the others met: it waited for their probes until the deadline, a minute each."""
    without = frozenset({0, 1, 2})
    world = probing(dict.fromkeys(without, without), dict.fromkeys(without, 0.0) | {3: late_s})
    assert [len(of) for of in world.outcomes[:3]] == [2] * 3
    assert all(whole(outcome, without) for of in world.outcomes[:3] for outcome in of)
    assert all(outcome.total_s < 0.1 for of in world.outcomes[:3] for outcome in of)
    assert world.outcomes[3][-1].round == LAST_PROBE
    assert all(outcome.total_s < 5.0 for outcome in world.outcomes[3])


def test_who_comes_back_when_all_have_probed_waits_once_in_each_probe() -> None:
    """It waited in both stages, though those that have done with a probe said so in the first."""
    without = frozenset({0, 1, 2})
    world = probing(dict.fromkeys(without, without), dict.fromkeys(without, 0.0) | {3: 0.5}, away=3)
    assert [outcome.missed for outcome in world.outcomes[3]] == [tuple(without)] * 2
    # a question after a second, and its answer's time
    assert all(outcome.total_s == pytest.approx(2 * INITIAL_RTO_S) for outcome in world.outcomes[3])


def test_a_probe_waits_for_those_that_take_long_to_come_to_it() -> None:
    world = probing({}, dict.fromkeys(range(3), 0.0) | {3: 7.0})
    assert all(whole(outcome) for of in world.outcomes for outcome in of)
    assert [len(of) for of in world.outcomes] == [2] * N


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_probe_ends_within_some_seconds_of_deaths(left: int) -> None:
    world = probing({}, dict.fromkeys(range(left), 0.0))
    dead = tuple(range(left, N))
    assert [[outcome.missed for outcome in of] for of in world.outcomes[:left]] == [[dead, ()]] * left
    assert all(outcome.total_s < 5.0 for of in world.outcomes for outcome in of)
