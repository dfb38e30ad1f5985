"""Crews' lines, and how fast each rule of roles makes them: the paper's mixes, and random ones.

Rates are those of ``ragtag.optim.roles``: of steady streams, computed and not run. How long rounds take by
shares, ``benchmarks/shares.py`` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean

from ragtag.core.seed import generator
from ragtag.optim.roles import (
    Capacity,
    Mix,
    all_reduce,
    assign,
    best_shares,
    equal_shares,
    parameter_server,
    simple_rule,
    upper_bound,
)

MBIT, VECTOR_BYTES = 1e6 / 8, 1e8
RULES = {
    "parameter server": parameter_server,
    "all-reduce": all_reduce,
    "hivemind's rule": simple_rule,
    "equal shares": equal_shares,
}
RIVALS = ("parameter server", "all-reduce", "hivemind's rule")
"""What the paper compares with."""
PROGRAM, BOUND = "linear program", "the paper's program"


def _workers(mbit: float, many: int) -> tuple[Capacity, ...]:
    return (Capacity(mbit * MBIT, mbit * MBIT, 1.0),) * many


def _auxiliaries(mbit: float, many: int) -> tuple[Capacity, ...]:
    return (Capacity(mbit * MBIT, mbit * MBIT),) * many


MIXES: Mapping[str, tuple[Capacity, ...]] = {
    "16 unlike, 4 auxiliaries": (
        *_workers(200, 4),
        *_workers(100, 8),
        *_workers(50, 4),
        *_auxiliaries(500, 4),
    ),
    "8 at 1 Gb/s": _workers(1000, 8),
    "16 at 200 Mb/s": _workers(200, 16),
    "both": (*_workers(1000, 8), *_workers(200, 16)),
}
"""The paper's, by name."""


@dataclass(slots=True)
class MixRates:
    """How fast a mix is, by rule.

    averages: of ``VECTOR_BYTES``, per minute, where all that can compute do; also of the linear program and
        of the paper's own program, which is an upper bound.
    steps: per minute, where a batch takes as long to compute as to average by hivemind's rule; also of the
        plan, which may leave some out of computing.
    shares: of the linear program, the mean of each kind of peer.
    computing: peers that compute by the plan.
    """

    name: str
    averages: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    computing: int = 0

    @property
    def over_rivals(self) -> float:
        """The linear program's averages over the best rival's."""
        return self.averages[PROGRAM] / max(self.averages[name] for name in RIVALS)


@dataclass(slots=True)
class RandomMixes:
    """What plans came to on random mixes, an entry each.

    over_rules: the plan's steps over the best rule's.
    program_over_rules: the linear program's averages, where all compute, over the best rule's.
    over_brute: of small mixes, the plan's steps over the best of all 2^n.
    fewer: mixes in which the plan leaves some out of computing.
    """

    over_rules: list[float] = field(default_factory=list)
    program_over_rules: list[float] = field(default_factory=list)
    over_brute: list[float] = field(default_factory=list)
    fewer: int = 0


def paper_mix(name: str) -> MixRates:
    """One of the paper's mixes."""
    peers = MIXES[name]
    mix, free = (
        Mix(peers, 1.0, VECTOR_BYTES),
        Mix(peers, 1e-9, VECTOR_BYTES),
    )  # free: computing never bounds it
    best = best_shares(mix, mix.able)
    averages = {rule: 60 * of(mix).averaging_per_s for rule, of in RULES.items()}
    averages |= {PROGRAM: 60 * best.averaging_per_s, BOUND: 60 * upper_bound(free, free.able)}
    balanced = Mix(peers, float(mix.samples.sum()) / simple_rule(mix).averaging_per_s, VECTOR_BYTES)
    plan = assign(balanced)
    steps = {rule: 60 * of(balanced).steps_per_s for rule, of in RULES.items()}
    steps["plan"] = 60 * plan.steps_per_s
    return MixRates(name, averages, steps, shares_by_kind(peers, best.shares), sum(plan.computes))


def shares_by_kind(peers: tuple[Capacity, ...], shares: tuple[float, ...]) -> dict[str, float]:
    """The mean share of each kind of peer."""
    kinds: dict[str, list[float]] = {}
    for peer, share in zip(peers, shares, strict=True):
        what = "worker" if peer.samples_per_s else "auxiliary"
        kinds.setdefault(f"{what} of {peer.up_bytes_per_s / MBIT:.0f} Mbit/s", []).append(share)
    return {kind: fmean(of) for kind, of in kinds.items()}


def random_mix(seed: int) -> Mix:
    """3 to 12 peers of unlike rates, auxiliaries and clients among them."""
    draw = generator(seed, "dedloc mix")
    peers = []
    for _ in range(int(draw.integers(3, 13))):
        up = float(100 * MBIT * draw.lognormal(0, 1))
        samples = 0.0 if draw.random() < 0.2 else float(draw.lognormal(0, 1))
        peers.append(Capacity(up, up * float(draw.choice([1, 1, 5])), samples, bool(draw.random() < 0.2)))
    if all(peer.client for peer in peers):
        peers[0] = replace(peers[0], client=False)
    if not any(peer.samples_per_s for peer in peers):
        peers[-1] = replace(peers[-1], samples_per_s=1.0)
    mix = Mix(tuple(peers), 1.0, VECTOR_BYTES)
    batch = float(mix.samples.sum()) / simple_rule(mix).averaging_per_s * float(draw.lognormal(0, 0.5))
    return Mix(tuple(peers), batch, VECTOR_BYTES)


def random_mixes(many: int, brute_up_to: int) -> RandomMixes:
    """Plans of random mixes beside the best rule, and beside all 2^n where a mix has so few peers."""
    found = RandomMixes()
    for seed in range(many):
        mix = random_mix(seed)
        plan, able = assign(mix), best_shares(mix, mix.able)
        others = [rule(mix) for rule in RULES.values()]
        found.over_rules.append(plan.steps_per_s / max(other.steps_per_s for other in others))
        found.program_over_rules.append(able.averaging_per_s / max(other.averaging_per_s for other in others))
        found.fewer += sum(plan.computes) < sum(mix.able)
        if mix.n <= brute_up_to:
            found.over_brute.append(plan.steps_per_s / brute_force(mix))
    return found


def brute_force(mix: Mix) -> float:
    """Steps a second with the best of all 2^n choices of who computes."""
    choices = [
        computes
        for computes in product((False, True), repeat=mix.n)
        if any(computes) and all(able or not on for on, able in zip(computes, mix.able, strict=True))
    ]
    return max(best_shares(mix, computes).steps_per_s for computes in choices)
