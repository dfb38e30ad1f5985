"""What a guard stops when two of ten peers lie, by named attacks; and what it costs.

    python benchmarks/guard.py                       # everything, 3 seeds
    python benchmarks/guard.py --only cost           # the cost alone

Ten peers train a perceptron on the digits of scikit-learn, in virtual time: each is a ``CrewOptimizer`` over
simulated lines, by RPS. Liars follow the protocol and lie in the gradients by which they step, so that what
they send is false; as owners of blocks they reduce by the rule. Where models are averaged, it is after every
fifth step, and 5 % of all datagrams are lost.

Attacks, on a liar's gradient g: ``flip``: -5 g. ``scale``: 100 g. ``noise``: a normal draw, ten times the
spread of the honest gradients. ``little``: the honest peers' mean less 1.5 of their standard deviations,
value by value ("A Little Is Enough", Baruch et al., NeurIPS 2019, which uses 1.5 on MNIST; its formula gives
0 for two of ten). ``weight``: -5 g, with a claimed weight of a thousand. For ``noise`` and ``little`` liars
know what honest peers compute. Beyond what a guard is for, ``owner``: liars send what is true, and as owners
of blocks tell -5 times the average.

Accuracy is that of the honest peers' models on 360 samples that were held out, the mean over the last steps,
as one model alone errs by a point. Cost is processor time of all peers in virtual time, and that of the rule
alone, in turns with the plain mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ragtag
from ragtag.core.faults import Faults, Loss
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, Outcome, PeerId
from ragtag.protocols.channel.averager import guarded
from ragtag.protocols.rounds.reduce import Values
from ragtag.protocols.rounds.robust import RobustMean
from ragtag.recipes.tasks.digits import digits_data
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from stored import commit, how

RESULTS = Path(__file__).parent / "results" / "guard.json"
PEERS, LIARS = 10, (3, 6)
BATCH, STEPS, RATE, HIDDEN = 16, 200, 0.2, 32
LOOKS, LOOK_EVERY = 10, 3
"""Models that are looked at in the end, and the steps between them."""
ATTACKS = ("none", "flip", "scale", "noise", "little", "weight")
BEYOND = ("none, skewed shards", "owner")
"""What is run beside them, and not judged: honest peers whose data differ, and owners that lie."""
GUARDS: dict[str, RobustMean | None] = {
    "off": None,
    "trimmed": ragtag.TrimmedMean(0.2),
    "clipped": ragtag.CentredClipping(0.2),
}
MODES: dict[str, dict[str, Any]] = {
    "gradients": {"average": "gradients"},
    "models": {"average": "models", "every": 5},
}
GOAL_POINTS = 2.0
Gradients = list[torch.Tensor]


def model_of(seed: int) -> nn.Sequential:
    """A perceptron; the same for all peers. Only one trainer runs at a time, so torch's stream is its own."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


class Data:
    """The batches of each peer and step. skewed: each peer has samples of two classes or so only."""

    def __init__(self, seed: int, skewed: bool) -> None:
        self.x, self.y, self.test_x, self.test_y = digits_data()
        labels = self.y.numpy()
        everything = np.arange(len(labels))
        shards = ragtag.skewed_shards(labels, PEERS, seed=seed) if skewed else [everything] * PEERS
        self._seed, self._shards = seed, shards

    def gradient(self, model: nn.Module, peer: int, step: int) -> Gradients:
        """What a peer's batch of a step says at a model."""
        draw = generator(self._seed, "guard batches", peer, step)
        at = torch.from_numpy(draw.choice(self._shards[peer], BATCH))
        loss = cross_entropy(model(self.x[at]), self.y[at])
        return list(torch.autograd.grad(loss, list(model.parameters())))

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """On samples held out."""
        return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


def lie(attack: str, data: Data, model: nn.Module, peer: int, step: int, seed: int) -> Gradients:
    """What a liar steps by."""
    if attack in ("flip", "scale", "weight"):
        factor = 100.0 if attack == "scale" else -5.0
        return [factor * g for g in data.gradient(model, peer, step)]
    honest = [data.gradient(model, other, step) for other in range(PEERS) if other not in LIARS]
    stacked = [torch.stack(of) for of in zip(*honest, strict=True)]
    if attack == "little":
        return [of.mean(0) - 1.5 * of.std(0) for of in stacked]
    draw = generator(seed, "guard noise", peer, step)
    spread = float(torch.cat([(of - of.mean(0)).flatten() for of in stacked]).std())
    return [
        10 * spread * torch.from_numpy(draw.standard_normal(of.shape[1:]).astype(np.float32))
        for of in stacked
    ]


@contextmanager
def lying_owners() -> Iterator[None]:
    """Liars tell -5 times the average of the blocks that they own, and take it themselves."""
    honest = Values._average

    def lies(self: Values, block: int) -> tuple[Bytes, list[PeerId]]:
        payload, overflown = honest(self, block)
        if self.spec.me not in LIARS:
            return payload, overflown
        mean = self._mean[self.spec.layout.spans[block]]
        mean *= np.float32(-5.0)
        return self.spec.codec.encode(mean), overflown

    Values._average = lies  # type: ignore[method-assign]
    try:
        yield
    finally:
        Values._average = honest  # type: ignore[method-assign]


def trained(mode: str, attack: str, guard: str, seed: int, skewed: bool = False) -> dict[str, Any]:
    """One run of the crew: the honest peers' accuracy, and what their owners say of the shares."""
    data = Data(seed, skewed)
    seen: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def audit(outcome: Outcome) -> None:
        found = outcome.judged
        if found is not None:
            for peer, cut, far in zip(found.peers, found.cut, found.far, strict=True):
                seen[peer in LIARS].append((cut, far))

    def train(peer: SimulatedTransport) -> float:
        model = model_of(seed)
        lying = peer.me in LIARS and attack not in ("none", "owner")
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE),
            peer,
            model=model,
            guard=GUARDS[guard],
            weight=1000.0 if lying and attack == "weight" else 1.0,
            on_outcome=None if lying else audit,
            **MODES[mode],
        )
        looks = []
        for step in range(STEPS):
            peer.compute()
            gradients = (
                lie(attack, data, model, peer.me, step, seed)
                if lying
                else data.gradient(model, peer.me, step)
            )
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            try:
                optimizer.step()
            except ragtag.NotFinite:
                if peer.me in LIARS:  # it has broken its own model, too: it goes on from a new one
                    model.load_state_dict(model_of(seed).state_dict())
                    continue
                return 0.0
            if step >= STEPS - LOOKS * LOOK_EVERY and step % LOOK_EVERY == 0:
                looks.append(data.accuracy(model))
        return statistics.fmean(looks)

    lines = Faults(latency_s=0.002, loss=Loss(0.05) if mode == "models" else None)
    crew = SimulatedCrew(PEERS, lines, seed=seed, cost=ComputeCost(0.05))
    with lying_owners() if attack == "owner" else nullcontext():
        ends = crew.run(train)
    honest = [float(end or 0.0) for peer, end in enumerate(ends) if peer not in LIARS or attack == "none"]
    told = {}
    for name, of in (("liars", seen[True]), ("honest", seen[False])):
        if of and attack != "none":
            cuts, fars = zip(*of, strict=True)
            told[name] = {"cut": round(statistics.fmean(cuts), 3), "far": round(statistics.median(fars), 2)}
    return {"seed": seed, "accuracy": round(100 * statistics.fmean(honest), 2), **told}


def accuracies(seeds: int, attacks: list[str], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of these attacks, in every mode and with every guard. kept: rows of others, which stay."""
    rows = [row for row in kept if row["attack"] not in attacks]
    at = commit()
    for mode in MODES:
        for attack in attacks:
            for guard in GUARDS:
                skewed = attack.endswith("shards")
                runs = [trained(mode, attack.split(",")[0], guard, seed, skewed) for seed in range(seeds)]
                mean = statistics.fmean(run["accuracy"] for run in runs)
                row = {"average": mode, "attack": attack, "guard": guard, "accuracy": round(mean, 2)}
                rows.append(row | {"commit": at, "runs": runs})
                print(f"{mode:9} {attack:20} {guard:8} {mean:6.2f} %  {runs[0].get('liars', '')}", flush=True)
    return rows


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each guard, by how many points an attack brings accuracy below the calm run without guard."""
    of = {(r["average"], r["attack"], r["guard"]): r["accuracy"] for r in rows}
    below = {
        guard: {
            f"{mode}/{attack}": round(of[mode, "none", "off"] - of[mode, attack, guard], 2)
            for mode in MODES
            for attack in ATTACKS
            if (mode, attack, guard) in of
        }
        for guard in GUARDS
    }
    within = {guard: all(points <= GOAL_POINTS for points in of.values()) for guard, of in below.items()}
    found = {"goal_points": GOAL_POINTS, "points_below_calm": below, "all_within_goal": within}
    return found | {"steps": STEPS, "rows": rows}


def rounds_s(rule: RobustMean | None, values: int, rounds: int) -> list[float]:
    """Processor time of each of a crew's rounds of a vector, in virtual time, per peer."""
    method = ragtag.RPS() if rule is None else guarded(ragtag.RPS(), rule)
    times: list[float] = []

    def average(peer: SimulatedTransport) -> None:
        tensor = nn.Parameter(torch.randn(values, generator=torch.Generator().manual_seed(peer.me)))
        inner = torch.optim.SGD([tensor], lr=0.0)
        optimizer = CrewOptimizer(inner, peer, method=method, every=10**9)
        for _ in range(rounds + 1):
            if peer.me == 0:
                times.append(time.process_time())
            optimizer.average()

    SimulatedCrew(PEERS, Faults(latency_s=0.002), seed=1).run(average)
    return [(b - a) / PEERS for a, b in pairwise(times[1:])]


def costs(values: int, repeats: int) -> dict[str, Any]:
    """In turns: rounds of a crew, and the rule alone, by guard."""
    draw = np.random.default_rng(0)
    shares = draw.standard_normal((PEERS, 32, 272)).astype(np.float32)
    weight = np.ones((PEERS, 32), np.float32)

    def alone_s(rule: RobustMean | None) -> float:
        total = np.zeros((32, 272), np.float32)
        began_s = time.process_time()
        for _ in range(20):
            if rule is None:
                for row in shares:
                    total += row
                total *= np.float32(0.1)
            else:
                rule.reduce(shares, weight, 2)
        return (time.process_time() - began_s) / 20

    rounds: dict[str, list[float]] = {name: [] for name in GUARDS}
    alone: dict[str, list[float]] = {name: [] for name in GUARDS}
    for _ in range(repeats):
        for name, rule in GUARDS.items():
            rounds[name] += rounds_s(rule, values, 3)
            alone[name].append(alone_s(rule))
    found: dict[str, Any] = {"values": values, "peers": PEERS, "repeats": repeats}
    for name in GUARDS:
        round_s, rule_s = statistics.median(rounds[name]), statistics.median(alone[name])
        found[name] = {
            "round_cpu_ms_per_peer": round(1e3 * round_s, 2),
            "times_plain_round": round(round_s / statistics.median(rounds["off"]), 2),
            "rule_ns_per_share_value": round(1e9 * rule_s / shares.size, 2),
            "times_plain_rule": round(rule_s / statistics.median(alone["off"]), 1),
        }
        print(f"{name:8} {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    every = (*ATTACKS, *BEYOND)
    parser.add_argument(
        "--attacks", nargs="+", choices=every, default=list(every), help="what is stored of others stays"
    )
    parser.add_argument("--values", type=int, default=1_000_000, help="of the vector whose rounds are timed")
    parser.add_argument("--repeats", type=int, default=5, help="turns of timing")
    parser.add_argument(
        "--only", choices=("accuracy", "cost"), help="measure this; what is stored of the other stays"
    )
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(arguments.out)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    made = how()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "accuracy": lambda: judged(
            accuracies(arguments.seeds, arguments.attacks, kept.get("accuracy", {}).get("rows", []))
        ),
        "cost": lambda: costs(arguments.values, arguments.repeats),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            kept[name] = made | measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept.get("accuracy", {}).get("all_within_goal")))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
