"""Every pair of what a crew's optimizer may be asked for trains, or is refused by the table."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults
from ragtag.schedules import SSP, Asynchronous, BackupWorkers, DropCompute, LocalSteps, Matched, Partial
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.asked import asked_of
from ragtag.training.exchange.combine import CLASHES, PUBLISHED, Clash, page
from ragtag.training.optimizer.optimizer import CrewOptimizer

PEERS, STEPS = 4, 12
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "averager": {
        "RPS": {"method": ragtag.RPS()},
        "RPS with repair": {"method": ragtag.RPS(repair=True)},
        "a quorum": {"method": ragtag.RPS(quorum=3)},
        "mixed chunks": {"method": ragtag.RPS(hadamard=4)},
        "measured shares": {"method": ragtag.RPS(shares="measured")},
        "all-reduce": {"method": ragtag.AllReduce()},
        "ring": {"method": ragtag.AllReduce(ring=True)},
        "Moshpit": {"method": ragtag.Moshpit(group=2)},
        "random groups": {"method": ragtag.RandomGroups(group=2)},
        "centre": {"method": ragtag.Centre(Asynchronous())},
        "backup workers": {"method": ragtag.Centre(BackupWorkers(1))},
        "compensated": {"method": ragtag.Centre(Asynchronous(), compensate=0.1)},
    },
    "average": {"models": {"average": "models"}, "gradients": {"average": "gradients"}},
    "when": {
        "every step": {"every": 1},
        "every 3": {"every": 3},
        "partial": {"schedule": Partial()},
        "SSP": {"schedule": SSP(2)},
        "matched": {"schedule": Matched(2)},
        "following": {"schedule": LocalSteps(3, least=2)},
        "DropCompute": {"schedule": DropCompute(2)},
        "both": {"schedule": Matched(2), "every": 2},
    },
    "outer": {
        "outer": {"outer": ragtag.Outer()},
        "fragments": {"outer": ragtag.Outer(fragments=2)},
        "delay": {"outer": ragtag.Outer(delay=2)},
    },
    "compress": {
        "top-k": {"compress": ragtag.TopK(0.5)},
        "corrected": {"compress": ragtag.TopK(0.5, momentum_correction=0.5)},
        "two bits": {"compress": ragtag.TopK(0.5, selection="chunked", values="2bit", decay=0.95)},
    },
    "codec": {"fp32": {"codec": "fp32"}, "bf16": {"codec": "bf16"}, "int8": {"codec": "int8"}},
    "align": {"never": {"align": False}, "aligned": {"align": ragtag.Align(every=2)}},
    "inner": {"momentum": {"momentum": 0.5}},
    "buffers": {"buffers": {"buffers": True}, "no buffers": {"buffers": False}},
    "coherence": {"coherence": {"coherence": ragtag.Coherence()}},
    "weight": {"weight 2": {"weight": 2.0}},
    "overlap": {"overlap": {"overlap": True}},
    "target": {"target": {"target_batch": 64, "weight": 16}},
    "guard": {
        "trimmed": {"guard": ragtag.TrimmedMean(0.25)},
        "clipped": {"guard": ragtag.CentredClipping(0.25)},
    },
}
TRIPLES = [
    {"average": "gradients", "compress": ragtag.TopK(0.5), "align": ragtag.Align(every=2)},
    {"average": "gradients", "codec": "int8", "align": ragtag.Align(every=2)},
    {"average": "gradients", "every": 3, "compress": ragtag.TopK(0.5)},
    {"every": 3, "outer": ragtag.Outer(), "compress": ragtag.TopK(0.5)},
    {"every": 4, "outer": ragtag.Outer(fragments=2, delay=2), "codec": "bf16"},
    {"every": 3, "outer": ragtag.Outer(), "method": ragtag.Moshpit(group=2)},
    {"every": 3, "outer": ragtag.Outer(), "method": ragtag.AllReduce()},
    {"every": 3, "codec": "bf16", "method": ragtag.Moshpit(group=2)},
    {"schedule": Partial(every=2), "codec": "bf16", "method": ragtag.RPS(repair=True)},
    {"every": 4, "method": ragtag.Centre(Asynchronous()), "codec": "bf16"},
    {"schedule": Matched(3), "outer": ragtag.Outer(), "codec": "bf16"},
    {"average": "gradients", "target_batch": 64, "weight": 16, "method": ragtag.AllReduce()},
    {"average": "gradients", "target_batch": 64, "weight": 16, "codec": "int8"},
    {"average": "gradients", "target_batch": 64, "weight": 16, "compress": ragtag.TopK(0.5)},
    {"average": "gradients", "codec": "bf16", "guard": ragtag.TrimmedMean(0.25)},
    {"every": 3, "outer": ragtag.Outer(), "codec": "int8", "guard": ragtag.CentredClipping(0.25)},
    {"every": 3, "outer": ragtag.Outer(fragments=2, delay=1), "method": ragtag.RPS(quorum=3)},
    {
        "schedule": LocalSteps(3, 2),
        "outer": ragtag.Outer(fragments=2, delay=2),
        "method": ragtag.RPS(quorum=3),
    },
]
"""Three at once, as the README and the papers have them."""
LONGER = [
    {"average": "gradients", "target_batch": 64, "weight": 16, **more}
    for more in (
        {"method": ragtag.AllReduce(ring=True)},
        {"method": ragtag.RPS(repair=True), "momentum": 0.5},
        {"align": ragtag.Align(every=2)},
        {"coherence": ragtag.Coherence(), "buffers": False},
    )
]
"""More of them, among the slow tests."""


BESIDE = ("inner", "buffers", "coherence", "weight", "overlap", "target", "guard")
"""What hardly meets the rest: with it pairs are tried among the slow tests."""


def pairs() -> list[Any]:
    """Every two choices that are not of one kind, and each alone."""
    found = [pytest.param(o, id=one) for kind in CHOICES.values() for one, o in kind.items()]
    for first, second in combinations(CHOICES, 2):
        marks = [pytest.mark.slow] if {first, second} & set(BESIDE) else []
        for (one, a), (other, b) in product(CHOICES[first].items(), CHOICES[second].items()):
            found.append(pytest.param({**a, **b}, id=f"{one} + {other}", marks=marks))
    return found


def made(peer: SimulatedTransport, options: dict[str, Any]) -> tuple[nn.Module, CrewOptimizer]:
    options = dict(options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=options.pop("momentum", 0.0))
    return model, CrewOptimizer(sgd, peer, model=model, **options)


def train(peer: SimulatedTransport, options: dict[str, Any]) -> tuple[float, float, torch.Tensor, bool]:
    """The loss before and after, the parameters, and whether each average came."""
    shared: list[bool] = []
    model, optimizer = made(peer, {"on_outcome": lambda o: shared.append(bool(o.averaged.any())), **options})
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    losses = []
    for step in range(STEPS):
        peer.compute()
        at = slice(16 * ((step + peer.me) % 4), 16 * ((step + peer.me) % 4) + 16)
        optimizer.zero_grad()
        loss = (model(x[at]) - y[at]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer._averaged.settle()
    assert len(shared) >= STEPS // 4
    assert sum(shared) > 0.6 * len(shared), "averages of more than one"
    return (
        sum(losses[:4]) / 4,
        sum(losses[-4:]) / 4,
        torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
        all(shared),
    )


def clashes_of(options: dict[str, Any]) -> list[Clash]:
    """What the table says of options; buffers there are unless they say that there are none."""
    options = dict(options)
    momentum, buffers = options.pop("momentum", 0.0), options.pop("buffers", True)
    for other in ("coherence", "weight"):
        options.pop(other, None)
    parameters = [nn.Parameter(torch.zeros(1))]
    given: dict[str, Any] = {"average": "models", "align": True, "overlap": False}
    given |= dict.fromkeys(("schedule", "every", "outer", "codec", "compress", "method", "guard"))
    given |= options
    given["averager"] = given.pop("method")
    recorded: list[Clash] = []
    inner = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ragtag.training.exchange.asked.require_together",
            lambda asked: recorded.extend(c for c in CLASHES if c.holds(asked.with_buffers(buffers))),
        )
        patch.setattr("ragtag.training.exchange.asked.rated", lambda averager, *_: averager)
        asked_of(inner, PEERS, **given, has_model=True)
    return recorded


@pytest.mark.parametrize(
    "options",
    [
        *pairs(),
        *(pytest.param(o, id="triple") for o in TRIPLES),
        *(pytest.param(o, id="longer", marks=pytest.mark.slow) for o in LONGER),
    ],
)
def test_it_trains_or_the_table_says_why_not(options: dict[str, Any]) -> None:
    crew = SimulatedCrew(
        PEERS, Faults(latency_s=0.001, rate_bytes_per_s=1e8), seed=5, cost=ComputeCost(0.05), check=True
    )
    clashes = clashes_of(options)
    if clashes:
        with pytest.raises(ValueError) as caught:
            crew.run(lambda peer: made(peer, options))
        assert any(str(caught.value)[:12] in clash.why or "{" in clash.why[:12] for clash in clashes)
        return
    if "compensate" in repr(options.get("method")) and options.get("momentum"):
        with pytest.raises(ValueError, match="without momentum"):  # what no table of pairs can say
            crew.run(lambda peer: made(peer, options))
        return
    came = [end for end in crew.run(lambda peer: train(peer, options)) if end is not None]
    assert len(came) == PEERS
    for before, after, weights, _ in came:
        assert weights.isfinite().all()
        assert after < before, "it learns"
    if options.get("average") == "gradients":
        alike = [weights for _, _, weights, all_came in came if all_came]
        assert len(alike) > 1
        for weights in alike[1:]:
            assert torch.equal(weights, alike[0]), "all have taken the same steps"
    schema = crew.schemas[channel_of("model")]
    asked = options.get("method")
    if asked is not None and "compress" not in options:
        assert schema.method == asked.name, "and not by another"
    if isinstance(codec := options.get("codec"), str):
        assert schema.codec == codec


def options_of(text: str) -> dict[str, Any]:
    """The options that the page shows, as values."""
    found: dict[str, Any] = eval(f"dict({text})", {"ragtag": ragtag})
    return found


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda recipe: recipe.name)
def test_each_published_recipe_trains_as_it_is_written(recipe: Any) -> None:
    options = options_of(recipe.options)
    options["method"] = options.pop("averager", None)
    assert not clashes_of(options)
    steps = 3 * (options["schedule"].k if "schedule" in options else options["every"])

    def learn(peer: SimulatedTransport) -> tuple[float, float, int]:
        averages: list[Any] = []
        torch.manual_seed(0)
        model = nn.Linear(4, 1536)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2),
            peer,
            model=model,
            samples=lambda: 16 * taken,
            on_outcome=averages.append,
            **options,
        )
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(peer.me))
        y = x.sum(1, keepdim=True)
        losses, taken = [], 0
        while taken < steps:
            taken += 1
            peer.compute()
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer._averaged.settle()
        return losses[0], losses[-1], len(averages)

    crew = SimulatedCrew(8, Faults(latency_s=0.001), seed=5, cost=ComputeCost(0.05), check=True)
    for end in crew.run(learn):
        assert end is not None and end[1] < 0.99 * end[0] and end[2] == 3


def test_each_clash_is_met_by_a_pair() -> None:
    met = {clash.why for options in pairs() for clash in clashes_of(options.values[0])}
    beyond = ("LBFGS", "differences are", "say how many", "Outer(delay=")  # need what no choice here is
    assert [c.why for c in CLASHES if c.why not in met and not any(b in c.why for b in beyond)] == []


def test_the_page_is_of_this_table() -> None:
    shown = Path(__file__).parents[2] / "docs" / "combinations.md"
    assert shown.read_text() == page(), "python -m ragtag.training.exchange.combine > docs/combinations.md"
