"""Blocks as large as their owners' shares: averages stay right whatever the shares, and whoever disagrees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.types import RATE_MAX, RATE_MIN, Floats, Left, Outcome, Post
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.shares import (
    PLANS_MAX,
    SHARE_MAX,
    Line,
    Plan,
    Plans,
    read_line,
    read_plans,
    whole_shares,
    write_line,
    write_plans,
)
from ragtag.protocols.crew.board import RATES, SHARES
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.layout import UNITS_MAX, Layout, order_of, shared_owners
from ragtag.protocols.rounds.rps import RPS
from tests.protocols.harness import World

ALL, LOSSY = AllReduce(shares="measured"), RPS(shares="measured")
SHARE = st.one_of(st.just(0), st.integers(1, SHARE_MAX))


def some(shares: list[int]) -> tuple[int, ...]:
    return tuple(shares) if any(shares) else (*shares[:-1], 1)


# -- The cut


@settings(max_examples=30)
@given(st.integers(1, 200_000), st.lists(SHARE, min_size=1, max_size=64).map(some))
def test_blocks_follow_shares_and_cover_the_vector(n_chunks: int, shares: tuple[int, ...]) -> None:
    layout, coarse = Layout(n_chunks, len(shares), shares), math.ceil(n_chunks / min(n_chunks, UNITS_MAX))
    assert sum(layout.sizes) == n_chunks and layout.starts[0] == 0
    for j, share in enumerate(shares):
        assert abs(layout.sizes[j] - share / sum(shares) * n_chunks) <= 2 * coarse
        assert share or not layout.sizes[j]
        assert not layout.sizes[j] or layout.number(layout.names[j]) == j
        assert 0 <= layout.names[j] < 2**16 - 4096 or not layout.sizes[j]


@settings(max_examples=30)
@given(
    st.integers(1, 200_000),
    st.lists(SHARE, min_size=1, max_size=8).map(some),
    st.lists(SHARE, min_size=1, max_size=8).map(some),
)
def test_a_name_and_a_size_mean_the_same_values_by_any_shares(
    n_chunks: int, one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    here, there = Layout(n_chunks, len(one), one), Layout(n_chunks, len(other), other)
    for j, name in enumerate(here.names):
        k = there.number(name)
        if here.sizes[j] and k >= 0 and there.sizes[k] == here.sizes[j]:
            assert there.spans[k] == here.spans[j]


@settings(max_examples=30)
@given(st.lists(SHARE, min_size=2, max_size=16).map(some), st.data())
def test_a_dead_peers_block_goes_to_one_that_has_a_share(
    shares: tuple[int, ...], data: st.DataObject
) -> None:
    everyone = frozenset(range(len(shares)))
    live = data.draw(st.sets(st.sampled_from(sorted(everyone)), min_size=1).map(frozenset))
    order = order_of(1, 7, len(shares))
    owners = shared_owners(order, shares, live, everyone)
    able = {peer for peer in live if shares[peer]} or live
    for place, owner in zip(order, owners, strict=True):
        if shares[place]:
            assert owner in able and (owner == place or place not in live)


def test_newcomers_take_over_where_all_that_were_planned_for_are_gone() -> None:
    assert shared_owners((1, 0), (5, 5), frozenset({2, 3}), frozenset({2, 3})) == (2, 2)


# -- What a round comes to


def plan(world: World, shares: tuple[int, ...], peers: list[int] | None = None, first: int = 0) -> None:
    for peer in range(world.n) if peers is None else peers:
        for teller in (0, 1):
            world.nodes[peer].crew.plans.take(teller, write_plans([Plan(0, first, shares)]))


def value(peer: int) -> float:
    return float(2**peer)


def inputs(world: World) -> list[Floats]:
    return [np.full((world.n_chunks, 4), value(peer), np.float32) for peer in range(world.n)]


def require_right(world: World, outcome: Outcome) -> None:
    """Each chunk is the mean of exactly those whose values are in it."""
    for chunk in range(world.n_chunks):
        heard = [peer for peer in range(world.n) if int(outcome.heard[chunk]) >> peer & 1]
        assert heard and outcome.weight[chunk] == len(heard)
        mean = np.float32(sum(map(value, heard)) / len(heard))
        assert np.allclose(outcome.mean[chunk], mean, rtol=1e-6), (chunk, heard)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([ALL, LOSSY, RPS(repair=True, shares="measured")]),
    st.lists(SHARE, min_size=2, max_size=6).map(some),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.2]),
    st.one_of(st.none(), st.integers(0, 5)),
    st.integers(0, 3),
)
def test_averages_are_right_whatever_the_shares_and_whoever_is_lost(
    averager: Averager, shares: tuple[int, ...], n_chunks: int, loss: float, dies: int | None, seed: int
) -> None:
    world = World(len(shares), averager, n_chunks, seed=seed, loss=loss)
    plan(world, shares)
    if dies is not None and dies < world.n:
        world.dead[dies] = 0.06
    values = inputs(world)
    world.rounds(5, lambda peer, at: values[peer])
    for peer, outcomes in enumerate(world.outcomes):
        for outcome in outcomes:
            require_right(world, outcome)
        if dies is None and not loss:
            assert len(outcomes) == 5 and all(o.averaged.all() and not o.missed for o in outcomes), peer
            assert all((o.heard == 2**world.n - 1).all() for o in outcomes)


def test_owners_average_as_much_as_their_shares_say() -> None:
    world = World(4, ALL, 100)
    plan(world, (50, 30, 20, 0))
    world.rounds(1, lambda peer, at: inputs(world)[peer])
    sent = dict.fromkeys(range(4), 0)
    for _, peer, _, effects in world.log:
        for effect in effects:
            run = getattr(effect, "run", None)
            if run is not None and run.key.channel == 0 and run.key.stage == 1 and run.key.round == 0:
                sent[peer] += len(run.payload)
    assert sent == {0: 150, 1: 90, 2: 60, 3: 0}


@pytest.mark.parametrize("averager", [ALL, LOSSY])
@pytest.mark.parametrize("other", [(), (7, 5, 3, 1), (70, 20, 10, 0)])
def test_a_peer_with_other_shares_is_noticed_and_nothing_of_it_is_mixed(
    averager: Averager, other: tuple[int, ...]
) -> None:
    world = World(4, averager, 60)
    plan(world, (50, 30, 20, 0), peers=[0, 1, 2])
    if other:
        plan(world, other, peers=[3])
    values = inputs(world)
    world.rounds(1, lambda peer, at: values[peer])
    for outcomes in world.outcomes:
        require_right(world, outcomes[0])
    for peer in (0, 1, 2):  # all three own something, and go on without waiting for a deadline
        outcome = world.outcomes[peer][0]
        assert 3 in outcome.missed and outcome.total_s < 0.05
        assert outcome.averaged.all() and (outcome.heard == 0b111).all()
        assert ("apart", 3) in {(note.what, note.peer) for at, note in world.notes if at == peer}
    # by the next round it knows: all are in the average again
    plan(world, (50, 30, 20, 0), peers=[3], first=1)
    plan(world, (50, 30, 20, 0), peers=[0, 1, 2], first=1)
    world.rounds(2, lambda peer, at: values[peer])
    assert all((outcomes[-1].heard == 0b1111).all() for outcomes in world.outcomes)


def test_shares_hold_from_the_round_that_was_named() -> None:
    world = World(3, ALL, 30)
    plan(world, (1, 0, 0), first=2)
    owners: dict[int, set[int]] = {}
    world.rounds(4, lambda peer, at: inputs(world)[peer])
    for _, peer, _, effects in world.log:
        for effect in effects:
            run = getattr(effect, "run", None)
            if run is not None and run.key.channel == 0 and run.key.stage == 1:
                owners.setdefault(run.key.round, set()).add(peer)
    assert owners == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0}, 3: {0}}
    assert all(o.averaged.all() and not o.missed for outcomes in world.outcomes for o in outcomes)


def test_auxiliaries_own_their_shares_and_a_chunk_that_nobody_gave_is_no_average() -> None:
    """An auxiliary has no values to put in the place of an average that it cannot make."""
    world = World(3, ALL, 20, auxiliary=(2,))
    plan(world, (0, 1, 9))
    values = inputs(world)
    world.rounds(1, lambda peer, at: values[peer])
    assert all((o[0].heard == 0b11).all() and o[0].averaged.all() for o in world.outcomes[:2])
    world = World(3, ALL, 20, auxiliary=(2,))
    for peer in (0, 1):
        world.average(peer, values[peer], weight=0.0)
    world.run()
    assert all(not o[0].averaged.any() for o in world.outcomes[:2])


# -- Plans and lines as they are posted


@settings(max_examples=30)
@given(st.permutations(range(5)), st.integers(0, 12))
def test_peers_that_have_the_same_posts_agree(order: list[int], round_: int) -> None:
    first, wide, other = Plan(7, 2, (1, 1)), Plan(7, 5, (1, 3)), Plan(8, 0, (9,))
    posts = [
        (0, [first, other]),
        (1, [first, Plan(7, 5, (1, 2))]),
        (2, [Plan(7, 5, (1, 2)), wide, other]),
        (3, [wide, Plan(7, 9, ())]),
        (4, [Plan(7, 9, ()), Plan(7, 11, (1, 4))]),
    ]
    plans = Plans()
    for i in order:
        peer, told = posts[i]
        plans.take(peer, write_plans(told))
    expected = () if round_ < 2 or round_ >= 9 else (1, 1) if round_ < 5 else (1, 3)
    assert plans.shares(7, round_) == expected
    assert plans.shares(8, round_) == (9,) and plans.shares(6, round_) == ()
    assert plans.shares(7, round_, 1) == ((1, 4) if round_ >= 11 else expected)


def test_one_that_tells_many_plans_keeps_out_nobody_elses_and_none_of_its_own_counts() -> None:
    plans = Plans()
    for number in range(1, 9):
        plans.take(2, write_plans([Plan(100 * number + i, 0, (1,)) for i in range(PLANS_MAX)]))
        plans.take(3, write_plans([Plan(7, number, (number,))]))
    for teller in (0, 1):
        plans.take(teller, write_plans([Plan(7, 2, (1, 2)), Plan(8, 0, (3,))]))
    assert (plans.shares(7, 5), plans.shares(8, 5), plans.shares(100, 5)) == ((1, 2), (3,), ())
    assert sum(plans.told(2, channel) is not None for channel in range(1000)) == PLANS_MAX


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xff" * 9, write_line(Line({})), b"\x91\x93\x01\x02\x92\x00\x00", b"\x91\x93\x01\x02\x91\xff"],
)
def test_posts_that_are_no_plans_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="no plans of shares"):
        read_plans(blob)
    world = World(2, ALL, 4)
    effects = world.nodes[0].step(0.0, Post(SHARES, blob))
    assert any(getattr(effect, "what", "") == "refused" for effect in effects)
    assert world.nodes[0].crew.plans.told(0, 0) is None


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e16, math.inf, math.nan])
def test_an_absurd_rate_is_refused(rate: float) -> None:
    good = write_line(Line({1: 1e6}))
    assert read_line(good).rates == {1: 1e6}
    with pytest.raises(ValueError, match="rate"):
        Line({1: rate})
    bad = good.replace(np.array(1e6, ">f8").tobytes(), np.array(rate, ">f8").tobytes())
    assert bad != good
    with pytest.raises(ValueError, match="rate"):
        read_line(bad)


@pytest.mark.parametrize("rate", [RATE_MIN, RATE_MAX])
def test_any_rate_that_there_can_be_is_told(rate: float) -> None:
    assert read_line(write_line(Line({1: rate}))).rates == {1: rate}


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        (Line({1: 100.0, 2: 1e6}), False),
        (Line({1: 120.0, 2: 0.85e6}), False),
        (Line({1: 130.0, 2: 1e6}), True),
        (Line({1: 100.0, 2: 0.75e6}), True),
        (Line({1: 100.0}), True),
        (Line({1: 100.0, 3: 1e6}), True),
        (Line({1: 100.0, 2: 1e6}, solves=True), True),
    ],
)
def test_a_line_is_told_anew_once_it_is_another_by_more_than_a_quarter(now: Line, differs: bool) -> None:
    assert now.differs(Line({1: 100.0, 2: 1e6})) is differs
    assert now.differs(None) and not now.differs(now)


def test_whole_shares_keep_their_proportions() -> None:
    assert whole_shares([0.5, 0.25, 0.0, 1e-9]) == (SHARE_MAX, 32768, 0, 1)
    for wrong in ([], [0.0], [1.0, -1.0], [math.inf], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="shares are"):
            whole_shares(wrong)


def test_auxiliaries_are_told_shares_and_tell_rates_and_post_nothing_else() -> None:
    world = World(3, ALL, 4, auxiliary=(2,))
    told = write_plans([Plan(0, 3, (1, 2, 3))])
    for topic, peer, blob in (
        (SHARES, 0, told),
        (SHARES, 1, told),
        (RATES, 2, write_line(Line({0: 5.0}))),
        (77, 2, b"x"),
    ):
        world.push(0.0, peer, Post(topic, blob))
    world.push(5.0, 2, Left(0))
    world.push(5.0, 2, Left(1))
    world.run()
    assert all(node.crew.plans.shares(0, 3) == (1, 2, 3) for node in world.nodes)
    assert read_line(world.nodes[1].board.notices(RATES).posts[2].blob).rates == {0: 5.0}
    assert 2 not in world.nodes[1].board.notices(77).posts


def test_averagers_say_what_they_go_by() -> None:
    assert repr(RPS(repair=True, shares="measured")) == 'RPS(repair=True, shares="measured")'
    assert repr(ALL) == 'AllReduce(shares="measured")' and ALL.name != AllReduce().name
    assert RPS(shares="measured").name == f"{RPS().name}, measured shares"
    with pytest.raises(ValueError, match="no owners"):
        AllReduce(ring=True, shares="measured")
    with pytest.raises(ValueError, match='"equal", or "measured"'):
        RPS(shares="much")  # type: ignore[arg-type]
