"""Roles: who computes and who averages what, against brute force, closed forms and simpler rules."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ragtag.optim import roles
from ragtag.optim.roles import (
    Capacity,
    Mix,
    Roles,
    all_reduce,
    assess,
    assign,
    best_shares,
    equal_shares,
    even_shares,
    parameter_server,
    simple_rule,
    upper_bound,
)

MBIT = 1e6 / 8
RULES = (parameter_server, all_reduce, equal_shares, simple_rule)


def drawn(seed: int, most: int = 8, pairs: float = 0.3) -> Mix:
    """Workers, auxiliaries and clients of very unlike rates; computing and averaging take about as long."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, most + 1))
    peers = []
    for _ in range(n):
        up = float(100 * MBIT * draw.lognormal(0, 1.2))
        samples = 0.0 if draw.random() < 0.2 else float(draw.lognormal(0, 1))
        peers.append(Capacity(up, up * float(draw.choice([1, 1, 5])), samples, bool(draw.random() < 0.2)))
    if all(peer.client for peer in peers):
        peers[0] = replace(peers[0], client=False)
    if not any(peer.samples_per_s for peer in peers):
        peers[-1] = replace(peers[-1], samples_per_s=1.0)
    limits = None
    if draw.random() < pairs:
        limits = [[float(50 * MBIT * draw.lognormal(0, 1)) for _ in range(n)] for _ in range(n)]
    mix = Mix(tuple(peers), 1.0, 1e6, limits)
    batch = sum(p.samples_per_s for p in peers) / all_reduce(mix).averaging_per_s * draw.lognormal(0, 0.7)
    return Mix(tuple(peers), float(batch), 1e6, limits)


def brute(mix: Mix) -> Roles:
    """The fastest of all 2^n."""
    found = [
        best_shares(mix, c)
        for c in product((False, True), repeat=mix.n)
        if any(c) and not any(computing and not able for computing, able in zip(c, mix.able, strict=True))
    ]
    return max(found, key=lambda roles: roles.steps_per_s)


def by_bisection(mix: Mix, c: tuple[bool, ...]) -> float:
    """R without pair limits: the largest for which the most that each can own adds up to it."""
    n, m = mix.n, sum(c)

    def most(rate: float) -> float:
        total = 0.0
        for peer, computing in zip(mix.peers, c, strict=True):
            room = [rate]
            for free, factor in (
                (peer.up_bytes_per_s - computing * rate, n - 1 - computing),
                (peer.down_bytes_per_s - rate, m - computing - 1),
            ):
                if factor > 0:
                    room.append(free / factor)
                elif free < 0 and (factor == 0 or peer.client or free < factor * rate):
                    return -math.inf
            if min(room) < 0:
                return -math.inf
            total += 0.0 if peer.client else min(room)
        return total

    low, high = 0.0, float(mix.up.sum())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if most(middle) >= middle else (low, middle)
    return low / mix.vector_bytes


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_exact_for_given_roles(seed: int) -> None:
    mix = drawn(seed, pairs=0.0)
    draw = np.random.default_rng(seed)
    for c in (mix.able, tuple(bool(able and draw.random() < 0.6) for able in mix.able)):
        if any(c) and mix.n > 2:
            assert best_shares(mix, c).averaging_per_s == pytest.approx(by_bisection(mix, c), rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_the_papers_program_is_never_below(seed: int) -> None:
    """It may average a part at two peers; owners of blocks cannot. Most often both come to the same."""
    mix = drawn(seed, most=6)
    plan, most = best_shares(mix, mix.able), upper_bound(mix, mix.able)
    assert plan.steps_per_s <= most * (1 + 1e-6)
    assert plan.steps_per_s >= 0.5 * most


def fastest_is_never_below(seeds: range) -> None:
    for seed in seeds:
        mix = drawn(seed, most=12)
        best = assign(mix).steps_per_s
        for rule in RULES:
            assert best >= rule(mix).steps_per_s * (1 - 1e-9), (seed, rule.__name__)


def test_it_is_never_slower_than_a_rule() -> None:
    fastest_is_never_below(range(12))


@pytest.mark.slow
def test_it_is_never_slower_than_a_rule_on_200_mixes() -> None:
    fastest_is_never_below(range(200))


def within_five_percent(seeds: range, most: int) -> None:
    for seed in seeds:
        mix = drawn(seed, most)
        assert assign(mix).steps_per_s >= 0.95 * brute(mix).steps_per_s, seed


def test_the_search_is_within_5_percent_of_all_roles() -> None:
    within_five_percent(range(10), most=5)


@pytest.mark.slow
def test_the_search_is_within_5_percent_of_all_roles_of_eight() -> None:
    within_five_percent(range(60), most=8)


def test_fewer_compute_where_that_is_faster() -> None:
    """A slow computer behind a thin line: its gradient would cost the crew more than it adds."""
    fast, thin = Capacity(1e8, 1e8, 10.0), Capacity(1e5, 1e8, 0.1)
    mix = Mix((fast, fast, fast, thin), 10.0, 1e7)
    plan = assign(mix)
    assert plan.computes == (True, True, True, False)
    assert plan.shares[3] == pytest.approx(0, abs=1e-3)
    assert plan.steps_per_s > 20 * max(rule(mix).steps_per_s for rule in RULES)


@pytest.mark.slow
def test_64_peers() -> None:
    draw = np.random.default_rng(0)
    peers = tuple(
        Capacity(float(up), float(up), float(s), bool(client))
        for up, s, client in zip(
            100 * MBIT * draw.lognormal(0, 1, 64),
            draw.lognormal(0, 1, 64),
            draw.random(64) < 0.2,
            strict=True,
        )
    )
    began_s = time.process_time()
    mix = Mix(peers, 100.0, 1e8)
    assert assign(mix).steps_per_s >= max(rule(mix).steps_per_s for rule in RULES)
    assert time.process_time() - began_s < 60


# -- Points of the program


def test_equal_peers_share_equally() -> None:
    mix = Mix((Capacity(1e7, 1e7, 1.0),) * 6, 1e-6, 1e6)
    plan = best_shares(mix, mix.able)
    assert plan.shares == pytest.approx([1 / 6] * 6, abs=1e-6)
    assert plan.averaging_per_s == pytest.approx(1e7 / 1e6 / (2 * 5 / 6))
    for rule in (all_reduce, equal_shares, simple_rule):
        assert rule(mix).averaging_per_s == pytest.approx(plan.averaging_per_s)
    assert parameter_server(mix).averaging_per_s == pytest.approx(10 / 5), "n - 1 copies leave one line"


def test_the_rule_is_hiveminds() -> None:
    """Its optimum by hand: min over w of max of [1 + (n - 2) w_i] / b_i."""
    mix = Mix(tuple(Capacity(b, b, 1.0) for b in (4e6, 2e6, 1e6)), 1e-6, 1.0)
    shares = simple_rule(mix).shares
    times = [(1 + w) / b for w, b in zip(shares, (4e6, 2e6, 1e6), strict=True)]
    draw = np.random.default_rng(1)
    for w in draw.dirichlet(np.ones(3), 2000):
        assert max((1 + w) / np.array([4e6, 2e6, 1e6])) >= max(times) * (1 - 1e-9)
    assert sum(shares) == pytest.approx(1)


def test_an_auxiliary_that_is_fast_averages_most() -> None:
    workers = (Capacity(10 * MBIT, 10 * MBIT, 1.0),) * 4
    helper = Capacity(1000 * MBIT, 1000 * MBIT)
    mix = Mix((*workers, helper), 4e-3, 1e6)
    plan = assign(mix)
    assert plan.shares[4] > 0.9
    assert plan.computes == (True,) * 4 + (False,)
    assert plan.steps_per_s > 1.5 * all_reduce(mix).steps_per_s


def test_a_client_averages_nothing_and_a_crew_of_one_is_as_fast_as_it_computes() -> None:
    client, other = Capacity(1e9, 1e9, 1.0, client=True), Capacity(1e6, 1e6, 1.0)
    assert assign(Mix((client, other), 1.0, 1e6)).shares[0] == 0
    with pytest.raises(ValueError, match="peer 0 is to average, and is a client"):
        assess(Mix((client, other), 1.0, 1e6), (True, True), (1, 0))
    alone = assign(Mix((client,), 2.0, 1e6))
    assert (alone.steps_per_s, alone.shares) == (0.5, (1.0,))


def test_what_a_pair_can_carry_counts() -> None:
    peers = (Capacity(1e8, 1e8, 1.0),) * 4
    limits = [[math.inf] * 4 for _ in range(4)]
    limits[0][1] = 1e5
    free, bound = assign(Mix(peers, 1e-3, 1e6)), assign(Mix(peers, 1e-3, 1e6, limits))
    assert bound.steps_per_s < free.steps_per_s
    held = assess(Mix(peers, 1e-3, 1e6, limits), (True,) * 4, (0.25,) * 4)
    assert held.averaging_per_s == pytest.approx(1e5 / 1e6 / 0.5), "its own share and that of peer 1"
    assert bound.steps_per_s > 2 * held.steps_per_s


# -- What makes no sense


GOOD = Capacity(1e6, 1e6, 1.0)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Mix((), 1, 1), "a crew of no peers"),
        (lambda: Mix((GOOD,), 0, 1), "batch is 0"),
        (lambda: Mix((GOOD,), 1, math.nan), "vector_bytes is nan"),
        (lambda: Mix((GOOD, replace(GOOD, up_bytes_per_s=0.0)), 1, 1), "peer 1: up_bytes_per_s is 0.0"),
        (lambda: Mix((replace(GOOD, down_bytes_per_s=math.nan),), 1, 1), "peer 0: down_bytes_per_s is nan"),
        (lambda: Mix((replace(GOOD, up_bytes_per_s=math.inf),), 1, 1), "up_bytes_per_s is inf"),
        (lambda: Mix((replace(GOOD, up_bytes_per_s=-5.0),), 1, 1), "Leave out a peer"),
        (lambda: Mix((replace(GOOD, samples_per_s=math.nan),), 1, 1), "peer 0: samples_per_s is nan"),
        (lambda: Mix((replace(GOOD, samples_per_s=0.0),) * 3, 1, 1), "nobody can compute"),
        (lambda: Mix((replace(GOOD, client=True),) * 3, 1, 1), "nobody can average: all peers are clients"),
        (lambda: Mix((GOOD,) * 2, 1, 1, [[1, 1]]), "2 rows of 2 rates"),
        (lambda: Mix((GOOD,) * 2, 1, 1, [[0, 5], [0, 0]]), "from peer 1 to peer 0 is 0"),
        (lambda: assess(Mix((GOOD,) * 2, 1, 1), (True, True), (0.5, 0.4)), "add up to 1"),
        (lambda: assess(Mix((GOOD,) * 2, 1, 1), (True,), (1.0,)), "roles of 1 and shares of 1 peers, of 2"),
        (lambda: best_shares(Mix((GOOD,) * 2, 1, 1), (False, False)), "nobody is to compute"),
        (
            lambda: assess(Mix((GOOD, Capacity(1e6, 1e6)), 1, 1), (True, True), (0.5, 0.5)),
            "peer 1 is to compute, and has 0",
        ),
    ],
)
def test_what_makes_no_sense_is_said(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_lines_a_billion_times_as_fast_as_others_are_no_trouble() -> None:
    mix = Mix((Capacity(1e14, 1e14, 1.0), Capacity(1e14, 1e14, 1.0), Capacity(10.0, 10.0, 1.0)), 1e-3, 1e6)
    assert assign(mix).steps_per_s >= max(rule(mix).steps_per_s for rule in RULES) > 0


def test_without_scipy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any) -> Any:
        if name.startswith("scipy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name, *args)

    monkeypatch.setattr(roles.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'ragtag\[roles\]'"):
        assign(Mix((GOOD,) * 3, 1, 1e9))
    assert simple_rule(Mix((GOOD,) * 3, 1, 1)).shares == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("seed", range(12))
def test_even_shares_are_as_fast_as_the_best_and_their_longest_block_is_the_shortest(seed: int) -> None:
    mix = drawn(seed)
    if mix.n < 2:
        return
    best, even = best_shares(mix, mix.able), even_shares(mix, mix.able)
    assert even.averaging_per_s >= 0.998 * best.averaging_per_s

    def longest(found: Roles) -> float:
        room = np.minimum(mix.up, mix.down)
        return float((np.array(found.shares) * (sum(mix.able) - np.array(mix.able)) / room).max())

    assert longest(even) <= longest(best) * (1 + 1e-6)


def test_even_shares_spread_what_one_fast_peer_could_own_alone() -> None:
    """The slowest bounds the crew however the others share: each of four alike owns a quarter."""
    mix = Mix((Capacity(10 * MBIT, 10 * MBIT, 1.0),) + (Capacity(1000 * MBIT, 1000 * MBIT, 1.0),) * 4, 1, 1e6)
    assert even_shares(mix, mix.able).shares == pytest.approx((0, 0.25, 0.25, 0.25, 0.25), abs=1e-3)
