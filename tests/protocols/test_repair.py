"""Requests for repair: what is missing, in bitmaps that each decode alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Arrived, Average, Bools, MessageKey, Outcome, Run, Send
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import AllReduce, direct
from ragtag.protocols.rounds.base import NACK, Incoming, Spec
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.repair import BITS, COPIES, Repairer, request, requested
from ragtag.protocols.rounds.rps import RPS, rps_repair
from ragtag.simulation.worlds.rounds import World
from tests.protocols.harness import World as Crew
from tests.protocols.harness import mean_of_heard, members, vectors

KEY = MessageKey(1, 2, 0, 3)
HOLES = st.tuples(
    st.sampled_from([1, 7, BITS - 1, BITS, BITS + 1, 2 * BITS + 5]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.001, 0.1, 0.9]),
)


def holes(drawn: tuple[int, int, float]) -> Bools:
    total, seed, rate = drawn
    return np.random.default_rng(seed).random(total) < rate


def parts(run: Run, total: int) -> list[int]:
    """Which part of the bitmap each row of a request carries; there are several copies of each."""
    k = -(-total // BITS)
    return [(run.first + i) % k for i in range(len(run.payload))]


@given(HOLES)
def test_a_request_names_the_holes(drawn: tuple[int, int, float]) -> None:
    missing = holes(drawn)
    run = request(5, KEY, missing)
    assert (run.peer, run.key) == (5, KEY._replace(stage=NACK))
    assert run.payload.shape == (run.total, CHUNK_BYTES)
    assert set(parts(run, len(missing))) == set(range(-(-len(missing) // BITS)))
    assert np.array_equal(requested(run, len(missing)), missing)


@given(HOLES, st.data())
def test_what_arrives_of_a_request_names_its_part(drawn: tuple[int, int, float], data: st.DataObject) -> None:
    """A part is lost only with all its copies, and costs its own 8,704 chunks and no others."""
    missing = holes(drawn)
    run = request(5, KEY, missing)
    first = data.draw(st.integers(0, run.total - 1))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=run.total, max_size=run.total)))[first:]
    part = replace(run, first=first, payload=run.payload[first:], mask=mask)
    arrived = {j for j, there in zip(parts(part, len(missing)), mask, strict=True) if there}
    named = np.isin(np.arange(len(missing)) // BITS, list(arrived))
    assert np.array_equal(requested(part, len(missing)), missing & named)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("method", [rps_repair, direct, Moshpit(4)], ids=lambda method: method.name)
def test_where_delays_are_zero_repair_takes_some_time_all_the_same(method: Averager) -> None:
    """A measured round trip of no time is no pause: the same would be asked for ever, at one virtual time."""
    nodes = [Node(peer, 4, 1) for peer in range(4)]
    values = np.ones((16, fp32.elements), np.float32)
    done = [0] * 4

    def again(peer: int, at_s: float, outcome: Outcome) -> None:
        done[peer] += 1
        world.at(at_s + 0.01, peer, Average(0, values, 1.0))

    for node in nodes:
        node.configure(0, Channel(method, fp32, 16, probe_s=0.05, rtt_s=1e-3))
    world = World(nodes, Faults(latency_s=0.0, loss=Loss(0.3)), 1, on_done=again)
    for peer in range(4):
        world.at(0.0, peer, Average(0, values, 1.0))
    world.run(1.0)
    assert min(done) >= 5


# -- Under way

TOTAL = 1000
RTT_S = 0.1


def receiver(**given: float) -> tuple[Repairer, Incoming]:
    spec = Spec(
        0, 1, 2, layout_of(4 * TOTAL, 4), (0, 1, 2, 3), frozenset(range(4)), fp32, repair_s=RTT_S, **given
    )
    return Repairer(spec), Incoming(TOTAL)


def came(a: int, b: int, but: tuple[int, ...] = (), ended: bool = False) -> Run:
    mask = ~np.isin(np.arange(a, b), but)
    none = np.zeros((b - a, CHUNK_BYTES), np.uint8)
    return Run(
        5, KEY, a, TOTAL, none, np.ones(b - a, np.float32), np.zeros(b - a, np.uint64), mask, ended=ended
    )


def asks(repairer: Repairer, incoming: Incoming, now_s: float, run: Run) -> list[int]:
    """Which chunks are asked for as a run of a message under way comes."""
    incoming.fresh(run)
    sent = repairer.under_way(now_s, incoming, 5, KEY, 9.0)
    assert all(isinstance(effect, Send) and effect.first for effect in sent)
    named = [requested(effect.run, TOTAL) for effect in sent if isinstance(effect, Send)]
    return [int(at) for one in named for at in np.flatnonzero(one)]


def test_what_later_chunks_have_overtaken_is_asked_for_before_the_message_ends() -> None:
    repairer, incoming = receiver()
    assert asks(repairer, incoming, 0.0, came(0, 200, but=(7, 150))) == []
    assert asks(repairer, incoming, 0.05, came(200, 400, but=(250,))) == [7, 150]
    assert asks(repairer, incoming, 0.1, came(400, 600)) == [250]  # and not again what was asked for
    assert asks(repairer, incoming, 0.16, came(600, 800)) == [7, 150]  # after a round trip without an answer
    assert incoming.left == TOTAL - 800 + 3


def test_what_comes_a_little_late_is_not_asked_for() -> None:
    """The window is a quarter of a round trip (RFC 8985, section 6.2)."""
    repairer, incoming = receiver()
    assert asks(repairer, incoming, 0.0, came(0, 200, but=(7, 8))) == []
    assert asks(repairer, incoming, 0.02, came(200, 400)) == []
    incoming.fresh(came(7, 8))
    assert asks(repairer, incoming, 0.03, came(400, 600)) == [8]


def test_the_window_grows_where_chunks_come_twice() -> None:
    repairer, incoming = receiver()
    reordering = repairer._spec.reordering
    asks(repairer, incoming, 0.0, came(0, 100, but=(7,)))
    assert asks(repairer, incoming, 0.03, came(100, 200, but=(150,))) == [7]
    for _ in range(2):  # it had been overtaken; and the answer to the request
        incoming.fresh(came(7, 8))
    assert asks(repairer, incoming, 0.06, came(200, 300, but=(250,))) == [150]
    assert asks(repairer, incoming, 0.09, came(300, 400)) == []
    assert asks(repairer, incoming, 0.12, came(400, 500)) == [250]
    for _ in range(reordering.PERSISTS):
        assert reordering.windows == 2
        reordering.over()
    assert reordering.windows == 1


def test_one_of_a_requests_copies_is_answered() -> None:
    repairer, _ = receiver()
    repairer.remember(replace(came(0, TOTAL, ended=True), mask=None))
    missing = np.isin(np.arange(TOTAL), (3, 999))
    first, later = (replace(request(0, KEY, missing, number), peer=5) for number in (1, 2))
    parts = [
        replace(first, first=i, payload=first.payload[i : i + 1], heard=first.heard[i : i + 1])
        for i in range(3)
    ]
    assert [len(repairer.answer(part, 9.0)) for part in parts] == [1, 0, 0]
    assert [len(repairer.answer(one, 9.0)) for one in (later, later, first)] == [1, 0, 0]


def test_an_answer_ends_its_message_only_after_the_end() -> None:
    repairer, _ = receiver()
    repairer.remember(replace(came(0, TOTAL, ended=True), mask=None))
    missing = np.arange(TOTAL) == 3
    for number, copies in enumerate((1, COPIES), start=1):
        asked = replace(request(0, KEY, missing, number, copies), peer=5)
        (effect,) = repairer.answer(asked, 9.0)
        assert isinstance(effect, Send) and effect.run.mask is not None
        assert np.array_equal(effect.run.mask, missing)
        assert effect.run.ended == (copies == COPIES)


def test_a_request_in_several_parts_is_answered_with_all_its_copies_and_in_no_other_number() -> None:
    repairer, _ = receiver()
    long = 2 * BITS + 5
    whole = Run(
        5,
        KEY,
        0,
        long,
        np.zeros((long, CHUNK_BYTES), np.uint8),
        np.ones(long, np.float32),
        np.zeros(long, np.uint64),
    )
    repairer.remember(whole)
    missing = np.isin(np.arange(long), (3, BITS + 7, long - 1))
    asked = replace(request(0, KEY, missing, 1, COPIES), peer=5)
    assert asked.total == COPIES * 3
    (effect,) = repairer.answer(asked, 9.0)
    assert isinstance(effect, Send) and effect.run.mask is not None
    assert np.array_equal(effect.run.mask, missing)
    assert repairer.answer(replace(request(0, KEY, missing, 2, COPIES), peer=5, total=2 * 3), 9.0) == []
    later = replace(request(0, KEY, missing, 2, COPIES), peer=5)

    def rows(first: int, count: int) -> int:
        """How many answers these of its rows bring."""
        at = slice(first, first + count)
        some = replace(later, first=first, payload=later.payload[at], heard=later.heard[at])
        return len(repairer.answer(some, 9.0))

    assert [rows(1, 2), rows(0, 1), rows(3, 1), rows(2, 1)] == [1, 1, 0, 0], "each of its parts once"


# -- A share that is enough


def test_a_share_is_enough_and_the_first_passage_is_not_cut() -> None:
    for enough, left, is_in in ((1.0, 1, False), (0.999, 1, True), (0.999, 2, False), (0.5, 501, False)):
        repairer, incoming = receiver(enough=enough)
        incoming.fresh(came(0, TOTAL - left))
        assert not repairer._spec.is_in(incoming)  # more may be on its way
        incoming.fresh(came(TOTAL - 1, TOTAL, but=(TOTAL - 1,), ended=True))
        assert repairer._spec.is_in(incoming) == is_in


@pytest.mark.parametrize("averager", [RPS(repair=0.9), RPS(repair=True), AllReduce()], ids=repr)
def test_each_chunk_counts_once_and_a_round_ends_at_its_share(averager: Averager) -> None:
    inputs = vectors(4, 800)
    world = Crew(4, averager, 800, loss=0.3, probe_s=2.0)
    outcomes = world.once(inputs)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.mean, mean_of_heard(outcome, inputs), atol=1e-5)
    came = np.mean([[len(members(bits)) / 4 for bits in outcome.heard] for outcome in outcomes])
    assert not any(outcome.expired for outcome in outcomes)
    if averager.enough == 1.0:
        assert came == 1.0
    else:
        assert 0.81 <= came < 0.99
        whole = Crew(4, RPS(repair=True), 800, loss=0.3, probe_s=2.0).once(inputs)
        assert max(one.total_s for one in outcomes) < max(one.total_s for one in whole)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan"), "most"])
def test_what_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"from 1\.0 to 0"):
        RPS(repair=wrong)  # type: ignore[arg-type]


def test_peers_compare_their_shares() -> None:
    assert RPS(repair=1.0) is RPS(repair=True)
    assert RPS(repair=0.0) is RPS(repair=False)
    assert repr(RPS(repair=0.999, quorum=3)) == "RPS(repair=0.999, quorum=3)"
    assert len({RPS(repair=share).name for share in (True, False, 0.9, 0.999)}) == 4


@pytest.mark.parametrize("method", [rps_repair, direct], ids=lambda method: method.name)
def test_on_lines_slower_than_their_round_trips_requests_are_few(method: Averager) -> None:
    """A datagram takes 10 ms, and a round trip as measured .02. Each pause of a millisecond asked again."""
    nodes = [Node(peer, 4, 1) for peer in range(4)]
    values = np.ones((64, fp32.elements), np.float32)
    done: list[Outcome] = []
    for node in nodes:
        node.configure(0, Channel(method, fp32, 64, probe_s=2.0, rtt_s=1e-4))
    slow = Faults(latency_s=1e-5, rate_bytes_per_s=1.2e5, loss=Loss(0.1))
    world = World(nodes, slow, 1, on_done=lambda peer, at_s, outcome: done.append(outcome))
    for peer in range(4):
        world.at(0.0, peer, Average(0, values, 1.0))
    world.run(30.0)
    assert len(done) == 4
    assert all(outcome.averaged.all() and outcome.total_s < 3.0 for outcome in done)
    assert sum(world.traffic(peer).datagrams_sent for peer in range(4)) < 3 * 2 * 3 * 64


@pytest.mark.parametrize("averager", [RPS(repair=True), AllReduce(), AllReduce(ring=True)], ids=repr)
def test_a_round_asks_while_messages_are_under_way(averager: Averager) -> None:
    node = Node(0, 2, 1)
    values = np.ones((2 * TOTAL, fp32.elements), np.float32)
    node.configure(0, Channel(averager, fp32, 2 * TOTAL, probe_s=9.0, rtt_s=RTT_S))
    begun = node.step(0.0, Average(0, values, 1.0))
    (copy,) = [effect.run for effect in begun if isinstance(effect, Send)]
    block = 1 - copy.key.block  # of two, the one that the other peer sends here
    from_1 = replace(copy, peer=1, key=copy.key._replace(block=block), heard=copy.heard + np.uint64(1))
    asked = []
    for at, first in enumerate(range(0, 600, 200)):
        part = slice(first, first + 200)
        rows = (
            from_1.payload[part],
            from_1.weight[part],
            from_1.heard[part],
            np.arange(first, first + 200) != 7,
        )
        run = Run(1, from_1.key, first, TOTAL, *rows, ended=False)
        effects = node.step(0.05 * at, Arrived((run,)))
        asked += [effect.run for effect in effects if isinstance(effect, Send)]
    assert [run.key.stage for run in asked] == [NACK]
    assert np.flatnonzero(requested(asked[0], TOTAL)).tolist() == [7]
