"""The measurements of the RPS recipe: the list of jobs, and their results by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.jobs import Job
from ragtag.recipes.rps.faulty import FAULTS, Weights, weights
from ragtag.recipes.rps.theory import (
    Estimate,
    Mixing,
    bursts,
    difference,
    fixed_owner_rps,
    line,
    mixing,
    steady_disagreement,
)
from ragtag.recipes.rps.training import Curve, Setup, train

N = 16
LOSSES = (0.01, 0.05, 0.1, 0.2, 0.4)
SIZES = (4, 8, 16, 32, 64)
SIZES_P = 0.1
STEADY = ((8, 0.1), (16, 0.1), (16, 0.4))
FIXED_P = 0.4
BURST_P, BURST = 0.1, 8.0
"""Loss in bursts: the share that is lost, and the mean length of a burst in datagrams."""
DIVIDED = "gradients, 99 %, divided by n"
_SEED = 1

Key = tuple[bool, str, float]
"""Whether shards are sorted by label, what is averaged, and the share that arrives (1: all-reduce)."""


def measure_mixing(n: int, p: float, owners: str, rounds: int, chunks_per_block: int) -> Mixing:
    """The mixing matrix of RPS with rotating or fixed owners."""
    method = rps if owners == "rotating" else at_once("rps, fixed owners", fixed_owner_rps)
    return mixing(n, line(p), method=method, rounds=rounds, chunks_per_block=chunks_per_block, seed=_SEED)


def measure_bursts(rounds: int) -> Mixing:
    """The mixing matrix of RPS where losses come in bursts."""
    faults = bursts(BURST_P, BURST)
    return mixing(N, faults, method=rps, rounds=rounds, chunks_per_block=32, seed=_SEED)


def measure_steady(n: int, p: float, rounds: int) -> Estimate:
    """The steady disagreement under unit noise."""
    return steady_disagreement(n, line(p), method=rps, rounds=rounds, chunks_per_block=6, seed=_SEED)


def measure_difference(against: str) -> float:
    """The difference between RPS and an all-reduce on a line without loss."""
    other = {"direct": direct, "ring": ring}[against]
    return difference(rps, other, n=N, n_chunks=4 * N, seed=_SEED)


@dataclass(slots=True)
class Results:
    """The measurements.

    mixing: by loss.
    by_n: by the number of peers.
    fixed: with owners that do not rotate.
    steady: the steady disagreement by peers and loss.
    differences: from all-reduce, by its name.
    extras: runs beyond the figure.
    """

    mixing: dict[float, Mixing] = field(default_factory=dict)
    by_n: dict[int, Mixing] = field(default_factory=dict)
    fixed: Mixing | None = None
    bursts: Mixing | None = None
    faulty: dict[str, Weights] = field(default_factory=dict)
    steady: dict[tuple[int, float], Estimate] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    curves: dict[Key, list[Curve]] = field(default_factory=lambda: defaultdict(list))
    extras: dict[str, Curve] = field(default_factory=dict)

    def panels(self) -> dict[tuple[bool, str], dict[float, list[Curve]]]:
        """The figure's four panels: curves by share that arrives."""
        panels: dict[tuple[bool, str], dict[float, list[Curve]]] = defaultdict(dict)
        for (by_label, what, arrival), curves in self.curves.items():
            panels[by_label, what][arrival] = curves
        for by_label in (False, True):  # without loss, plain SGD on models or gradients is the same
            panels[by_label, "gradients"].setdefault(1.0, panels[by_label, "models"][1.0])
        return panels

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "mixing": {str(p): asdict(m) for p, m in self.mixing.items()},
            "alpha2_by_n": {str(n): asdict(m.alpha2) for n, m in self.by_n.items()},
            "steady": {f"n={n}, p={p}": asdict(e) for (n, p), e in self.steady.items()},
            "difference_from_all_reduce": self.differences,
            "bursts": None if self.bursts is None else asdict(self.bursts),
            "faulty": {what: asdict(found) for what, found in self.faulty.items()},
            "curves": [asdict(c) for curves in self.curves.values() for c in curves],
            "extras": {name: asdict(c) for name, c in self.extras.items()},
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make."""

    task: str
    steps: int
    seeds: tuple[int, ...]
    models: tuple[float, ...]
    gradients: tuple[float, ...]
    rounds: int
    sizes: tuple[int, ...]
    complete: bool

    @staticmethod
    def of(*, quick: bool, digits: bool, seeds: int) -> Plan:
        """The figure and all tables; quick: enough of them to see that they hold."""
        task = "digits" if digits else "CIFAR-10"
        if quick:
            return Plan(
                task=task,
                steps=280 if digits else 80,
                seeds=(0,),
                models=(1.0, 0.9, 0.6),
                gradients=(0.99,),
                rounds=24,
                sizes=SIZES[:-1],
                complete=False,
            )
        return Plan(
            task=task,
            steps=600 if digits else 500,
            seeds=tuple(range(seeds)),
            models=(1.0, 0.99, 0.95, 0.9, 0.8, 0.6),
            gradients=(1.0, 0.99, 0.95),
            rounds=60,
            sizes=SIZES,
            complete=True,
        )

    def jobs(self, arrays: Path | None) -> list[Job]:
        """All measurements. arrays: the folder of CIFAR-10's arrays; ``None``: digits."""
        jobs = []
        for p in LOSSES:  # rare losses, and a peer's weight in the mean, need more rounds
            rounds = self.rounds if p < 0.05 or p == FIXED_P else self.rounds // 2
            jobs.append(Job(f"mixing, {p:.0%} lost", measure_mixing, (N, p, "rotating", rounds, 64)))
        jobs.append(Job("fixed owners", measure_mixing, (N, FIXED_P, "fixed", self.rounds, 32)))
        jobs.append(Job("mixing, losses in bursts", measure_bursts, (2 * self.rounds,)))
        jobs += [Job(what, weights, (what,)) for what in FAULTS]
        for n in self.sizes:
            rounds = max(4, self.rounds * 4 // n)
            jobs.append(Job(f"mixing of {n} peers", measure_mixing, (n, SIZES_P, "rotating", rounds, 32)))
        for n, p in STEADY:
            jobs.append(Job(f"disagreement, {n} peers", measure_steady, (n, p, 32 * self.rounds // n)))
        jobs += [Job(f"against {name}", measure_difference, (name,)) for name in ("direct", "ring")]
        for _, setup in self._setups():
            shards = "sorted" if setup.by_label else "IID"
            name = f"{setup.what}, {setup.arrival:.0%} arrive, {shards}, seed {setup.seed}"
            jobs.append(Job(name, train, (setup, arrays)))
        jobs += [Job(name, train, (setup, arrays)) for name, setup in self._extras().items()]
        return jobs

    def sort(self, results: Sequence[Any]) -> Results:
        """The results of ``jobs``, in their order, by name."""
        found, left = Results(), iter(results)
        found.mixing = {p: next(left) for p in LOSSES}
        found.fixed, found.bursts = next(left), next(left)
        found.faulty = {what: next(left) for what in FAULTS}
        found.by_n = {n: next(left) for n in self.sizes}
        found.steady = {key: next(left) for key in STEADY}
        found.differences = {name: next(left) for name in ("direct", "ring")}
        for key, _ in self._setups():
            found.curves[key].append(next(left))
        found.extras = {name: next(left) for name in self._extras()}
        return found

    def _setups(self) -> list[tuple[Key, Setup]]:
        setups = []
        for seed in self.seeds:
            for by_label in (False, True):
                for what, arrivals in (("models", self.models), ("gradients", self.gradients)):
                    for arrival in arrivals:
                        method = "RPS" if arrival < 1 else "all-reduce"
                        setup = Setup(what, method, arrival, by_label, seed, self.steps, n=N)
                        setups.append(((by_label, what, arrival), setup))
        return setups

    def _extras(self) -> dict[str, Setup]:
        if not self.complete or self.task != "digits":
            return {}
        models = Setup("models", "RPS", 0.9, True, 0, self.steps, n=N)
        gradients = replace(models, what="gradients", arrival=0.99)
        return {
            "models, 90 % arrive, blocks lost whole": models,
            "models, 90 %, datagrams lost": replace(models, unit="datagram"),
            "models, 60 %, datagrams lost": replace(models, arrival=0.6, unit="datagram"),
            "models, 90 %, datagrams lost in bursts of 8": replace(models, unit="datagram", burst=8.0),
            "models, 90 %, datagrams lost, short deadlines": replace(
                models, unit="datagram", deadline_s_min=0.0
            ),
            "models, 90 %, datagrams lost, asked for again": replace(
                models, unit="datagram", method="RPS with repair"
            ),
            "models, 90 %, momentum .9, kept local": replace(models, momentum=0.9),
            "models, 90 %, momentum .9, averaged": replace(models, momentum=0.9, momentum_is="averaged"),
            DIVIDED: replace(gradients, divide="n"),
            "gradients, 99 %, datagrams lost": replace(gradients, unit="datagram"),
        }
