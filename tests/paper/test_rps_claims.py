"""What the RPS paper says, held against the machine.

"Distributed Learning over Unreliable Networks", Yu, Tang, Renggli, Kassing, Singla, Alistarh, Zhang, Liu,
ICML 2019 (arXiv 1810.07766): algorithm 1, and the matrix W of its analysis (in round t, peer k ends up with
the sum over i of W[i, k] v_i). A chunk here is a block there: the datagram is the unit of loss. W is not
modelled but read off outcomes: whoever is heard in a chunk has one over their number in it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ragtag.core.types import Send
from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.channel.averager import Averager, Setting
from ragtag.protocols.rounds.base import GATHER, SCATTER, Round, Spec
from ragtag.protocols.rounds.layout import fixed_owners, layout_of, rotating_owners
from ragtag.protocols.rounds.reduce import scatter_gather
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import World, members, vectors


def _fixed(setting: Setting) -> Round:
    return scatter_gather(
        Spec(
            me=setting.me,
            channel=setting.channel,
            round=setting.round,
            layout=layout_of(setting.n_chunks, setting.n),
            owners=fixed_owners(setting.n, setting.live),
            members=frozenset(range(setting.n)),
            codec=setting.codec,
        )
    )


fixed = at_once("RPS with owners that never change", _fixed)


@cache
def mixing(method: Averager, n: int, p: float, per_block: int, n_rounds: int) -> NDArray[np.float64]:
    """W of every chunk of some rounds at loss ``p``, float64 ``[rounds * chunks, n, n]``: W[:, i, k]."""
    n_chunks = n * per_block
    world = World(n, method, n_chunks, loss=p, seed=1)
    zeros = np.zeros((n_chunks, 4), np.float32)
    world.rounds(n_rounds, lambda peer, round_: zeros)
    peers = np.uint64(1) << np.arange(n, dtype=np.uint64)
    w = np.zeros((n_rounds, n_chunks, n, n))
    for k, outcomes in enumerate(world.outcomes):
        for r, outcome in enumerate(outcomes):
            heard = (outcome.heard[:, None] & peers) > 0
            w[r, :, :, k] = heard / heard.sum(axis=1, keepdims=True)
    return w.reshape(-1, n, n)


def expected(n: int, p: float) -> dict[str, float]:
    """The analysis for independent loss, from the binomial law of R = 1 + Bin(n - 1, 1 - p)."""
    from math import comb

    q = 1 - p
    law = [comb(n - 1, r - 1) * q ** (r - 1) * p ** (n - r) for r in range(1, n + 1)]
    r = np.arange(1, n + 1)
    mean_r, mean_r2, mean_rest = law @ r, law @ r**2, law @ (r * (n - r))
    e = law @ (1 / r)
    alpha1 = (mean_r * e + n - mean_r - 1) / (n - 1)
    alpha2 = ((mean_r2 * e + 2 * mean_rest * (1 - e) / (n - 1) + n - mean_r) / n - 1) / (n - 1)
    return {"e": e, "alpha1": alpha1, "alpha2": alpha2, "bias": e * (1 + (n - 1) * q)}


def alphas(w: NDArray[np.float64]) -> tuple[float, float]:
    """alpha1 of E[W W'] = alpha1 I + (1 - alpha1) A, and alpha2 of E[W A W'] likewise; A averages."""
    n = w.shape[1]
    alpha1 = ((w**2).sum(axis=(1, 2)).mean() - 1) / (n - 1)
    alpha2 = ((w.sum(axis=2) ** 2).sum(axis=1).mean() / n - 1) / (n - 1)
    return float(alpha1), float(alpha2)


# -- Algorithm 1


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_divide_by_arrivals_never_by_n(p: float) -> None:
    """Algorithm 1, reduce: the owner averages over what arrived. Equal inputs stay as they are, exactly."""
    n, n_chunks = 6, 24
    ones = np.full((n_chunks, 4), 3.0, np.float32)
    for outcome in World(n, rps, n_chunks, loss=p).once([ones] * n):
        assert (outcome.mean == 3.0).all()
        assert outcome.weight.min() < n


def test_the_owners_copy_is_always_there() -> None:
    """Algorithm 1, reduce: an owner has its own copy of its block, whatever the line loses."""
    n, n_chunks = 6, 24
    layout, owners = layout_of(n_chunks, n), rotating_owners(1, 0, n, frozenset(range(n)))
    outcomes = World(n, rps, n_chunks, loss=0.9).once(vectors(n, n_chunks))
    for outcome in outcomes:
        for block, owner in enumerate(owners):
            for chunk in range(layout.starts[block], layout.starts[block] + layout.sizes[block]):
                if outcome.averaged[chunk]:
                    assert owner in members(outcome.heard[chunk])


def test_who_gets_no_average_keeps_its_own() -> None:
    """Algorithm 1, all-gather: v_i stays where no message came. With everything lost all stay as they are."""
    inputs = vectors(5, 10)
    layout, owners = layout_of(10, 5), rotating_owners(1, 0, 5, frozenset(range(5)))
    for me, outcome in enumerate(World(5, rps, 10, loss=1.0).once(inputs)):
        assert np.array_equal(outcome.mean, inputs[me])
        mine = layout.spans[owners.index(me)]
        assert outcome.averaged[mine].all()
        assert outcome.averaged.sum() == layout.sizes[owners.index(me)]


def test_nothing_is_retransmitted() -> None:
    """Algorithm 1: each message goes once, however much of it is lost."""
    world = World(6, rps, 24, loss=0.4)
    world.rounds(3, lambda peer, round_: vectors(6, 24, "v", round_)[peer])
    sent = Counter(
        (peer, e.run.peer, e.run.key)
        for _, peer, _, effects in world.log
        for e in effects
        if isinstance(e, Send)
    )
    assert set(sent.values()) == {1}
    assert {key.stage for _, _, key in sent} == {SCATTER, GATHER}
    assert len(sent) == 3 * 2 * 6 * 5


def test_owners_are_drawn_afresh_every_round() -> None:
    """Algorithm 1: a random peer averages each block in each round."""
    everyone = frozenset(range(16))
    drawn = [rotating_owners(1, r, 16, everyone) for r in range(50)]
    assert len(set(drawn)) == 50
    assert all(sorted(owners) == list(range(16)) for owners in drawn)


# -- What must come out


def test_without_loss_w_averages() -> None:
    w = mixing(rps, 8, 0.0, 2, 3)
    assert (w == 1 / 8).all()
    assert alphas(w) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    ("p", "alpha1", "alpha2"), [(0.01, 0.0100, 0.00124), (0.1, 0.1005, 0.01136), (0.4, 0.4028, 0.03137)]
)
def test_the_formulas_give_the_table(p: float, alpha1: float, alpha2: float) -> None:
    want = expected(16, p)
    assert want["alpha1"] == pytest.approx(alpha1, abs=6e-5)
    assert want["alpha2"] == pytest.approx(alpha2, abs=6e-6)
    assert want["e"] == pytest.approx((1 - p**16) / (16 * (1 - p)), rel=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_alphas_of_the_machine(p: float) -> None:
    """n = 16: the measured W has the alphas of the analysis, within 4 deviations of the samples' mean."""
    w = mixing(rps, 16, p, 20, 10)
    want = expected(16, p)
    n, count = 16, len(w)
    each1 = ((w**2).sum(axis=(1, 2)) - 1) / (n - 1)
    each2 = ((w.sum(axis=2) ** 2).sum(axis=1) / n - 1) / (n - 1)
    assert alphas(w)[0] == pytest.approx(want["alpha1"], abs=4 * each1.std() / np.sqrt(count))
    assert alphas(w)[1] == pytest.approx(want["alpha2"], abs=4 * each2.std() / np.sqrt(count))


def test_disagreement_shrinks_by_beta() -> None:
    """Noise of unit variance, one round: what is left of the disagreement is alpha1 - alpha2 of it."""
    n, p, per_block = 16, 0.4, 60
    inputs = vectors(n, n * per_block)
    outcomes = World(n, rps, n * per_block, loss=p).once(inputs)

    def disagreement(models: list[NDArray[np.float32]]) -> float:
        stacked = np.asarray(models, np.float64)
        return float(((stacked - stacked.mean(0)) ** 2).mean())

    beta = disagreement([outcome.mean for outcome in outcomes]) / disagreement(inputs)
    want = expected(n, p)
    assert beta == pytest.approx(want["alpha1"] - want["alpha2"], rel=0.04)


def test_a_fixed_owner_is_over_weighted() -> None:
    """Its copy is never lost: by (1+(n-1)q)(1-p^n)/(nq), +4 % at n = 16, p = .4. Rotation takes it away."""
    n, p = 16, 0.4
    q = 1 - p
    formula = (1 + (n - 1) * q) * (1 - p**n) / (n * q)
    assert formula == pytest.approx(1.0417, abs=1e-4)
    assert expected(n, p)["bias"] == pytest.approx(formula, rel=1e-9)
    per_block = 20
    w = mixing(fixed, n, p, per_block, 10).reshape(-1, n, per_block, n, n)  # [round, block, chunk, i, k]
    owner = w.sum(axis=4)[:, np.arange(n), :, np.arange(n)]  # the owner's weight in all results, times n
    assert owner.mean() == pytest.approx(formula, abs=4 * owner.std() / np.sqrt(owner.size))
    assert owner.mean() > 1.02
    rotating = mixing(rps, n, p, per_block, 10).sum(axis=2)  # [chunk, i]
    shares = rotating.mean(axis=0)
    deviation = rotating.std() / np.sqrt(len(rotating))
    assert np.abs(shares - 1).max() < 4.5 * deviation
