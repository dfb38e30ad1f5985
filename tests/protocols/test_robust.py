"""Guards: what owners make of shares of which some are lies; their rules, and rounds with them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragtag
from ragtag.core.types import Audited, Floats, Run
from ragtag.protocols.channel.averager import guarded
from ragtag.protocols.rounds.robust import (
    FAR_MAX,
    CentredClipping,
    RobustMean,
    Shares,
    TrimmedMean,
    _sorted,
    believed,
    liars_among,
    require_enough,
)
from tests.protocols.harness import TINY, World

RULES: list[RobustMean] = [TrimmedMean(0.2), CentredClipping(0.2)]
E = 5


def shares_of(seed: int, m: int, k: int = 3, lost: float = 0.0) -> tuple[Floats, Floats]:
    draw = np.random.default_rng(seed)
    shares = draw.standard_normal((m, k, E)).astype(np.float32)
    weight = draw.uniform(0.5, 2.0, (m, k)).astype(np.float32)
    weight[draw.random((m, k)) < lost] = 0.0
    return shares, weight


def mean_of(shares: Floats, weight: Floats) -> Floats:
    return np.einsum("mk,mke->ke", weight, shares) / weight.sum(axis=0)[:, None]


drawn = {"seed": st.integers(0, 10**6), "m": st.integers(5, 14)}


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(**drawn)
@settings(max_examples=30, deadline=None)
def test_the_order_of_peers_does_not_matter(rule: RobustMean, seed: int, m: int) -> None:
    shares, weight = shares_of(seed, m, lost=0.2)
    order = np.random.default_rng(seed).permutation(m)
    mean, cut = rule.reduce(shares, weight, 1)
    turned, turned_cut = rule.reduce(shares[order], weight[order], 1)
    assert np.allclose(mean, turned, atol=1e-5)
    assert np.allclose(cut[order], turned_cut, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(**drawn, huge=st.sampled_from([1e3, -1e6, 1e15, -1e18]))
@settings(max_examples=30, deadline=None)
def test_f_liars_move_no_value_beyond_the_honest_ones(
    rule: RobustMean, seed: int, m: int, huge: float
) -> None:
    f = (m - 1) // 3
    shares, weight = shares_of(seed, m)
    shares[:f] = huge
    weight[:f] = 2.0
    mean, cut = rule.reduce(shares, weight, f)
    honest = shares[f:]
    slack = 0.0 if isinstance(rule, TrimmedMean) else 2 * np.sqrt(E) * np.abs(honest).max()
    assert (mean >= honest.min(axis=0) - slack - 1e-5).all()
    assert (mean <= honest.max(axis=0) + slack + 1e-5).all()
    assert (cut[:f] > 0.9).all(), "and it is seen which they are"
    plain = mean_of(shares, weight)
    assert np.abs(plain).max() > abs(huge) / m, "a plain mean follows them"


@given(**drawn)
@settings(max_examples=30, deadline=None)
def test_a_trimmed_mean_is_the_mean_of_the_middle_values(seed: int, m: int) -> None:
    """Definition 2 of Yin et al.: the mean of what is left without the f smallest and the f largest."""
    shares, _ = shares_of(seed, m)
    f = (m - 1) // 2
    mean, cut = TrimmedMean().reduce(shares, np.ones((m, 3), np.float32), f)
    assert np.allclose(mean, np.sort(shares, axis=0)[f : m - f].mean(axis=0), atol=1e-5)
    assert np.isclose(cut.mean(), 2 * f / m)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_without_liars_it_is_close_to_the_mean(rule: RobustMean) -> None:
    """Closer than one peer's values are, by far, and exact where all peers have the same."""
    shares, _ = shares_of(1, 10, k=200)
    weight = np.ones((10, 200), np.float32)
    mean, _ = rule.reduce(shares, weight, 2)
    plain = mean_of(shares, weight)
    assert np.square(mean - plain).mean() < 0.1 * np.square(shares - plain).mean()
    same = np.broadcast_to(shares[:1], shares.shape).copy()
    assert np.allclose(rule.reduce(same, weight, 2)[0], same[0], atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(seed=st.integers(0, 10**6), m=st.integers(5, 14), lost=st.sampled_from([0.1, 0.5]))
@settings(max_examples=30, deadline=None)
def test_a_chunk_that_some_lost_is_as_if_only_the_others_were_there(
    rule: RobustMean, seed: int, m: int, lost: float
) -> None:
    shares, weight = shares_of(seed, m, lost=lost)
    mean, cut = rule.reduce(shares, weight, 1)
    assert (cut[weight == 0] == 0).all()
    for chunk in range(3):
        here = weight[:, chunk] > 0
        if here.sum() < 3:
            continue
        alone, _ = rule.reduce(shares[here, chunk][:, None], weight[here, chunk][:, None], 1)
        assert np.allclose(mean[chunk], alone[0], atol=1e-5)


@given(m=st.integers(1, 64), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_sorting_network_sorts(m: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 9, (m, 2, 7)).astype(np.float32)
    assert np.array_equal(np.stack(_sorted(rows)), np.sort(rows, axis=0))


def test_clipping_keeps_the_direction_and_cuts_the_length() -> None:
    shares = np.zeros((5, 1, 2), np.float32)
    shares[1:3, 0], shares[4, 0] = [[1, 0], [-1, 0]], [30, 40]  # the median is 0, the fourth distance is 1
    mean, cut = CentredClipping().reduce(shares, np.ones((5, 1), np.float32), 1)
    assert np.allclose(mean, [[0.6 / 5, 0.8 / 5]])
    assert np.allclose(cut[:, 0], [0, 0, 0, 0, 0.98])


def test_a_weight_counts_up_to_so_many_times_the_middle_one() -> None:
    weight = np.array([[1], [2], [3], [1e9], [0]], np.float32)
    assert believed(weight, 4.0)[:, 0].tolist() == [1, 2, 3, 8, 0]
    assert believed(np.ones((3, 1), np.float32), 1.0).tolist() == [[1]] * 3


@given(liars=st.floats(0.01, 0.49), peers=st.integers(1, 64))
def test_the_number_of_liars_is_rounded_up(liars: float, peers: int) -> None:
    f = liars_among(TrimmedMean(liars), peers)
    assert f >= 1
    assert liars * peers - 1e-6 <= f < liars * peers + 1


def test_so_many_of_ten() -> None:
    assert [liars_among(TrimmedMean(liars), 10) for liars in (0.1, 0.2, 0.3, 0.31)] == [1, 2, 3, 4]


@pytest.mark.parametrize("liars", [0, 0.5, -1, math.nan])
@pytest.mark.parametrize("kind", [TrimmedMean, CentredClipping])
def test_shares_of_liars_that_make_no_sense(kind: type[TrimmedMean | CentredClipping], liars: float) -> None:
    with pytest.raises(ValueError, match="a share of the peers, above 0 and below a half"):
        kind(liars)
    with pytest.raises(ValueError, match="a finite number, 1 or more"):
        kind(heaviest=liars)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_of_fewer_shares_than_liars_and_as_many_more_nothing_is_made(rule: RobustMean, m: int) -> None:
    """Also where fewer came of a block than there may be liars: most of a crew is late, or is frozen."""
    shares, weight = shares_of(3, m)
    result, cut = rule.reduce(shares, weight, 2)
    assert not result.any() and result.shape == shares.shape[1:] and cut.shape == weight.shape


def test_too_few_shares_are_no_average() -> None:
    """Of two, nobody can say which one lies."""
    kept = Shares(TrimmedMean(0.2), live=4, sizes={0: 2}, elements=E)
    for peer in (1, 2, 3):
        share = kept.of(peer, 0)
        share.values[:], share.weight[: 2 if peer < 3 else 1] = peer, 1.0
    mean, weight, heard = np.ones((2, E), np.float32), np.ones(2, np.float32), np.zeros(2, np.uint64)
    kept.reduce(0, mean, weight, heard)
    assert weight.tolist() == [3, 0]
    assert heard.tolist() == [0b1110, 0b110]
    assert mean[0].tolist() == [2] * E
    judged = kept.judged()
    assert (judged.short, judged.peers, judged.values) == (1, (1, 2, 3), (E, E, E))
    assert judged.cut == (1, 0, 1)
    assert judged.far == (1, 0, 1)  # from 2, which it came to


def test_where_nothing_could_be_judged_the_audit_names_nobody() -> None:
    kept = Shares(TrimmedMean(0.2), live=4, sizes={0: 1}, elements=E)
    for peer in (1, 2):
        kept.of(peer, 0).weight[:] = 1.0
    kept.reduce(0, np.ones((1, E), np.float32), np.ones(1, np.float32), np.zeros(1, np.uint64))
    assert kept.judged() == Audited((), (), (), (), (), 1)


def test_beside_shares_that_are_the_result_another_is_as_far_as_can_be_told() -> None:
    kept = Shares(TrimmedMean(0.2), live=3, sizes={0: 1}, elements=E)
    for peer in (1, 2, 3):
        share = kept.of(peer, 0)
        share.values[:], share.weight[:] = 9.0 if peer == 3 else 1.0, 1.0
    kept.reduce(0, np.ones((1, E), np.float32), np.ones(1, np.float32), np.zeros(1, np.uint64))
    with np.errstate(divide="raise", invalid="raise"):
        assert kept.judged().far == (0, 0, FAR_MAX)


# -- Rounds


def averaged(
    rule: RobustMean | None,
    values: list[Floats],
    weights: list[float] | None = None,
    loss: float = 0.0,
    method: ragtag.Averager | None = None,
) -> World:
    method = method or ragtag.RPS()
    n = len(values)
    world = World(n, method if rule is None else guarded(method, rule), len(values[0]), loss=loss, seed=3)
    for peer, own in enumerate(values):
        world.average(peer, own, 1.0 if weights is None else weights[peer])
    return world.run()


def values_of(n: int, chunks: int = 12) -> list[Floats]:
    draw = np.random.default_rng(7)
    return [draw.standard_normal((chunks, TINY.elements)).astype(np.float32) for _ in range(n)]


@pytest.mark.parametrize("method", [ragtag.RPS(), ragtag.RPS(repair=True), ragtag.AllReduce()], ids=repr)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_round_comes_to_what_one_owner_of_all_would(rule: RobustMean, method: ragtag.Averager) -> None:
    """Both rules look at no more than a chunk, so blocks and their owners change nothing."""
    values = values_of(6)
    values[2] *= -50
    world = averaged(rule, values, method=method)
    want, _ = rule.reduce(np.stack(values), np.ones((6, 12), np.float32), 2)
    for (outcome,) in world.outcomes:
        assert outcome.averaged.all()
        assert np.allclose(outcome.mean, want, atol=1e-5)
        assert (outcome.heard == 0b111111).all()
        assert (outcome.weight == 6).all()
    (plain,) = averaged(None, values, method=method).outcomes[0]
    assert plain.judged is None
    assert np.abs(plain.mean - want).max() > 5


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_owner_tells_whose_shares_it_cut(rule: RobustMean) -> None:
    values = values_of(6)
    values[2] *= -50
    seen = [outcome.judged for (outcome,) in averaged(rule, values).outcomes]
    assert sum(judged.values[judged.peers.index(2)] for judged in seen if judged) == 12 * TINY.elements
    for judged in seen:
        assert judged is not None
        by_peer = dict(zip(judged.peers, zip(judged.cut, judged.far, strict=True), strict=True))
        assert by_peer[2][0] > 0.8
        assert by_peer[2][1] > 10
        assert all(far < 4 for peer, (_, far) in by_peer.items() if peer != 2)


@pytest.mark.parametrize("rule", [*RULES, TrimmedMean(0.2, heaviest=2), CentredClipping(0.2, heaviest=2)])
def test_a_claimed_weight_is_capped_and_told(rule: RobustMean) -> None:
    values = values_of(6)
    greedy = averaged(rule, values, [1, 1, 1, 1, 1, 1e9])
    fair = averaged(rule, values, [1, 1, 1, 1, 1, rule.heaviest])
    for (a,), (b,) in zip(greedy.outcomes, fair.outcomes, strict=True):
        assert np.allclose(a.mean, b.mean, atol=1e-5)
        assert (a.weight == 5 + rule.heaviest).all()
        assert a.judged is not None and b.judged is not None
        assert a.judged.capped[5] > 0
        assert not any(a.judged.capped[:5]) and not any(b.judged.capped)


def test_a_share_counts_for_its_sender_whatever_it_names() -> None:
    values = values_of(5)
    method = guarded(ragtag.RPS(), TrimmedMean(0.2))
    world = World(5, method, 12, seed=3)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        if source == 4 and run.key.stage == 0:
            run.heard.fill(0b11111)
        return [(0.0, run)]

    world.carry = carry
    for peer in (0, 1, 2, 4):
        world.average(peer, values[peer])
    world.run()
    (outcome,) = world.outcomes[0]
    assert not (outcome.heard[outcome.averaged] & np.uint64(1 << 3)).any(), "peer 3 was not there"


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_lost_chunks_are_judged_by_those_that_came(rule: RobustMean) -> None:
    values = values_of(8)
    values[1] *= 1e6
    world = averaged(rule, values, loss=0.2)
    for (outcome,) in world.outcomes:
        here = outcome.averaged
        assert here.any()
        assert np.abs(outcome.mean[here]).max() < 10 or outcome is world.outcomes[1][0]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_is_not_finite_counts_for_nothing(rule: RobustMean) -> None:
    values = values_of(6)
    values[3][:] = np.nan
    world = averaged(rule, values)
    for (outcome,) in world.outcomes:
        assert np.isfinite(outcome.mean).all() or outcome is world.outcomes[3][0]
        assert not (outcome.heard[outcome.averaged] & np.uint64(8)).any()


def test_a_crew_of_two_never_averages() -> None:
    world = averaged(TrimmedMean(0.2), values_of(2))
    for peer, (outcome,) in enumerate(world.outcomes):
        assert not outcome.averaged.any()
        assert np.array_equal(outcome.mean, values_of(2)[peer])
        assert outcome.judged is not None and outcome.judged.short == 6


@given(st.floats(0.001, 0.499), st.integers(2, 64))
def test_a_crew_too_small_for_its_guard_is_refused_with_what_would_do(liars: float, peers: int) -> None:
    guard = CentredClipping(liars)
    if peers >= 2 * liars_among(guard, peers) + 1:
        require_enough(guard, peers)
        return
    with pytest.raises(ValueError, match="there would be none") as refused:
        require_enough(guard, peers)
    said = re.search(r"write liars=(\S+) or less", str(refused.value))
    if said is None:
        assert peers == 2 and "begin with 3 peers" in str(refused.value)
    else:
        require_enough(CentredClipping(float(said[1])), peers)


def test_who_adds_shares_up_on_their_way_cannot_be_guarded() -> None:
    for averager in (ragtag.AllReduce(ring=True), ragtag.Moshpit(group=4)):
        with pytest.raises(ValueError, match="cannot be guarded; use RPS"):
            guarded(averager, TrimmedMean())
