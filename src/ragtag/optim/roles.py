"""Roles: who computes gradients, and who averages which share, from measured rates.

"Distributed Deep Learning in Open Collaborations", Diskin et al., NeurIPS 2021 (DeDLOC), section 3.2. A peer
computes samples, averages parts of the vector for the others, or both. While the crew computes towards its
next batch of ``B`` samples, the vector of ``P`` bytes of the last one is averaged, so steps per second are

    min( sum_i s_i c_i / B,  R / P )

where ``c_i`` says whether peer i computes, ``s_i`` how many samples a second, and ``R`` is the rate at which
averaged bytes reach the peer that gets them slowest. For fixed ``c`` the paper finds ``R`` by a linear
program over the rates at which each peer sends gradients to each other (g) and averaged parts (a), within
what each can send, receive, and send to one other.

Two things are simpler here, and lose nothing. It is of no use to send an averager gradients faster than the
slowest computing peer does, so ``g_ki`` is one rate ``y_i`` for all of them. What is a peer's own does not
travel. And one thing is stricter: the paper's program lets receivers take an averager's parts at different
rates, so that two averagers may average the same part and each serve some of the receivers. Blocks with
owners (``protocols.rounds``) cannot do that: an owner sends its average to all, so ``a_ij = y_i``, and
``y_i / R`` is the share of the vector that peer i owns. ``best_shares`` solves that program, in n + 1
unknowns; ``upper_bound`` solves the paper's, which is never below. With ``m`` computing peers of ``n`` the
constraints are

    sum_i y_i = R                                    every part has an owner
    (n - 1 - c_i) y_i + c_i R        <= up_i         averages to all, gradients to the other owners
    R + (m - c_i - 1) y_i            <= down_i       averages of the others, gradients of what is its own
    y_i + c_i y_j                    <= t_ij         from i to j
    y_i = 0                                          of a client, to which nobody can connect

Peers that average over all in equal blocks (all-reduce), over one peer (a parameter server), and by the rule
of hivemind, ``min_w max_i [1 + (n - 2) w_i] / b_i``, are points of this program. ``assess`` says how fast any
of them is. ``assign`` also searches for ``c``, of which there are 2^n: fewer computing peers leave more of
the lines to averages. It tries the first k peers by several orders, for each k, and passes over those that
compute too slowly to be better. For crews of up to eight tests hold it against all 2^n.

Rates are those of steady streams that share nothing but the ends of their lines. A round is no such stream:
an owner sends its average when its block is whole, so what is predicted is a bound, and the longest block
comes on top of it. ``even_shares`` are those by which that is short. Crews go by them with
``RPS(shares="measured")`` or ``AllReduce(shares="measured")`` (``training.planning``), where all that can
compute do: ``assign`` is computed only, and nobody is asked to stop computing.

scipy is needed (``pip install 'ragtag[roles]'``), and imported when something is solved.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import RATE_MAX, RATE_MIN, Bools

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was measured of one peer.

    up_bytes_per_s, down_bytes_per_s: what it can send and receive in all.
    samples_per_s: what it computes; 0: it has nothing to compute with (an auxiliary).
    client: nobody can connect to it, so it averages nothing for others.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    samples_per_s: float = 0.0
    client: bool = False


@dataclass(frozen=True)
class Mix:
    """A crew, and what it has to do in each step.

    batch: samples in all.
    vector_bytes: that are averaged.
    pairs_bytes_per_s: ``[n][n]``, what peer i can send to peer j (``None``: no such limit; ``inf``: none for
        that pair; the diagonal is not looked at).

    Raises ValueError, naming the peer, for rates that are not finite, below 0 or absurd; where nobody
    computes; and where nobody can average, all being clients.
    """

    peers: tuple[Capacity, ...]
    batch: float
    vector_bytes: float
    pairs_bytes_per_s: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        if not self.peers:
            raise ValueError("a crew of no peers has no roles")
        for name, value in (("batch", self.batch), ("vector_bytes", self.vector_bytes)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be finite and above 0")
        for at, peer in enumerate(self.peers):
            for name, rate in (("up", peer.up_bytes_per_s), ("down", peer.down_bytes_per_s)):
                _require_rate(f"peer {at}: {name}_bytes_per_s", rate)
            if not (math.isfinite(peer.samples_per_s) and peer.samples_per_s >= 0):
                raise ValueError(
                    f"peer {at}: samples_per_s is {peer.samples_per_s}; it must be finite, 0 or more"
                )
        if not any(peer.samples_per_s > 0 for peer in self.peers):
            raise ValueError("nobody can compute: all peers have 0 samples_per_s")
        if all(peer.client for peer in self.peers) and self.n > 1:
            raise ValueError("nobody can average: all peers are clients, to which nobody can connect")
        if self.pairs_bytes_per_s is not None:
            if len(self.pairs_bytes_per_s) != self.n or any(len(r) != self.n for r in self.pairs_bytes_per_s):
                raise ValueError(f"pairs_bytes_per_s must have {self.n} rows of {self.n} rates")
            for i, row in enumerate(self.pairs_bytes_per_s):
                for j, rate in enumerate(row):
                    if i != j and rate != math.inf:
                        _require_rate(f"pairs_bytes_per_s from peer {i} to peer {j}", rate)

    @property
    def n(self) -> int:
        """How many peers."""
        return len(self.peers)

    @cached_property
    def up(self) -> Vector:
        """Bytes a second that each can send."""
        return np.array([peer.up_bytes_per_s for peer in self.peers], np.float64)

    @cached_property
    def down(self) -> Vector:
        """Bytes a second that each can receive."""
        return np.array([peer.down_bytes_per_s for peer in self.peers], np.float64)

    @cached_property
    def samples(self) -> Vector:
        """Samples a second that each can compute."""
        return np.array([peer.samples_per_s for peer in self.peers], np.float64)

    @cached_property
    def pairs(self) -> Vector:
        """``[n, n]``: bytes a second from each to each; ``inf`` where nothing limits them."""
        if self.pairs_bytes_per_s is None:
            return np.full((self.n, self.n), np.inf)
        pairs = np.array(self.pairs_bytes_per_s, np.float64)
        np.fill_diagonal(pairs, np.inf)
        return pairs

    @cached_property
    def able(self) -> tuple[bool, ...]:
        """Which peers can compute."""
        return tuple(bool(rate > 0) for rate in self.samples)


def _require_rate(what: str, rate: float) -> None:
    if not RATE_MIN <= rate <= RATE_MAX:  # so is NaN
        raise ValueError(
            f"{what} is {rate}; it must be {RATE_MIN:g} to {RATE_MAX:g} bytes a second. Leave out a peer "
            "that cannot send or receive"
        )


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what, and how fast the crew is then.

    computes: which peers compute gradients.
    shares: which part of the vector each averages; they add up to 1.
    computing_per_s, averaging_per_s: how many steps a second each would allow (``inf``: a crew of one does
        not average).
    """

    computes: tuple[bool, ...]
    shares: tuple[float, ...]
    computing_per_s: float
    averaging_per_s: float

    @property
    def steps_per_s(self) -> float:
        """How fast the crew is."""
        return min(self.computing_per_s, self.averaging_per_s)


def assess(mix: Mix, computes: Sequence[bool], shares: Sequence[float]) -> Roles:
    """How fast a crew is in given roles. Raises ValueError: they cannot be."""
    if len(computes) != mix.n or len(shares) != mix.n:
        raise ValueError(f"roles of {len(computes)} and shares of {len(shares)} peers, of {mix.n}")
    w = np.asarray(shares, np.float64)
    if not (np.isfinite(w).all() and (w >= 0).all() and abs(w.sum() - 1) < 1e-6):
        raise ValueError(f"shares are 0 or more and add up to 1; these are {tuple(shares)}")
    for at, (computes_too, peer, share) in enumerate(zip(computes, mix.peers, w, strict=True)):
        if computes_too and peer.samples_per_s <= 0:
            raise ValueError(f"peer {at} is to compute, and has 0 samples_per_s")
        if share > 0 and peer.client and mix.n > 1:
            raise ValueError(f"peer {at} is to average, and is a client, to which nobody can connect")
    c = np.asarray(computes, np.float64)
    if not c.any():
        raise ValueError("nobody is to compute")
    computing = float(c @ mix.samples) / mix.batch
    if mix.n == 1:
        return Roles((True,), (1.0,), computing, math.inf)
    with np.errstate(divide="ignore"):
        limits = [
            mix.up / ((mix.n - 1 - c) * w + c),
            mix.down / np.maximum(0.0, 1 + (c.sum() - c - 1) * w),
            (mix.pairs / (w[:, None] + c[:, None] * w[None, :]))[~np.eye(mix.n, dtype=np.bool_)],
        ]
    rate = min(float(limit.min()) for limit in limits)
    return Roles(tuple(map(bool, computes)), tuple(w.tolist()), computing, rate / mix.vector_bytes)


# -- What peers do without a plan


def _owners(mix: Mix) -> Bools:
    return np.array([mix.n == 1 or not peer.client for peer in mix.peers])


def equal_shares(mix: Mix) -> Roles:
    """All that can compute do, and all to which others can connect average as much."""
    owners = _owners(mix)
    return assess(mix, mix.able, owners / owners.sum())


def all_reduce(mix: Mix) -> Roles:
    """All that can compute do, and average as much each; others do nothing.

    Where all of them are clients, the others average.
    """
    owners = _owners(mix) & np.array(mix.able)
    return equal_shares(mix) if not owners.any() else assess(mix, mix.able, owners / owners.sum())


def parameter_server(mix: Mix) -> Roles:
    """All that can compute do, and the peer averages all that makes the crew fastest."""
    servers = np.flatnonzero(_owners(mix))
    return max((assess(mix, mix.able, np.eye(mix.n)[at]) for at in servers), key=lambda r: r.steps_per_s)


def simple_rule(mix: Mix) -> Roles:
    """All that can compute do, with shares by hivemind's rule: ``min_w max_i [1 + (n - 2) w_i] / b_i``.

    ``b_i`` is the slower of what peer i can send and receive. The rule takes each peer for one that computes.
    It is solved exactly: at its optimum peers with a share take equally long, and the slower ones have none.
    """
    owners, n = _owners(mix), mix.n
    if n <= 2:
        return equal_shares(mix)
    b = np.minimum(mix.up, mix.down)
    fastest = np.sort(b[owners])[::-1]
    for k in range(len(fastest), 0, -1):  # with the k fastest averaging, each as long as the others
        time_s = (n - 2 + k) / fastest[:k].sum()
        if fastest[k - 1] * time_s >= 1:
            break
    w = np.where(owners, np.maximum(0.0, b * time_s - 1) / (n - 2), 0.0)
    return assess(mix, mix.able, w / w.sum())


# -- The linear programs


def best_shares(mix: Mix, computes: Sequence[bool]) -> Roles:
    """The fastest shares for given roles, exactly. Raises ValueError: these cannot be; ImportError."""
    n, c = mix.n, np.asarray(computes, np.float64)
    if n == 1:
        return assess(mix, computes, [1.0])
    if not c.any():
        raise ValueError("nobody is to compute")
    scale = float(np.median(mix.up))
    each = np.eye(n)
    rows = [
        np.column_stack([np.diag(n - 1 - c), c]),
        np.column_stack([np.diag(c.sum() - c - 1), np.ones(n)]),
    ]
    limits = [mix.up / scale, mix.down / scale]
    i, j = np.nonzero(np.isfinite(mix.pairs))
    if len(i):
        rows.append(np.column_stack([each[i] + c[i, None] * each[j], np.zeros(len(i))]))
        limits.append(mix.pairs[i, j] / scale)
    found = _solve(
        np.append(np.zeros(n), -1.0),
        A_ub=np.vstack(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.append(np.ones(n), -1.0)[None, :],
        b_eq=[0.0],
        bounds=[(0, None if owner else 0) for owner in _owners(mix)] + [(0, None)],
    )
    w = np.maximum(0.0, found[:n]) + 0.0  # no share is -0.0
    if not w.sum() > 0:  # lines so unlike that the solver takes the slow ones for none
        w = _owners(mix) * mix.up
    return assess(mix, computes, w / w.sum())


_SLACK = 1e-3


def even_shares(mix: Mix, computes: Sequence[bool]) -> Roles:
    """Of the fastest shares for given roles those of which the longest block is over soonest.

    Mostly many shares are as fast as ``best_shares``: where the slowest line bounds the crew, others have
    room. For steady streams it makes no difference which of them are taken. In a round (``protocols.rounds``)
    an owner sends its average once its block is whole, so the last block's way comes on top of the streams'
    time. ``w_i / min(up_i, down_i)``, times how often it is sent, is least for the longest.

    Raises ValueError: these cannot be; ImportError.
    """
    n, c = mix.n, np.asarray(computes, np.float64)
    best = best_shares(mix, computes)
    if n == 1:
        return best
    rate = (1 - _SLACK) * best.averaging_per_s * mix.vector_bytes
    scale = float(np.median(mix.up))
    each, m = np.eye(n), c.sum()
    times = (m - c) * rate / scale  # what a share of 1 sends and takes each second
    room = np.minimum(mix.up, mix.down) / scale
    nothing = np.zeros(n)
    rows = [
        np.column_stack([np.diag((n - 1 - c) * rate / scale), nothing]),
        np.column_stack([np.diag((m - c - 1) * rate / scale), nothing]),
        np.column_stack([np.diag(times), -room]),
    ]
    limits = [mix.up / scale - c * rate / scale, mix.down / scale - rate / scale, nothing]
    i, j = np.nonzero(np.isfinite(mix.pairs))
    if len(i):
        rows.append(np.column_stack([(each[i] + c[i, None] * each[j]) * rate / scale, np.zeros(len(i))]))
        limits.append(mix.pairs[i, j] / scale)
    found = _solve(
        np.append(nothing, 1.0),
        A_ub=np.vstack(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.append(np.ones(n), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[(0, None if owner else 0) for owner in _owners(mix)] + [(0, None)],
    )
    w = np.maximum(0.0, found[:n]) + 0.0
    w[w < _SLACK] = 0.0  # it is no more than what the speed was given away for
    return assess(mix, computes, w / w.sum())


def upper_bound(mix: Mix, computes: Sequence[bool]) -> float:
    """Steps a second by the paper's own program, in which receivers need not take an averager's parts alike.

    No crew in these roles is faster. Raises ValueError: they cannot be; ImportError.
    """
    n, c = mix.n, np.asarray(computes, np.float64)
    computing = assess(mix, computes, _owners(mix) / _owners(mix).sum()).computing_per_s
    if n == 1:
        return computing
    scale = float(np.median(mix.up))
    m, size = c.sum(), n + n * n + 1  # y_i, a_ij (i to j), R
    rows: list[Vector] = []
    limits: list[float] = []

    def at_most(limit: float, *terms: tuple[int, float]) -> None:
        row = np.zeros(size)
        for at, factor in terms:
            row[at] += factor
        rows.append(row)
        limits.append(limit)

    a = n + np.arange(n * n).reshape(n, n)
    for i in range(n):
        others = [k for k in range(n) if k != i]
        sends = [(int(a[i, k]), 1.0) for k in others]
        takes = [(int(a[k, i]), 1.0) for k in others]
        at_most(mix.up[i] / scale, *sends, *[(k, c[i]) for k in others])
        at_most(mix.down[i] / scale, *takes, (i, m - c[i]))
        at_most(0.0, (size - 1, 1.0), (i, -1.0), *[(at, -1.0) for at, _ in takes])
        for k in others:
            at_most(0.0, (int(a[i, k]), 1.0), (i, -1.0))
            if math.isfinite(mix.pairs[i, k]):
                at_most(mix.pairs[i, k] / scale, (int(a[i, k]), 1.0), (k, c[i]))
    bounds: list[tuple[float, float | None]] = [(0, None)] * size
    for client in np.flatnonzero(~_owners(mix)).tolist():
        bounds[client] = (0, 0)
    found = _solve(
        np.append(np.zeros(size - 1), -1.0), A_ub=np.array(rows), b_ub=np.array(limits), bounds=bounds
    )
    return min(computing, float(found[-1]) * scale / mix.vector_bytes)


def _solve(objective: Vector, **program: Any) -> Vector:
    """The least of a linear program, by HiGHS. Raises RuntimeError: it finds none."""
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("scipy"):
            raise
        raise ImportError("scipy is not installed; pip install 'ragtag[roles]'") from None
    found = optimize.linprog(objective, method="highs", **program)
    if found.x is None:
        raise RuntimeError(f"no roles were found: {found.message}")
    return np.asarray(found.x, np.float64)


# -- Who computes


def assign(mix: Mix) -> Roles:
    """The fastest roles that are found: who computes, and who averages which share.

    Never slower than ``parameter_server``, ``all_reduce``, ``equal_shares`` and ``simple_rule``. At most
    four linear programs for each peer are solved.

    Raises:
        ImportError: scipy is not installed.
    """
    rules = (parameter_server, all_reduce, equal_shares, simple_rule)
    best = max((rule(mix) for rule in rules), key=lambda roles: roles.steps_per_s)
    candidates = np.flatnonzero(mix.samples > 0)
    room = np.minimum(mix.up, mix.down)
    seen: set[tuple[bool, ...]] = set()
    for key in (mix.samples, room, mix.samples * room, mix.samples / room):
        order = candidates[np.argsort(-key[candidates], kind="stable")]
        for k in range(len(order), 0, -1):
            computes = tuple(np.isin(np.arange(mix.n), order[:k]).tolist())
            if computes in seen or mix.samples[order[:k]].sum() / mix.batch <= best.steps_per_s:
                continue
            seen.add(computes)
            best = max(best, best_shares(mix, computes), key=lambda roles: roles.steps_per_s)
    return best
